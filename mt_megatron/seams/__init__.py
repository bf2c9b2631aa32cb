"""Where features plug in, each place once. Import the module you need; the package imports none by itself.

gemm           the three matrix products of a linear layer, by role
late_wgrad     weight gradients of the output layer that are put off to the end of a step
grouped_gemm   the same for one weight per expert
onednn         fp32 products by oneDNN where MKL is slower
widened        bf16 products by fp32 kernels where torch has no bf16 kernels
events         named begin and end points of a training step
collectives    events of collectives and transfers: group, sequence number, bytes
transport      transfers between stages: upstream's own way, or over a transport of ours
schedule       one call that runs the micro-batches of a step
script         what a script of others does, told to one observer
family         a model family: the functions by which the trainer knows it
taps           modules watched or changed: values, gradients, logits, attention, routers
loss_gradient  gradient of each token's loss, announced before the loss is computed
"""
