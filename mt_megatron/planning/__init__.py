"""Planning: what a configuration builds and costs, before anything is started.

activation_memory   bytes of activations that one micro-batch leaves behind for its backward pass,
                    by recompute mode
activation_options  what the memory of activations depends on beside the model's shape
balance             how many layers each pipeline stage gets so that the slowest one is as fast as
                    can be
build               what is built from a configuration: Megatron-Core's own objects, and the shape
                    to count
cost                estimated time of one training step by part: a stated cost model for ranking
                    layouts, not a measurement
expert_memory       bytes that a feed-forward network keeps for its backward pass: a dense one, and
                    a mixture of experts
flops               floating-point operations of a decoder per token: forward, training, and what is
                    really executed
fp8_report          which linears of a run compute in FP8, in what, and what share of the operations
                    that is
hardware            what ``plan --suggest`` assumes of a machine: published figures of devices, and
                    stated rules of thumb
linears             the linears of a decoder's layers by name, with their sizes and operations,
                    without building anything
layouts             every way to spread a training run over a number of devices, and why some of
                    them are impossible
memory              memory of one training rank in bytes, by part and by pipeline stage, from sizes
                    alone
memory_estimate     the memory that a configuration will need on each rank, computed without torch
                    and without a device
parameter_memory    bytes of weights, gradients and optimizer state on one rank, as Megatron-Core
                    0.9.0 allocates them
parameter_tensors   the parameter tensors of one rank's model chunk, in the order in which
                    Megatron-Core registers them
parameters          exact parameter counts of a decoder by closed form, per module, without building
                    anything
pipeline_costs      what the pipeline simulator is given for a configuration, by the cost model
pipeline_layout     layers of each pipeline stage and chunk that a configuration asks for,
                    ``balanced`` as numbers
shape               the ``ModelShape`` of a configuration's ``model`` section, and of its padded
                    form
suggest             which layouts of a training run fit a device's memory, in the order of the time
                    that they should take
validate/           checks of a configuration that need no process group
"""
