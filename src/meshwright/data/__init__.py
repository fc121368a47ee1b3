"""Training data: from text to token shards, and from token shards to samples in a fixed order.

What a run reads depends only on its input. The same text gives the same bytes on disk, and the same seed
gives the same sample order on any number of ranks.

======================  =================================================================================
``tokenizer``           byte and byte-level BPE tokenizers
``sources``             the files of a source, in order
``files``               kinds of files, decompression, decoding
``records``             the records of JSON, CSV and Parquet files
``digests``             a compact set, to find duplicates
``corpus``              the documents of the files; duplicates and quarantine
``chat``                instruction data: prompts, answers and messages
``chat_templates``      chat templates, built in or by name
``jinja_template``      chat templates in jinja
``encode``              documents to tokens and loss masks
``prompt``              a prompt as tokens, for generation
``staging``             atomic writing of a folder
``shards``              the on-disk format: index, shard files, checks
``shard_writer``        writes shards
``corpus_spec``         ``CORPUS.toml``
``split``               which documents are held out
``prepare``             a corpus to a prepared folder, in one process
``order``               the sample order
``mixture``             which source each sample of a mixture comes from
``packing``             how the tokens of a shard are packed into samples
``dataset``             samples: tokens, targets and document ids
``images``              labelled images
======================  =================================================================================

It needs numpy and pydantic, ``tokenizers`` for BPE, ``jinja2`` for jinja templates, ``pyarrow`` for Parquet
and zstd, and never torch.
"""
