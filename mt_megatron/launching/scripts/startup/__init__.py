"""The folder that ``mt-megatron run`` puts on ``PYTHONPATH``; it holds ``sitecustomize`` and nothing else."""
