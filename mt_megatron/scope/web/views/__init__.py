"""Data of the page's views: functions of a context and a checked query, which neither listen nor wait.

context     what they share: the recording, the run's folder, caches
run_data    the run, its steps, single series and vectors, alerts
model_data  module tree with small curves, the first NaN, experts
tensors     tiles, thumbnails, summaries and projections of tensors
tokens      tokens with loss, entropy and top k
timeline_reader  spans of a growing trace by step
timeline    slices of scan's trace on one clock
topology    ranks, places and scan's verdicts
registry    name of the data -> function
"""
