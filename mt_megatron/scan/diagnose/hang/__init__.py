"""Runs that no longer progress.

hangs      the rank that others wait for, and standstills of all ranks
rank_ends  state and pace at the end of a rank's trace
"""
