"""Reactions inside the ranks while training.

agent             a rank's part: notes of stalls, drills, measurements
straggler_policy  measure a straggler, leave with a checkpoint, exclude its host
confirm           paired measurement of suspects (``scan confirm``)
measures          short measurements: compute, memory, disk, exchange
selftest          all ranks and pairs before a run (``scan selftest``)
outliers          measurements that stand out
stacks            Python stacks and pending collectives of a stalled rank
"""
