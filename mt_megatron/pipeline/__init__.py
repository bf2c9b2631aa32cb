"""Pipeline schedules as data: what each rank does in which order, simulated, executed and chosen.

actions    ``Action``, ``Placement`` and ``Schedule``: the intermediate representation
csv_form   schedules as CSV, written and read
generate   schedules by name
simulate   one training step timed: makespan, bubble, memory, slack, bytes over time
validate   every rule that a schedule must keep; problems as sentences
choice     a user's choice of a schedule, as text
execute    schedules run on Megatron-Core's models
forward_only  the schedule of an evaluation
"""
