"""Trains the unmodified, pip-installed Megatron-Core on other devices; importing this changes nothing.

import mt_megatron
mt_megatron.patch(backend="auto")

cli           one command line: ``mt-megatron``
diverge       the first module at which two runs part
launching     what ``run`` and ``launch`` start
training      a run from its configuration to its figures
convert       checkpoints from one form to another
scan          MegaScan: tracing and diagnosis
scope         MegaScope: recording, live page and perturbation lab
planning      what a configuration builds and costs
models        model families and their names on the Hugging Face Hub
data          text to micro-batches
config        a preset, a YAML file and flags to one configuration
checkpoint    whole or absent, loadable under any layout
_session      what is patched in this process
patches       what is changed in Megatron-Core
fp8           FP8 recipes and quantised products of linears
pipeline      schedules of a pipeline: made, checked, simulated, run, chosen
comm          point-to-point channels between ranks
layers        modules that Megatron-Core lacks
patching      the engine of declared patches
backends      what a device is
seams         where features plug in
parallel      rank layouts
host          the machine that a process runs on
errors        exceptions
near_names    suggestions for slips of the finger
version       of the package
"""

from ._session import backend, compare_plan_across_ranks, patch, patched, report, unpatch
from .version import __version__

__all__ = ["__version__", "backend", "compare_plan_across_ranks", "patch", "patched", "report", "unpatch"]
