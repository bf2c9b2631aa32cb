"""MegaScope: what happens inside a training, recorded and shown while it runs.

format      wire frames, partial statistics and how they combine
interfaces  what a session is given
watch       what ranks look at and send
session     one rank's watching, from the first step to the last
trainer     what pause, generation and lab need of the program that trains
recording   SQLite file of each node, written and read
sidecar     process beside a node's ranks that writes it
report      page, comparison and state of a recording
control     pause, step, resume and generate at a step boundary
lab         perturbations, and how they are undone
web         live page: server, security, data of its views
"""
