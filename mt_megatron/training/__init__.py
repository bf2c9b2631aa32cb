"""Training: configuration in, checkpoints and metrics out.

config.py        what a run is told: Megatron-Core's own dataclass fields composed with ours
config_core.py   Megatron-Core's fields, read from its source without importing it
config_types.py  text to typed values, and the choices that are made by name
config_yaml.py   one YAML file with sections, and the line of every key
arguments.py     ``load_config``: preset, then YAML, then flags
arguments_megatron.py  Megatron-LM 0.9's argument names that are no field names here
arguments_refused.py   Megatron-LM 0.9's arguments that are refused, and what to do instead
validate.py      every check that needs no process group, all problems at once
"""
