"""The command ``mt-megatron``: one file per subcommand.

main.py      the entry point, exit codes, how errors are shown
pretrain.py  train
prepare.py   make training data from text
plan.py      exact parameter counts of a model
doctor.py    what this machine has, what would run, what would not
patches.py   list, explain and check the patches
"""
