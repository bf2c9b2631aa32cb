"""Runs schedules on Megatron-Core's models.

source           which schedule a step runs: ``set_pipeline_schedule``
agreement        comparison of texts over all ranks
executor         one step of a schedule on this rank
refusals         what a schedule does not fit
reduction        when the data-parallel reduction of a stage starts
random_states    random numbers keyed by stage and micro-batch
step_times       when actions begin and end on this rank
transfer_events  events of transfers for MegaScan
"""
