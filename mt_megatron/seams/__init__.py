"""Where features plug in, each place once: GEMMs, events, the schedule, rank layout, model family.

Import the module you need; this package imports none of them by itself.
"""
