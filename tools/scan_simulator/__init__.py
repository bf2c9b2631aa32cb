"""A replay simulator of training runs: traces of up to a thousand ranks, with labels kept elsewhere.

What it makes is called simulated: in ``run.json``, in each file's first note, and wherever it is quoted.

layout         where each rank is
job            sizes, speeds, unsteadiness
faults         what is wrong, since when
noise          random draws, a generator per purpose
schedule       1F1B and interleaved pipelines as data
work           a micro-batch in pieces
draws          how long everything of one step takes
links, ways    what each link takes; groups as arrays of times
collectives    who leaves when, hop by hop
across_stages  the collectives at a step's end
stops, hosts   processes that stand still, quotas; each rank's processor
engine         plays a step: waiting follows
columns        the spans of a step without their times
clocks         offsets, drifts, pings
counters       host facts
run_metadata   what a run and its ranks say of themselves
rank_files     the files
run            ``simulate``
trials         draws jobs and faults for judging a detector
scores         how it is judged
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
