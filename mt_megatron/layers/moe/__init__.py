"""Mixture of experts: router, token dispatch, experts.

router              routing in one pass, from the router_* modules
router_topk         scores, groups, ties: the experts of a token
router_capacity     capacity of an expert
router_losses       load-balancing loss and z-loss; their tracker reduced over all ranks
router_passes       forward passes that count
router_telemetry    load of the experts, summed on the device
expert_bias         bias that balances the experts' load without a loss
permutation         tokens sorted by expert and back
token_dispatch      tokens to the experts' ranks and back
experts             GroupedMLP: weights, forward, all experts of a rank as one autograd function
experts_checkpoint  GroupedMLP in a distributed checkpoint
shared_experts      the expert that every token passes
"""
