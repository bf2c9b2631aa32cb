"""Scripts of others: the choice of a backend, carried into a process and its children.

script           finds and checks the script before an interpreter is started
choice           backend and scope of the patches, as environment variables
startup/         the folder on PYTHONPATH; its ``sitecustomize`` runs in every new interpreter
activation       patches the process when it first imports torch or Megatron
tracebacks       removes the import wrapper and the import hook from tracebacks
dataset_helpers  the compiled dataset helpers of the installed megatron-core
run_of_one       environment variables of a run of one process
"""
