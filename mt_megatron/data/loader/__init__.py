"""From indexed files to micro-batches.

batches                  which samples each data-parallel rank gets, in which order: a pure function
                         of the samples consumed
content_digest           a digest of data files that copies in other folders share, without reading
                         them whole
datasets                 Megatron's own GPT datasets and blends, from file prefixes, with an index
                         cache that cannot go stale
queue_depth              how many micro-batches the loader's workers have ready: near none, the
                         training waits for its data
sample_need              whether the training data lasts as long as the run, known before its first
                         step
shared_memory            shared memory that loader workers need, against the size of ``/dev/shm``
sentencepiece_tokenizer  tokens by a SentencePiece ``.model`` file, under Megatron-LM's names for
                         its two ways
tokenizer                tokenizers by the name of their type; Hugging Face's ``tokenizer.json``,
                         and one trained here
"""
