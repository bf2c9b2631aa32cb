"""Upstream's functions emit ``seams.events``.

emitters           layers, collectives, transfers, micro-batches, optimizer steps, their attributes
inner_collectives  collectives inside functions that do more than communicate
"""
