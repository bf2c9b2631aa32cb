"""Tensors of a model: names, shapes, shards, and the conversion tables.

state_names     names of optimizer tensors
megatron_names  names in a whole model and keys of a distributed checkpoint
shapes          shape and split dimension by the configuration
shards          shards of a tensor at a tensor-parallel size
mapped_file     a file as tensors that are views of it
table           whole tensors packed and unpacked by a family's rows
sources         Protocols of a source of tensors; a Megatron checkpoint as a source
"""
