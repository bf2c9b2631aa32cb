"""Findings: the result of a diagnosis.

finding   the record: cause, ranks, steps, cost, confidence, evidence
text      findings in words
recorded  findings that the watcher wrote beside the trace
"""
