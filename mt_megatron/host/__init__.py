"""The machine that a process runs on; imports neither torch nor Megatron.

limits  memory, shared memory, processors and open files that the process may use, a container's included
"""
