"""The folder that ``mt-megatron run`` puts on ``PYTHONPATH``, and nothing else.

sitecustomize  imported by Python at its start: any other sitecustomize, then ours
"""
