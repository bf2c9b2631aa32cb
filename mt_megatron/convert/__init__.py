"""Conversion of checkpoints: published (Hugging Face) weights and Megatron's, by tables.

request          what a conversion is asked for, and its outcome
folders          source and destination folders, checked without torch
run_state        optimizer state beside its tensors
output_folder    a folder written file by file, resumed after a kill
checksums        CRC-32 of concatenated data
settings         configuration of the model and the conversion
tensors/         conversion tables, names, shapes and shards of tensors
file_groups      tensors that share a file of a distributed checkpoint
optimizer_state  optimizer tensors by the model's tables
hf/              config.json, safetensors and side files of a published folder
torch_dist/      distributed checkpoints (torch_dist)
rank_files/      checkpoints of one file a rank (torch)
rank_shards      whole tensors into the shards of a live model
inputs           the source: opened, its options and files
output_files     files of each form of a result, planned
run              one conversion: open, verify, compare, plan, write, publish
"""
