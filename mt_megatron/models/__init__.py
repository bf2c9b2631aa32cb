"""Model families: what to build, a batch, the loss, and Hugging Face's names.

bert        encoders that learn to fill in masked words and to tell the order of sentences
            (arXiv:1810.04805), with the norms before the layers (arXiv:1909.08053)
decoder     what the families of decoders have in common: what to build, what a batch is, the loss,
            its cost
deepseek    the DeepSeek-V2 and V3 family: latent attention, many small experts, some shared, dense
            first layers (arXiv:2405.04434, arXiv:2412.19437)
families    the model family that a configuration names
layer_spec  which of Megatron-Core's layer specs a model is built from: Transformer Engine's, or the
            local one
llama       the Llama family: what to build, a batch, the loss, the cost, Hugging Face's names
mixtral     the Mixtral family: Llama with experts in every layer, of which a token uses two
            (arXiv:2401.04088)
qwen        the Qwen2.5 and Qwen3 family, dense and with experts (arXiv:2412.15115,
            arXiv:2505.09388)
tables/     how the tensors of published models map to Megatron's, one module per family
weights     one row of a table between two naming schemes
"""
