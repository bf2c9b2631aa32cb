"""The recording of a run: one SQLite file a node, written by its sidecar, read as one.

files              where files lie in RUN/scope/, requests and bookmarks
audit              commands, refusals and what the lab does, in RUN/scope/audit.jsonl
lock               one run at a time records to a folder
schema             tables of a node's file, how it is made and opened
checks             frames from ranks, checked before anything is kept
combining          parts of statistics until all came
declared           ranks that send parts of each statistic
tensors            arrays as chunks and overviews
transactions       the writer's transactions, and what waits for a lock
retention          bound of the file
writer             frames into the file
node               one node's file, open to read; sessions of all nodes
order              execution order of modules
data               records that the reader gives
statistic_reading  statistics of all nodes as one
tensor_reading     tensors and token sequences
reader             open_recording: all nodes as one
sql                views over all nodes
"""
