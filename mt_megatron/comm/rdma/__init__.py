"""Point-to-point channels between nodes over RDMA verbs.

transport    the channels of one rank
handles      messages as tensors, and waiting for them
engine       the thread that serves all links
link         connection of two ranks and its immediate values
edges        fragments of messages, in and out, on bytes
ring         credits of a ring of slots
verbs        what is needed of verbs, over pyverbs
completions  statuses and events as errors
gpu_direct   rings in a CUDA device's memory
ports        choice of device, port and GID
"""
