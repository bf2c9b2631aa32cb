"""Distributed checkpoints (torch_dist), without process groups.

metadata       the .metadata file, unpickled to plain descriptions
torch_archive  offsets of tensor data in an archive of torch.save
flattened      flattened tensors of a distributed optimizer
reader         whole tensors from any layout
writer         files and metadata for any layout
"""
