"""Layers that replace Megatron-Core's own when it is patched; they import the seams only.

transformer_fields  the fields that TransformerConfig gains
mlp_width           width of an MLP: dense, routed or shared expert
swiglu              SwiGLU without a compiler
linear              tensor-parallel linears over the GEMM seam
norm                RMSNorm and LayerNorm without Apex and Transformer Engine
stage_layers        the layers that this rank's model chunk builds
attention/          core attention, context parallelism, packed documents
rope/               rotary embedding: frequencies, scaling, rotation
loss/               output layer and cross-entropy in one, in blocks of tokens
moe/                router, token permutation and dispatch, grouped and shared experts
mla/                multi-latent attention
block_spec          specs of a block whose layers differ: experts or dense, kind of attention
te/                 names of Transformer Engine's layers where that is absent
mtp/                multi-token prediction
shared_embedding    weights of the first and the last stage where both are on one rank
transformer_checks  checks of the added fields
"""
