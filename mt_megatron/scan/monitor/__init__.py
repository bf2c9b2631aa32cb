"""The watcher: judges a growing trace in a process beside rank 0.

watch               the process: ``python -m mt_megatron.scan.monitor.watch RUN --parent-pid N``
watcher_process     its parent's side: start, restart, end
child_process       a process beside a rank: start, relayed lines, end
incremental_reader  reader of growing segments
alert_policy        which findings are news, which steps they spoil
alerts              log line, ``alerts.jsonl``, webhook (retried, bounded), metrics
metrics_endpoint    metrics in Prometheus text over HTTP
status              ``scan status``: steps, silent ranks, findings so far
"""
