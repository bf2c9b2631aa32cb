"""``mt-megatron scope``: one module per action.

command  the subcommand: declares the actions, explains file errors
report   one self-contained HTML page of a run
open     the page on a recording, without training
status   how a recording stands
watch    ask the ranks of a run for tensors and further statistics
control  pause, step, resume, perturb a run; generate with its weights
sql      SQL query over a run's recording
compare  first step and module at which two runs part
"""
