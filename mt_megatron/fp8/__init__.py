"""FP8 and FP4 training of linear layers without compiled extensions.

formats       e4m3, e5m2, e2m1 and E8M0: rounding, codes
recipe        recipes as frozen data, presets, what hardware refuses
checks        the fields of ``TransformerConfig``
quantise      tensors as codes and scales
device        casts by a device's own kernels
kernels       what computes the products, and what is installed
bounds        the error that a quantised product may have
products      the exact reference, and the device's kernels
deep_gemm_products  products of block-scaled operands by DeepGEMM
grouped       all experts' rows as codes and scales
grouped_products  products of all experts at once
activation    inputs and output gradients, cast once for each layout
linear        the recipe of one weight, as ``seams.gemm`` calls it
state         the step, histories of magnitudes, what a checkpoint keeps
layers        which layers stay in bf16, and why
attach        which weights of a model compute in FP8
param_gather  the distributed optimizer's all-gather of weights as codes
checkpoint    what a checkpoint of the trainer keeps of it
extra_state   what a checkpoint of a script keeps of it
telemetry     what the casts lose, and demotion to bf16
"""
