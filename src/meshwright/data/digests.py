"""A set of digests in 8 bytes each, for corpora of many documents."""

from __future__ import annotations

_BUCKETS = 2**16
_BYTES = 8


class DigestSet:
    """Digests, by their first 10 bytes: two for the bucket and eight that are stored in it.

    A Python set takes about 100 bytes per digest. Two of 10^9 random digests agree in 10 bytes with a
    probability of 4e-7.
    """

    def __init__(self) -> None:
        self._buckets: list[bytearray | None] = [None] * _BUCKETS

    def add(self, digest: bytes) -> bool:
        """Add a digest; False if it is there already."""
        number, key = int.from_bytes(digest[:2], "little"), digest[2 : 2 + _BYTES]
        bucket = self._buckets[number]
        if bucket is None:
            self._buckets[number] = bytearray(key)
            return True
        at = bucket.find(key)
        while at >= 0 and at % _BYTES:  # parts of two digests
            at = bucket.find(key, at + 1)
        if at < 0:
            bucket += key
        return at < 0
