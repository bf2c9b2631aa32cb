"""Point-to-point channels between the ranks of a pipeline.

transport   the interface of channels between ranks
errors      what can go wrong, by name
message     the header of a message
bootstrap   exchange of small bytes before there is a channel; where a rank runs
collective  channels over ``torch.distributed``
"""
