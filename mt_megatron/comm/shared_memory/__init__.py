"""Channels between ranks of one machine: rings in anonymous shared memory.

protocol   layout of a ring and the steps of its protocol, as data
ring       one end of a ring: its size and interface
native     the ring through the C helper; how it is built and loaded
plain      the ring in Python alone, on x86-64
memory     anonymous memory of two processes; futexes
peers      connections that pass descriptors and show a peer's death
tensors    tensors as bytes and bytes as tensors
staging    tensors of a device, through pinned memory and side streams
outgoing   the sending end of an edge
incoming   the receiving end of an edge
transport  the transport
"""
