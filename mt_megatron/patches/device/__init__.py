"""Megatron's modules on the active device.

redirection        ``torch.cuda``, ``torch.device`` and factories in Megatron's modules
scope              modules whose calls are redirected
tensor_methods     ``.cuda()``, ``.to('cuda')``, ``.is_cuda``, decided by the calling module
moved_parameters   parameters keep their identity when they move to a PrivateUse1 device
rng                the CPU device's own random number stream
eager_fusions      pointwise fusions without torch.compile
process_groups     one process group for equal ranks over Gloo, freed when destroyed
pending_transfers  tensor and handle of a transfer live until it ends
"""
