"""``torch.distributed`` for communication libraries other than NCCL.

namespace           what Megatron's modules see as ``torch.distributed``
flat_collectives    collectives of one buffer, with NCCL's rules for shapes
uneven_collectives  collectives of a list whose parts differ in size
elastic             rendezvous that an earlier attempt of the job cannot disturb
rendezvous          store that listens on 127.0.0.1 alone
flight_recorder     collectives that were begun and have not ended
"""
