"""From text to token shards, and from token shards to samples in a fixed order.

The layer exists so that what a run reads is a function of the input and nothing else: the same text gives the
same bytes on disk, and the same seed gives the same order of samples on any number of ranks.

======================  =================================================================================
``tokenizer``           bytes, or byte-level BPE; how either is saved, named and fingerprinted
``sources``             which files a source names, in which order
``corpus``              which documents the files hold; duplicates and quarantine
``conversation``        instruction data: prompts, answers and messages of a line
``templates``           chat templates: the built-in ones, and which one a name means
``jinja_template``      chat templates in jinja, and where their answers are
``encode``              documents to tokens, and which of them belong to answers
``question``            a prompt as tokens, up to where the answer begins
``stage``               writing a folder so that nothing half-written is ever visible
``shards``              the on-disk format: index, shard files, checks
``writer``              writing shards
``spec``                ``CORPUS.toml``
``split``               which documents are held out
``build``               the embedded engine: corpus to prepared folder
``order``               position in training to sample number
``packing``             which tokens of a shard make up a sample
``dataset``             sample number to tokens, targets and documents
======================  =================================================================================

It needs numpy and pydantic, ``tokenizers`` only for BPE, ``jinja2`` only for
templates in jinja, and never torch.
"""
