"""Diagnosis: separate late arrival from slow transfer, name the culprit.

run             all detectors on a trace, in order
merge_findings  merge duplicate findings, cap each cost
whole_run       findings about the whole run, which blame no rank
late_arrival/   ranks that arrive late at a communication
slow_transfer/  transfers that take long once all ranks have arrived
hops/           a slow link inside a collective
hang/           runs that no longer progress
"""
