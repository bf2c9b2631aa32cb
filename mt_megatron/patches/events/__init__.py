"""Upstream's functions emit ``seams.events``.

emitters           layers, collectives, transfers, micro-batches, optimizer steps
inner_collectives  collectives inside functions that do more than communicate
attributes         from a call's arguments to an event's attributes
"""
