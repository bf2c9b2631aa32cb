"""Layers, layer specs and model configuration.

transformer_config  Megatron-Core 0.12's fields in ``TransformerConfig``
block_spec          layers of one model may differ: dense and expert layers, latent attention
stage_layers        uneven numbers of layers per pipeline stage
linear              tensor-parallel linears through ``seams.gemm``
attention           core attention in the local layer spec
context_parallel    context parallelism without Transformer Engine
te_layers           names of Transformer Engine's layers where that is absent
mla                 multi-latent attention
norm                RMSNorm in the local specs; norms under sequence parallelism
swiglu              SwiGLU with fewer passes over memory
rope_scaling        linear, Llama 3.1 and YaRN scaling of rotary positions
rotary_kernel       rotary positions with half of the passes
mtp                 multi-token prediction
cross_entropy       output layer fused with the loss
router              router scores, choice, capacity, balancing
token_dispatcher    token dispatchers by row index
experts             ``GroupedMLP`` without grouped_gemm
moe_ffn             ``moe_ffn_hidden_size``
fp8                 FP8 recipes without Transformer Engine
shared_experts      ``moe_shared_expert_intermediate_size``
"""
