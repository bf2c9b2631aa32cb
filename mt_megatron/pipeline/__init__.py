"""Pipeline schedules as data: what each rank does in which order, simulated, executed and chosen.

actions    ``Action``, ``Placement`` and ``Schedule``: the intermediate representation
"""
