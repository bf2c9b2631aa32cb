"""MegaScan: records what every rank does, puts it on one clock, and says who holds the others up.

``records`` what is recorded, ``segments`` the files, ``run_files`` where they lie in a run's folder,
``findings`` what a diagnosis says. Reading and analysing need numpy alone: no torch, no Megatron.
"""
