"""What the ranks did, side by side: matched operations, steps, statistics.

trace            a run's trace: places, records rank by rank, clocks
rank_operations  communications of one rank: ready, end
matched_ops      communications matched across their ranks
op_table         matched operations of all groups and edges; transfers that share a call
pipeline_steps   pipelines of a run: order, times of stages, delays of links; for the simulator
units            groups and edges whose transfer times are compared
step_features    features of each step of one rank
step_table       steps of all ranks side by side, differences to peers
intervals        unions of intervals and their overlap
robust           robust statistics: medians, spreads, certainty
change_points    change points of a series: binary segmentation
raised_levels    stretches of a series above normal
"""
