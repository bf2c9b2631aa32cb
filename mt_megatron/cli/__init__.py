"""The command ``mt-megatron``: one file or folder per subcommand.

main        entry point, argument parser, exit codes, how errors are shown
commands    the subcommands, their groups and modules
progress    progress bar of a command

doctor/     what this machine has, what would run, what would not
prepare     make training data from text
preprocess  text, JSONL or Parquet to indexed data files
plan        parameters, operations and memory of a run; layouts that fit a machine
pipeline/   schedules of a pipeline, simulated
pretrain    train a model
launch      start training on this machine or through a scheduler
run         run a script that uses Megatron-Core on another device
scan/       traces of runs
scope/      recordings of runs
fp8         recipes, and which layers of a run compute in them
diverge     first module that differs between two runs
convert     weights from and to Hugging Face
patches     list, explain and check the patches
"""
