"""``--pipeline-schedule auto``: the schedule that fits the times and links of now, under a memory cap.

situation      what is known of a run: times, links and memory, measured and smoothed
smoothing      means that follow a step change at once
list_schedule  list scheduling of ready tasks on measured times
candidates     schedules to choose from: named ones, and one adapted to the times of now
decide         one decision and its reason
controller     decisions over many steps: when to decide, hysteresis, what a switch brought
exchange       what ranks tell each other about a step
automatic      the source of schedules of a training run; all ranks switch together
decision_log   decisions as JSON lines
explain        decisions in words
"""
