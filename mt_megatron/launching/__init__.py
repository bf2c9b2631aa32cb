"""Starting processes.

scripts/  scripts that use Megatron-Core, patched without a change (``mt-megatron run``)
jobs/     training jobs on one or many machines (``mt-megatron launch``)
"""
