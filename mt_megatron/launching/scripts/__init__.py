"""Scripts of others: the choice of a backend, carried into a process and its children.

script          finds and checks the script, and the variables of a run of one process
choice          backend, scope of the patches and what is recorded, as environment variables
startup/        the folder on PYTHONPATH; its ``sitecustomize`` runs in every new interpreter
activation      patches the process when it first imports torch or Megatron; clean tracebacks
recording       MegaScan and MegaScope beside the script: its steps, losses and updates
script_trainer  the script as pause and lab see it; the group by which its ranks agree
"""
