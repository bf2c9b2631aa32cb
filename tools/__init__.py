"""Tools of a checkout: not part of the installed package.

scan_simulator  traces of simulated runs with planted faults
scope_page      source of the live page and its build
"""
