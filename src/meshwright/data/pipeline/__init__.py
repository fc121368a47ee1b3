"""The preparation of a corpus as stages that any engine runs, with the output of ``prepare``.

::

    files → splits ──scan──► keys ──────────────────────────► which documents, which side
                               ├─shuffle by digest──► exact duplicates ─┐      │
                               └─shuffle by band────► near-duplicates ──┴──► drops
                                                                               │
    files → splits ──tokenize (BPE trained in the driver)──► token files, rows ◄┘
                                                               └─shuffle by order──► ordered rows
    ordered rows → shards ──write──► shard files ──► index

======================  ============================================================================
``splits``              input splits: parts of files, in the order of the corpus
``scan``                map: what is known of each document from its text
``duplicates``          shuffles: exact and near-duplicates
``assignment``          in the driver: which documents are kept, and their side
``tokenize``            map: documents to tokens; and the sample for BPE
``write``               the order of documents, the bounds of shards, and the map that writes them
``run``                 the stages in order
``wordcount``           the smallest pipeline: words and their counts
======================  ============================================================================

Only keys travel between machines. Text is read twice, tokens are written once and copied into shards.
"""
