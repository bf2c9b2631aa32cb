"""One simulator of a training step over a pipeline.

costs      ``Costs`` and ``Link``: times, bytes and links of a step
demands    bandwidth and delay with which a schedule still runs at full speed
graph      what every computation, transfer and reduction waits for
memory     activations and bytes that a schedule needs
program    ``Program``: a schedule compiled once and timed many times
rerouted   a lost rank whose micro-batches its replicas take over
timeline   ``Timeline``: begin and end of everything, slack, memory, bytes over time
"""
