"""Training data: text becomes Megatron's indexed files, and those become micro-batches.

Any amount of text, by worker processes (``mt-megatron preprocess``):

* ``preprocess``, ``preprocess_options``, ``preprocess_plan``, ``preprocess_publish``: the command.
* ``inputs``, ``streams``, ``reading``, ``findings``: files, their lines, documents, what is wrong with them.
* ``encode_worker``, ``worker_pool``: the processes, and who watches them.
* ``merging``, ``indexed_files``, ``sidecar``: shards into ``.bin``/``.idx``, and what lies beside them.

A whole small corpus in one go (``mt-megatron prepare``):

* ``corpus``: where documents come from and which of them are held out.
* ``prepare``: corpus + tokenizer -> ``train.bin/.idx``, ``valid.bin/.idx``, ``corpus.json``.
* ``ngram``: unigram and bigram cross-entropy, the line that a trained model has to beat.

For both, and for training:

* ``tokenizer``, ``sentencepiece_tokenizer``, ``byte_tokenizer``: by the name of their type.
* ``datasets``: Megatron's GPTDataset and blends over such files.
* ``batches``: which samples each data-parallel rank gets, in which order, and where documents begin.
"""
