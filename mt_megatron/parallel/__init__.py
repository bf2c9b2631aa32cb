"""Ranks of a run and what each of them holds.

job        this process within the run: backend, rank, position, sums over all ranks
trainable  this rank's model chunks, optimizer and schedule
"""
