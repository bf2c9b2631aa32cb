"""The CPU backend.

backend    the ``Backend``: devices, memory, streams, collectives over Gloo
namespace  what Megatron's modules see as ``torch.cuda``
rng        the device's random number stream, beside the host's
streams    streams and events for a device that finishes every operation at once
"""

from .backend import CpuBackend as CpuBackend
