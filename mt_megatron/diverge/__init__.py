"""Find the first module at which two runs of the same step part: two backends, layouts or dtypes.

side.py       what one side is, and which pairs can be compared
processes.py  the processes of a side, over loopback
worker.py     one of them: the same weights, one step, records
record.py     hooks that take outputs and their gradients
place.py      where a rank's part lies in the whole tensor
weights.py    the same for parameters, by Megatron's own description of its sharding
pieces.py     a record, and whole tensors from the pieces of all ranks
compare.py    what differs, by how much, in execution order
report.py     Markdown and JSON;  picture.py  the SVG
"""
