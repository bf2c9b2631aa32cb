"""Recording inside a rank: events, counters, device times -> segments.

recorder         the recorder of a process: start, stop, settings
event_listener   listener of ``seams.events`` at the wanted level
queues           queues between the program's threads and the writer
encoder          events -> packed spans
writer           background thread: encode, append, flush
levels           recording levels, and windows of steps with a higher one
control          control file: change the level while training
instrumentation  what a level adds to the events
host_counters    counters of Linux and of the device beside the spans
device_spans     device times of operations, read back later; the device's clock
module_spans     spans of submodules (level ``full``)
profiler         spans of kernels by torch's profiler (level ``kernel``)
"""
