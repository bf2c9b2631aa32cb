"""Faults made on purpose in a running rank.

faults       descriptions of faults as text and data
inject       start and undo faults
load         extra load: matrix products, writes, child processes
expert_skew  more tokens for one rank's experts
"""
