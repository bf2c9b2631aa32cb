"""Pipeline schedules as data: what each rank does in which order, simulated, executed and chosen.

actions       ``Action``, ``Placement`` and ``Schedule``: the intermediate representation
choice        a user's choice of a schedule, as text
compare       schedules side by side under one set of costs
csv_form      schedules as CSV, written and read
draw          a simulated step as text and as SVG
execute       schedules run on Megatron-Core's models
forward_only  the schedule of an evaluation
generate      schedules by name
lowering      transfers and reductions of a schedule
policy        the schedule that fits the times and links of now
simulate      one training step timed: makespan, bubble, memory, slack, bytes over time
sound         whether a schedule keeps every rule, by arrays of its actions
upstream      Megatron-Core's own calls, with blocking exchanges
validate      every rule that a schedule must keep; problems as sentences
"""
