"""Runs that no longer progress.

hangs       the rank that others wait for
standstill  hangs in which no rank waits for another
patience    time without an event that counts as a hang
pace        usual time between events
rank_ends   state at the end of a rank's trace
"""
