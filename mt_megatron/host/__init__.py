"""The machine that a process runs on; imports neither torch nor Megatron.

bounds  rates, caches with a bound
peers   who is at the other end of a connection; a listening socket that bounds other users' connections
"""
