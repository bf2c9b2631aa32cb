"""``mt-megatron scan``: one module per action.

command   the subcommand: declares the actions, explains file errors
report    who held a run up: Markdown, JSON, HTML
status    state of a traced run
trace     trace for a trace viewer, all ranks on one clock
sql       SQL query over a run's trace
level     recording level from the next step on
window    higher recording level for a few steps in every so many
confirm   one second of paired measurement in a running job
inject    real faults in a running job, for drills
selftest  nodes and links before a run
simulate  labelled trace of a simulated run
"""
