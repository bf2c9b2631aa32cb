"""A replay simulator of training runs: traces of up to a thousand ranks, with labels kept elsewhere.

What it makes is called simulated: in ``run.json``, in each file's first note, and wherever it is quoted.

layout       ranks on axes and hosts
job          sizes, speeds, unsteadiness
faults       faults and the step in which they begin
noise        random draws, one generator per purpose
schedule     Megatron-Core's calls of the pipeline schedules, and which can be played together
work         the pieces of a micro-batch
draws        durations of everything in one step
links        latency and bandwidth of every link
ways         groups as arrays of link times
collectives  exits of the members, hop by hop
stops        stopped processes and quotas
hosts        each rank's processor
engine       one step after another; collectives at a step's end
columns      the spans of a step without their times
clocks       offsets, drifts, pings
counters     host counters
rank_files   ``run.json`` and the files of every rank
run          ``simulate``: a whole run
trials       draws of jobs and faults that judge a detector
scores       the verdict on a detector's findings
"""

from .faults import Fault, parse_fault
from .job import Job
from .layout import Layout, parse_layout
from .run import Truth, simulate, with_events, write_truth

__all__ = [
    "Fault",
    "Job",
    "Layout",
    "Truth",
    "parse_fault",
    "parse_layout",
    "simulate",
    "with_events",
    "write_truth",
]
