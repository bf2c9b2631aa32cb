"""From text to indexed files: ``preprocess`` for any amount of text, ``prepare`` for a small corpus.

corpus              where documents come from, in an order that never changes, and which of them are
                    held out
encode_worker       the process that turns shards into tokens: ``python -m
                    mt_megatron.data.prepare.encode_worker FD``
findings            what was found wrong with documents: the kinds, one record each, and their
                    counts
indexed_files       Megatron's ``.bin``/``.idx`` pair: writing an index without holding it, and
                    checking a pair's sizes
inputs              which files are to be read, in which format, and how they are cut into shards of
                    work
merging             finished shards become one pair of indexed files and one report, in the order of
                    the documents
ngram               unigram and bigram cross-entropy: what counting alone achieves, the line a
                    trained model has to beat
prepare             a corpus becomes a tokenizer, Megatron's indexed files and a manifest: once, and
                    whole or not at all
preprocess          text files become Megatron's indexed data: planned, shared out, merged,
                    published; resumable throughout
preprocess_options  what ``preprocess`` is told, what it tells meanwhile, and what it gives back
preprocess_plan     what an earlier run left under the same prefix: the same result, an unfinished
                    run, or something else
reading             the documents of one shard, and what is wrong with the others: never an
                    exception for bad data
sentences           sentences of a text by one rule, for samples of masked words
sidecar             the JSON file beside indexed data: which tokenizer made it, from what, with what
                    left out
streams             lines and whole texts of plain, gzip and Zstandard files, with bounded memory
                    and honest ends
worker_pool         worker processes that are told when to work, watched while they do, and gone
                    when we are
"""
