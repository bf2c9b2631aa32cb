"""Commands to a running training: pause, step, resume, generate.

commands        what a command is, the queue of rank 0, the folder to leave them in
control         commands at a step boundary; the pause
ended_commands  what follows where a command fails on some ranks
generate        tokens from the current weights, without a trace in training
"""
