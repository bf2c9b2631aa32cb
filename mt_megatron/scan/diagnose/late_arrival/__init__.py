"""Ranks that arrive late at a communication, and why.

own_work      own work longer than that of peers
stages        pipeline stages without peers: own past, time per layer
quota         ranks stopped by a CPU quota
waits         data, checkpoints, pauses
host_work     work on the host's processors: CPU time against wall time
causes        cause of longer own work; usual waits for a processor
late_finding  the finding that a rank arrives late
passing       short disturbances that are over
"""
