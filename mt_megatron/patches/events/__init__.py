"""Upstream's functions emit ``seams.events``, and tell ``seams.script``.

emitters           layers, collectives, transfers, micro-batches, optimizer steps, their attributes
inner_collectives  collectives inside functions that do more than communicate
script             groups, schedules and updates of a script of others, for ``seams.script``
"""
