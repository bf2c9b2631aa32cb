"""Faults made on purpose in a running rank.

faults  descriptions of faults as text and data
links   communication between two ranks that takes longer
inject  start and undo faults, expert skew among them
load    extra load: matrix products, writes, child processes
"""
