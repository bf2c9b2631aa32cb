"""Every exception this package raises on purpose, under one base class."""

from __future__ import annotations


class MtMegatronError(Exception):
    """Base of all errors raised by mt_megatron: catch this to catch them all."""


class PatchError(MtMegatronError):
    """A patch plan could not be applied or reverted; nothing was left half-done."""


class PatchConflictError(PatchError):
    """Two patches claim the same target in a way that cannot be composed, or other code changed it before."""


class PatchTargetError(PatchError):
    """A target, or its source, does not exist where the patch says, or has another shape."""


class PatchImportError(PatchError, ImportError):
    """A patch of a module imported after ``patch()`` failed, so that import failed with it."""


class UpstreamDriftError(PatchError):
    """The installed source of a target differs from the source a patch was written against."""


class UpstreamVersionError(PatchError):
    """A pinned distribution is missing or has another version than the one supported."""


class BackendError(MtMegatronError):
    """A backend is unknown, unavailable here, or was asked for something it cannot do."""


class ConfigError(MtMegatronError):
    """A configuration is wrong; the message says what was found, expected and what to change."""


class DataError(MtMegatronError):
    """Training data is missing, damaged, or does not fit the configuration."""


class CheckpointError(MtMegatronError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the configuration."""


class RunError(MtMegatronError):
    """``mt-megatron run`` was asked for something that is not there; nothing was started."""


class ScanError(MtMegatronError):
    """A trace is missing, damaged, or not what was asked for."""


class NoTraceError(ScanError, ConfigError):
    """What was given holds no trace: wrong use of the command that reads it."""


class ScopeError(MtMegatronError):
    """A recording of MegaScope is missing, damaged, or not what was asked for."""


DIVERGENCE_ADVICE = "Look at this iteration's data, lower --lr, or train in fp32 to see where it starts"
"""What a message about numbers that are not finite proposes."""
