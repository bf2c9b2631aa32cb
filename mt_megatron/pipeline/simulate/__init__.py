"""One simulator of a training step over a pipeline.

costs      ``Costs`` and ``Link``: times, bytes and links of a step
memory     activations and bytes that a schedule needs
program    ``Program``: a schedule compiled once and timed many times
timeline   ``Timeline``: begin and end of everything, slack, memory, bytes over time
"""
