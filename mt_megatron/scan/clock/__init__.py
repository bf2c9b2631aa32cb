"""One clock for all ranks: pings while training, the fit afterwards.

pings           who pings whom, and pings in a thread beside training
ping_wire       ping protocol over a socket
store_messages  messages between ranks through torch's rendezvous store
machine         identity and address of a machine
fit             offsets of all ranks to the reference rank: domains, tree, fallback, residuals
edges           offset between two clocks, from pings
offset_lines    piecewise linear offsets
bindings        events that bind clocks: collectives, transfers, device anchors
causality       smallest corrections after which no effect precedes its cause
"""
