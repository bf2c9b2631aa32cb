"""The machine that a process runs on; imports neither torch nor Megatron.

bounds   rates, caches with a bound
limits   memory, shared memory, processors and open files that the process may use, a container's included
machine  identity of the machine, as far as processes share a clock, process numbers or a folder
peers    who is at the other end of a connection; a listening socket that bounds other users' connections
"""
