"""Formats shared by ranks, sidecars and readers; imports neither torch nor Megatron.

frames      length-prefixed msgpack messages with arrays, over a stream socket
statistics  partial sums of each statistic, how ranks' parts combine, the value made of them
tokens      parts of a tokens frame, each of some words, as one of the whole vocabulary
"""
