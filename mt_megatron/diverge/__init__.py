"""Find the first module at which two runs of the same step part: two backends, layouts or dtypes.

side       what one side is, and which pairs can be compared
processes  the processes of a side, over loopback
worker     one of them: the same weights, one step, records
record     hooks that take outputs and their gradients
place      where a rank's part lies in the whole tensor
weights    the same for parameters, by Megatron's own description of its sharding
pieces     a record, and whole tensors from the pieces of all ranks
compare    what differs, by how much, in execution order
report     Markdown and JSON
picture    the SVG
"""
