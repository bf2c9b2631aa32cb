"""Training data: a corpus becomes Megatron's indexed files, and those become micro-batches.

* ``corpus``: where documents come from and which of them are held out.
* ``tokenizer``: a byte-level BPE trained on the corpus, or any ``tokenizer.json``.
* ``prepare``: corpus + tokenizer -> ``train.bin/.idx``, ``valid.bin/.idx``, ``corpus.json``.
* ``datasets``: Megatron's GPTDataset and blends over such files.
* ``batches``: which samples each data-parallel rank gets, in which order.
* ``ngram``: unigram and bigram cross-entropy, the line that a trained model has to beat.
"""
