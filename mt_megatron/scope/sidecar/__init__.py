"""The process beside a node's ranks: ``python -m mt_megatron.scope.sidecar``.

sidecar  what runs in it and when it ends
ranks    socket and connections
keeper   thread that writes the recording
hub      events, commands, requests and bookmarks for the page
follow   reads the merged recording: events, alerts, sinks
alerts   bands of statistics, first NaN, dead experts
sinks/   TensorBoard, wandb, trackio
process  starts and ends it from a rank
"""
