"""Configuration of a run: from a preset, a YAML file and flags. Imports neither torch nor megatron.

field_kinds            what another value of each option does to a model whose weights are kept: one
                       declaration per option
hub_names              names of models on the Hugging Face Hub where a folder is expected
megatron_lm_arguments  Megatron-LM 0.9's arguments that are no field names here: what each of them
                       sets
model_change           what is said where weights meet a configuration that they were not made with
parse                  ``load_config``: a preset, then one YAML file with sections, then flags with
                       Megatron's names
presets/               published model shapes and their defaults, one YAML file each; see
                       ``names()``
rampup                 sequences per step when the batch size ramps up: a pure function of the
                       samples consumed so far
resolve                values by option name to a ``TrainingConfig``: defaults, and what follows
                       from other values
schema                 what a training run is told: Megatron-Core's own dataclass fields composed
                       with ours
types                  which names can be set, in which section, as which type; and text to typed
                       values
upstream_fields        Megatron-Core's configuration fields, read from its source so that nothing
                       has to be imported
watching               the sections scan and scope
"""
