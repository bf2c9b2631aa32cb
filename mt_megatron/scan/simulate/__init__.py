"""A replay simulator of training runs: traces of up to a thousand ranks, with labels kept elsewhere.

What it makes is called simulated: in ``run.json``, in each file's first note, and wherever it is quoted.

layout       where each rank is             links        what each link takes
job          sizes, speeds, unsteadiness    collectives  who leaves when, hop by hop
faults       what is wrong, since when      schedule     1F1B and interleaved pipelines
noise        random draws per purpose       work         a micro-batch in pieces
draws        one step's durations           engine       plays a step: waiting follows
stops        processes that stand still     columns      a step's spans without times
clocks       offsets, drifts, pings         counters     host facts
rank_files   spans and files                run          ``simulate``
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
