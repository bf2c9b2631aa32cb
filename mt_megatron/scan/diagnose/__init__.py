"""Diagnosis: separate late arrival from slow transfer, name the culprit.

run             all detectors on a trace, in order; findings that blame no rank
merge_findings  merge duplicate findings, cap each cost
hangs           the rank that others wait for when a run no longer progresses; standstills of all ranks
rank_ends       state and pace at the end of a rank's trace
late_arrival/   ranks that arrive late at a communication
slow_transfer/  transfers that take long once all ranks have arrived
hops/           a slow link inside a collective
"""
