"""Which physical device a process means by an index, from CUDA_VISIBLE_DEVICES or MUSA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Sequence

from mt_megatron.backends.telemetry.readings import Unsupported


def physical_index(index: int, variable: str, value: str | None, uuids: Sequence[str]) -> int | Unsupported:
    """The driver's index of the ``index``-th device that the process may use.

    ``value`` is what ``variable`` is set to: numbers, or unique beginnings of UUIDs, separated by commas,
    cut off at the first that names no device, as the driver reads it. None means all of ``uuids``, which
    are the driver's devices in its own order.
    """
    if value is None:
        visible = list(range(len(uuids)))
    else:
        visible = []
        for token in value.split(","):
            found = _device(token.strip(), uuids)
            if isinstance(found, Unsupported):
                return Unsupported(f"{variable}={value}: {found.reason}")
            if found is None:
                break
            visible.append(found)
    if not 0 <= index < len(visible):
        asked = f"device {index} was asked for, but {variable}"
        state = "is not set" if value is None else f"is {value!r}"
        return Unsupported(f"{asked} {state} and the driver has {len(uuids)} device(s)")
    return visible[index]


def _device(token: str, uuids: Sequence[str]) -> int | None | Unsupported:
    if token.startswith("MIG-"):
        return Unsupported("part of a GPU (MIG) has no reading of its own")
    if token.isdecimal():
        return int(token) if int(token) < len(uuids) else None
    matches = [i for i, uuid in enumerate(uuids) if token and uuid.lower().startswith(token.lower())]
    if len(matches) > 1:
        return Unsupported(f"{token} is the beginning of {len(matches)} UUIDs")
    return matches[0] if matches else None
