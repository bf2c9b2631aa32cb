"""The files of a trace in ``RUN/scan/``: layout, reading, writing.

records            fixed-size records: spans, counters, clock pings
names              numbers for strings and process groups
segments           append-only segment files with checksums: write, read
segment_retention  segments of a rank as a ring: rotate, remove the oldest
recording_end      how a rank's recording ended
run_files          names of the files of a run, ``run.json``
permissions        file modes: owner alone, or group-readable
"""
