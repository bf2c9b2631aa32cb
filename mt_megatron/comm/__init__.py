"""Point-to-point channels between the ranks of a pipeline.

transport       the interface of channels between ranks
errors          what can go wrong, by name
message         the header of a message
bootstrap       exchange of small bytes before there is a channel; where a rank runs
collective      channels over ``torch.distributed``
shared_memory   channels between ranks of one machine, over rings in shared memory
rdma            channels between nodes, over verbs
nixl            channels over NIXL
kinds           the transports by name: whether they work here, and how one is made
per_edge        one transport out of several, by edge
choice          which transport carries which edge: ``--p2p-transport``
stage_exchange  Megatron-Core's own transfers over a transport
"""
