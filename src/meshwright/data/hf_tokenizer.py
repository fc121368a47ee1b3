"""Exports a tokenizer for Hugging Face: ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from typing import Any

from meshwright.data.tokenizer import END_OF_DOCUMENT, BpeTokenizer, Tokenizer

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def hf_tokenizer_text(tokenizer: Tokenizer) -> str:
    """A ``tokenizer.json`` with the same token ids."""
    if isinstance(tokenizer, BpeTokenizer):
        return tokenizer.serialized
    return json.dumps(_byte_tokenizer(tokenizer.end_of_document), ensure_ascii=False, indent=1) + "\n"


def hf_tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``, with the end-of-document token as BOS and EOS."""
    end = tokenizer.end_token if isinstance(tokenizer, BpeTokenizer) else END_OF_DOCUMENT
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


def _byte_tokenizer(end: int) -> dict[str, Any]:
    """The byte tokenizer as a BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end, "content": END_OF_DOCUMENT, **special}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """GPT-2's character for each byte: itself if printable, otherwise from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, others = [], 0
    for byte in range(256):
        letters.append(chr(byte if byte in printable else 256 + others))
        others += byte not in printable
    return letters
