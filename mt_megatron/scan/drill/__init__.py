"""Faults made on purpose in a running rank.

faults  descriptions of faults as text and data
inject  start and undo faults, expert skew among them
load    extra load: matrix products, writes, child processes
"""
