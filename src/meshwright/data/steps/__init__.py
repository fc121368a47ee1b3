"""The steps that look at the text of one document: the same functions in every engine.

======================  ============================================================================
``normalize``           Unicode and line ends
``filters``             length, character shares, repetition, language
``near_duplicates``     MinHash and its bands
``examine``             all of them in one pass over a document
======================  ============================================================================

A text comes in pieces (``corpus.split_text``), so that memory does not grow with the document. Engines never
redo a step in SQL: case folding, white space and Unicode versions differ between them.
"""
