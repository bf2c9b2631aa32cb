"""Transfers that take long once all ranks have arrived.

slow_units    groups and edges slower than peers, or than before; steps left out
starved       slow transfers that a busy host explains
link_views    one slow group or edge and its candidate links
links         smallest set of links, nodes and groups that explains the slow units
beside_hosts  slow links beside ranks with a busy host
"""
