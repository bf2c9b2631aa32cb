"""What ranks look at and send: requests, statistics and tensors on the device, the sender.

requests    requests as text, and which modules they match
sums        partial sums of a tensor, on its device
parts       the partial sums of a step, copied to the host at once
tiles       matrices in 8-bit tiles with a stated error
sender      frames to the sidecar: bounded, dropped and counted, never waited for
"""
