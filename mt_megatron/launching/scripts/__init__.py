"""Scripts of others: the choice of a backend, carried into a process and its children.

script      finds and checks the script, and the variables of a run of one process
choice      backend and scope of the patches, as environment variables
startup/    the folder on PYTHONPATH; its ``sitecustomize`` runs in every new interpreter
activation  patches the process when it first imports torch or Megatron; clean tracebacks
"""
