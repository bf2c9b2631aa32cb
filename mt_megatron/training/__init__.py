"""Training: configuration in, checkpoints and metrics out.

config.py        what a run is told: Megatron-Core's own dataclass fields composed with ours
config_core.py   Megatron-Core's fields, read from its source without importing it
config_types.py  text to typed values, and the choices that are made by name
config_yaml.py   one YAML file with sections, and the line of every key
arguments.py     ``load_config``: preset, then YAML, then flags
arguments_megatron.py  Megatron-LM 0.9's argument names that are no field names here
arguments_refused.py   Megatron-LM 0.9's arguments that are refused, and what to do instead
validate.py      every check that needs no process group, all problems at once
distributed.py   the processes of a run: who this one is, the groups it joins, its random numbers
model.py         model chunks, optimizer and schedule of one rank, wired together
lr.py            learning rate and weight decay over a run
step.py          one optimizer step, and what all ranks agree on about it
evaluate.py      validation: the same tokens every time, each counted once
checkpoint.py    whole or absent, loadable under any layout; rng.py: a rank's random states
preflight.py     the checks that need the device or an earlier checkpoint
field_kinds.py   what another value of each option does to given weights; model_change.py: what is said of it
output.py        everything a run says: display.py (panel.py, terminal.py), records.py with its places
                 (metrics.py, tensorboard.py, wandb.py), throughput.py, communication.py, picture.py;
                 summary.py: the lines at the end
loop.py          a run from its configuration to its figures
data/            a corpus to micro-batches
"""
