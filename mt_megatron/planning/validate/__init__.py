"""Checks of a configuration that need no process group; ``training.validate`` runs all of them.

environment  checks of the variables by which torchrun tells a process who it is
experts      checks of experts, of how they divide over processes, and of the fields that are added
             to upstream's
files        checks of what the configuration names on disk: data, tokenizer, checkpoints and how
             they are kept
fp8          checks of FP8 recipes that need no device
model        checks of the model's shape that hold for any number of processes
parallel     checks of how model and batch divide over processes, pipeline stages and nodes
rampup       checks of a batch size that ramps up, at every size it will have
schedule     checks of the pipeline schedule that is asked for
supported    checks before all others: backend installed, numbers within limits, no option that is
             not offered
train        checks of batches, steps, schedule, optimizer and precision
"""
