"""Tools of a checkout: not part of the installed package.

class_fields    writer of the table of entries that transformers' classes read
scan_simulator  traces of simulated runs with planted faults
scope_page      source of the live page and its build
"""
