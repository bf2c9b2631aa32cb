"""Point-to-point channels between the ranks of a pipeline.

transport   the interface of channels between ranks
collective  channels over ``torch.distributed``
"""
