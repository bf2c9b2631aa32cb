"""What a device is.

base            the Protocol that every backend implements
registry        which backends exist, which one to use
current         the backend in force, for packages below the session
cpu/            the CPU with Gloo: the reference, and the default
cuda            NVIDIA GPUs with NCCL: nothing is redirected
musa/           Moore Threads GPUs with MCCL, on torch_musa
distributed/    ``torch.distributed`` for libraries other than NCCL
telemetry/      power, temperature, memory, utilisation of a device or the host
namespace       module-like views: ``torch`` with some names answered differently
translate       CUDA's device names, translated to the active backend's
threads         threads of a rank, which begin on its device
host_process    threads and freed memory of a training process
loader_workers  data loader workers that ignore the signals to save and end
dtypes          devices without float64; ``torch.histc`` of integers
torch_version   torch versions whose behaviour differs
"""
