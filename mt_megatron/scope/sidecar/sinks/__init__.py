"""Numbers of the recording to other tools; the sidecar writes to them, never a rank.

base         interface of sinks; made of the texts of --sink
queued       a sink in a thread of its own
tensorboard  event files, through the package tensorboard alone
wandb        Weights & Biases
trackio      Trackio
"""
