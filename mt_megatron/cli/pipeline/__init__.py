"""``mt-megatron pipeline``: one module per action.

command   the subcommand: declares the actions
setting   what is simulated: a traced run, a configuration, a cluster, or sizes and times by hand
simulate  one schedule: step, bubble, memory, links
draw      one schedule as text, SVG or CSV
compare   all schedules side by side
explain   what ``auto`` decided in a run, why, and what it brought
"""
