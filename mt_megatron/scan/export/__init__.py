"""Traces for other tools.

chrome        Chrome trace event format
pftrace       Perfetto protobuf and its wire format
tracks        tracks of a rank in a trace viewer
rank_stream   records of a rank in pieces of whole steps
export_index  first pass over a trace: steps, matched transfers
sql           a trace as Parquet files, and SQL on them (DuckDB)
output_file   output that appears whole or not at all
"""
