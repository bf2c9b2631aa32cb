"""A rank's side of the recording: requests, statistics and tensors on the device, the sender.

requests        requests as text, and which modules they match
sums            partial sums of a tensor, on its device
scalars         results of single kernels that the host puts together
deferred        scalars of a step's calls, kept on the device until its end
parts           the partial sums of a step, copied to the host at once
shares          which part of a tensor a rank answers for
attention_rows  rows of attention computed again from captured queries and keys
parameters      norms of gradients, weights and updates by layer
defaults        the statistics of every sampled step
asked           what requests ask for
head            logits of asked tokens; the logit lens
sampled_step    a sampled step: its open taps, and what they have seen
tiles           matrices in 8-bit tiles with a stated error
tensors         the tensors of a step, encoded and framed
outbox          what was seen of a step, as parcels for the sender
host_copies     copies on the host, made while the device goes on
sender          frames to the sidecar: bounded, dropped and counted, never waited for
"""
