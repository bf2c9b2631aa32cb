"""``torch.distributed`` for communication libraries other than NCCL.

namespace        what Megatron's modules see as ``torch.distributed``; NCCL's rules for shapes
rendezvous       rendezvous of a job's attempt; a store that listens on 127.0.0.1 alone
flight_recorder  collectives that were begun and have not ended
"""
