"""Megatron-Core's own unit tests, out of a checkout that the user names, under ``mt-megatron run``.

ranks    the script under ``run``: imports once, and is forked into the ranks of every file
run      files one after the other, the state that a later run goes on from, the command line
reasons  the reviewed reasons of tests that do not pass, and what they leave unexplained
table    what was found, as markdown
"""
