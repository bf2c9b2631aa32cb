"""``mt-megatron doctor``.

command  the subcommand: gathers the report, prints it, sets the exit code
host     facts about the machine and its Python that need neither torch nor Megatron
probe    runs in its own process: torch, backends, patches
cards    accelerators of this machine and their abilities
"""
