"""Point-to-point channels over NIXL, NVIDIA's transfer library (UCX below it).

transport  the channels of one rank
agent      writes and notifications of a NIXL agent, in the form of verbs
"""
