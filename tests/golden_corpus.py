"""A small corpus with everything that a preparation meets, and the checksum that every engine must give."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from random import Random

SPLIT_BYTES = 60_000
"""Small splits: the corpus is cut into many."""

CORPUS = {
    "sources": ("text", "a.jsonl", "b.jsonl.gz", "truncated.jsonl.gz", "d.csv"),
    "out": "out",
    "eval_fraction": 0.05,
    "shard_tokens": 100_000,
    "normalize": True,
    "filter": {"min_characters": 10, "max_symbols": 0.5},
    "near_duplicates": True,
    "shuffle": True,
}

SHA256 = "93160730fedb0f22c2bd3bc7e58a7586081f053bc2b56084d7cf233bc999f0cc"
"""Of the prepared corpus, as bytes."""


def write_corpus(folder: Path) -> None:
    """Text, JSON Lines, CSV; duplicates, near-duplicates, a long text, and records that cannot be read."""
    random = Random(7)
    words = [f"w{number}" for number in range(300)]
    words += ["the", "of", "and", "to", "in", "is", "naïve", "café", "Straße"]

    def text(count: int) -> str:
        return " ".join(random.choice(words) for _ in range(count))

    documents = [text(random.randint(5, 200)) for _ in range(400)]
    documents += [documents[3], documents[10], documents[10]]
    documents += [f"{documents[number]} tail words" for number in range(20, 40)]
    documents += ["", "x", "!!! ??? ### $$$", "A\u0301 é\r\nline  \r\nline  \r\n" + text(20)]
    documents += [text(70_000)]  # above 256 Ki characters
    random.shuffle(documents)
    (folder / "text").mkdir(parents=True)
    for number, document in enumerate(documents[:40]):
        (folder / f"text/{number:03d}.txt").write_text(document, encoding="utf-8")
    (folder / "text/long.txt").write_text(text(80_000), encoding="utf-8")
    (folder / "text/not-utf8.txt").write_bytes(b"ok \xff\xfe no")
    lines = [json.dumps({"text": document}) for document in documents[40:250]]
    lines[::50] = ["{broken"] * len(lines[::50])
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    packed = "".join(json.dumps({"text": document}) + "\n" for document in documents[250:300]).encode()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(packed, mtime=0))
    (folder / "truncated.jsonl.gz").write_bytes(gzip.compress(packed.replace(b"w1", b"v1"), mtime=0)[:-200])
    with (folder / "d.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([document] for document in documents[300:])])
