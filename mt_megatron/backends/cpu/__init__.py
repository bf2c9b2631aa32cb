"""The CPU backend.

backend    the ``Backend``: devices, memory, streams, collectives over Gloo
namespace  what Megatron's modules see as ``torch.cuda``: streams, memory, properties
rng        the device's random number stream, beside the host's
"""

from .backend import CpuBackend as CpuBackend
