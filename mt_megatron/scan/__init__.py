"""MegaScan: trace every rank, put all traces on one clock, name who delays the run.

A room imports only rooms below it in this table (``tests/test_layering.py``). Reading and analysing need
numpy alone: neither torch nor Megatron.

session   context manager: trace a training from its begin to its end
respond   reactions while training: measurements, self-test, exclusion of a host
drill     faults made on purpose, for drills and tests
monitor   the watcher: judge a growing trace, alerts, status
report    report of a run: JSON, Markdown, HTML
export    traces for other tools: Chrome, Perfetto, Parquet and SQL
diagnose  who delays the run, and why
findings  the result of a diagnosis: data, words, findings on record
analysis  operations matched across ranks, tables of steps, statistics
clock     clocks of all ranks: measure while training, fit afterwards
record    recording inside a rank
format    the files of a trace
"""
