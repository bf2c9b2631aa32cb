"""A slow link inside a collective, localised by its members' exit times.

exit_evidence  maximum likelihood over exit-time residuals
pair_evidence  slow pair of an all-to-all
ring_patterns  pattern of exits per slow hop of a ring
ring_networks  expected exits of a healthy ring
ring_evidence  slow hops of a ring
where_slow     slow place in a group, against other times and similar groups
hidden_links   slow links that lengthen no collective
slow_rings     slow links without comparable groups
side_effects   pairs told by exits alone, beside another fault
"""
