"""The command ``mt-megatron``: one file or folder per subcommand.

main                 entry point, exit codes, how errors are shown
commands             the subcommands, their groups and modules
parser               argument parser: suggests the option that was probably meant
progress             progress bar of a command
convert_progress     progress of ``convert``
preprocess_progress  progress of ``preprocess``

doctor/              what this machine has, what would run, what would not
prepare              make training data from text
preprocess           text, JSONL or Parquet to indexed data files
plan                 parameters, operations and memory of a run
plan_suggest         ranked layouts that fit a machine
pretrain             train a model
launch               start training on this machine or through a scheduler
run                  run a script that uses Megatron-Core on another device
scan/                traces of runs
diverge              first module that differs between two runs
convert              weights from and to Hugging Face
patches              list, explain and check the patches
"""
