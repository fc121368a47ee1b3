"""Collectives over a channel: what each rank writes to its slot, and what it reads from the others' slots.

All arguments are flat arrays of bytes. A collective that is larger than a slot runs in rounds, one slot each;
the chunks stay in the cache between the write and the read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.parallel.shared_memory.channel import Bytes, Channel
from meshwright.parallel.shared_memory.reduction import Reduce

ALIGNMENT = 64
"""Chunks end at multiples of this many bytes: whole elements of every dtype."""
FLAT_BYTES = 64 << 10
"""Up to this size, every rank of a larger group reduces all elements: one exchange instead of two."""


def barrier(channel: Channel) -> None:
    """Every rank waits until all have called it."""
    channel.pipeline(1, lambda _, __: None, lambda _, __: None)


def all_reduce(channel: Channel, values: Bytes, reduce: Reduce) -> None:
    """Every rank sends its values. Every rank gets their reduction, in place."""
    if channel.size == 2 or len(values) <= FLAT_BYTES:
        _all_reduce_flat(channel, values, reduce)
    else:
        _all_reduce_scattered(channel, values, reduce)


def _all_reduce_flat(channel: Channel, values: Bytes, reduce: Reduce) -> None:
    """Every rank reads all slots, and reduces all elements."""
    chunk, rank = channel.slot_bytes, channel.rank

    def write(index: int, slot: Bytes) -> None:
        part = values[index * chunk : (index + 1) * chunk]
        slot[: len(part)] = part

    def read(index: int, slots: Bytes) -> None:
        part = values[index * chunk : (index + 1) * chunk]
        parts = list(slots[:, : len(part)])
        if rank < 2:  # read before the first sum is written
            parts[rank] = part
        reduce(part, parts)

    channel.pipeline(-(-len(values) // chunk), write, read)


def _all_reduce_scattered(channel: Channel, values: Bytes, reduce: Reduce) -> None:
    """Every rank reduces its share of each chunk, and reads the reduced shares of the others.

    Exchanges alternate: the values of a chunk, and the reduced shares of that chunk.
    """
    size, rank = channel.size, channel.rank
    share = channel.slot_bytes // size // ALIGNMENT * ALIGNMENT
    for begin in range(0, len(values), share * size):
        chunk = values[begin : begin + share * size]
        shares = [chunk[i * share : (i + 1) * share] for i in range(size)]
        _exchange_values(channel, chunk, shares[rank], rank * share, reduce)
        _exchange_shares(channel, shares)


def _exchange_values(channel: Channel, chunk: Bytes, own: Bytes, at: int, reduce: Reduce) -> None:
    def write(_: int, slot: Bytes) -> None:
        slot[: len(chunk)] = chunk

    def read(_: int, slots: Bytes) -> None:
        if len(own):
            reduce(own, slots[:, at : at + len(own)])

    channel.pipeline(1, write, read)


def _exchange_shares(channel: Channel, shares: Sequence[Bytes]) -> None:
    own = shares[channel.rank]

    def write(_: int, slot: Bytes) -> None:
        slot[: len(own)] = own

    def read(_: int, slots: Bytes) -> None:
        for i, share in enumerate(shares):
            if i != channel.rank:
                share[:] = slots[i, : len(share)]

    channel.pipeline(1, write, read)


def reduce_scatter(channel: Channel, output: Bytes, parts: Sequence[Bytes], reduce: Reduce) -> None:
    """Every rank sends a part to each rank. Rank r gets the reduction of all r-th parts."""
    size, rank = channel.size, channel.rank
    share = channel.slot_bytes // size // ALIGNMENT * ALIGNMENT

    def write(index: int, slot: Bytes) -> None:
        for i, part in enumerate(parts):
            if i != rank:
                piece = part[index * share : (index + 1) * share]
                slot[i * share : i * share + len(piece)] = piece

    def read(index: int, slots: Bytes) -> None:
        piece, own = output[index * share : (index + 1) * share], parts[rank]
        own_piece, at = own[index * share : (index + 1) * share], rank * share
        reduce(piece, [own_piece if i == rank else slots[i, at : at + len(piece)] for i in range(size)])

    channel.pipeline(-(-len(output) // share), write, read)


def all_gather(channel: Channel, outputs: Sequence[Bytes], values: Bytes) -> None:
    """Every rank sends its values. Every rank gets the values of all ranks."""
    chunk, rank = channel.slot_bytes, channel.rank

    def write(index: int, slot: Bytes) -> None:
        piece = values[index * chunk : (index + 1) * chunk]
        slot[: len(piece)] = piece
        own = outputs[rank][index * chunk : (index + 1) * chunk]
        own[:] = piece

    def read(index: int, slots: Bytes) -> None:
        for i, output in enumerate(outputs):
            if i != rank:
                piece = output[index * chunk : (index + 1) * chunk]
                piece[:] = slots[i, : len(piece)]

    channel.pipeline(-(-len(values) // chunk), write, read)


def broadcast(channel: Channel, values: Bytes, root: int) -> None:
    """The root sends its values to every rank."""
    chunk, rank = channel.slot_bytes, channel.rank

    def write(index: int, slot: Bytes) -> None:
        if rank == root:
            piece = values[index * chunk : (index + 1) * chunk]
            slot[: len(piece)] = piece

    def read(index: int, slots: Bytes) -> None:
        if rank != root:
            piece = values[index * chunk : (index + 1) * chunk]
            piece[:] = slots[root, : len(piece)]

    channel.pipeline(-(-len(values) // chunk), write, read)


def all_to_all(channel: Channel, outputs: Sequence[Bytes], parts: Sequence[Bytes]) -> None:
    """Rank r sends ``parts[s]`` to rank s, of any size. It gets ``parts[r]`` of every rank s.

    The first exchange also has the sizes, so that all ranks know the number of rounds, and all raise an error
    if two ranks disagree.
    """
    size, rank, room = channel.size, channel.rank, channel.slot_bytes
    outputs[rank][:] = parts[rank]
    sent = [part if i != rank else part[:0] for i, part in enumerate(parts)]
    own = [[len(part) for part in sent], [len(out) if i != rank else 0 for i, out in enumerate(outputs)]]
    used = 2 * 8 * size
    header = -(-used // ALIGNMENT) * ALIGNMENT
    first = room - header
    lengths = np.zeros((size, size), np.int64)

    def write_first(_: int, slot: Bytes) -> None:
        slot[:used].view(np.int64)[:] = np.array(own).ravel()
        _write_from(slot[header:], sent, 0)

    def read_first(_: int, slots: Bytes) -> None:
        sizes = slots[:, :used].view(np.int64).reshape(size, 2, size)
        lengths[:] = sizes[:, 0]
        for source, target in np.argwhere(lengths != sizes[:, 1].T):
            raise RuntimeError(
                f"rank {source} of the group sends {sizes[source, 0, target]} bytes to rank {target} in an "
                f"all-to-all, which expects {sizes[target, 1, source]}"
            )
        read(slots[:, header:], 0)

    def read(slots: Bytes, begin: int) -> None:
        for i, output in enumerate(outputs):
            if i != rank:
                _read_from(slots[i], output, begin, int(lengths[i, :rank].sum()))

    channel.pipeline(1, write_first, read_first)
    rest = max(0, int(lengths.sum(axis=1).max()) - first)
    channel.pipeline(
        -(-rest // room),
        lambda index, slot: _write_from(slot, sent, first + index * room),
        lambda index, slots: read(slots, first + index * room),
    )


def _write_from(slot: Bytes, parts: Sequence[Bytes], begin: int) -> None:
    """Write the bytes of parts, one after the other, from a position on."""
    at, end = 0, begin + len(slot)
    for part in parts:
        low, high = max(begin - at, 0), min(end - at, len(part))
        if low < high:
            slot[at + low - begin : at + high - begin] = part[low:high]
        at += len(part)


def _read_from(slot: Bytes, output: Bytes, begin: int, at: int) -> None:
    """Read what is in a slot of the bytes for this rank.

    Args:
        slot: Has the bytes of a rank from ``begin`` on.
        output: For all of them.
        begin: A position.
        at: The position of the first byte for this rank.
    """
    low, high = max(begin - at, 0), min(begin + len(slot) - at, len(output))
    if low < high:
        output[low:high] = slot[at + low - begin : at + high - begin]
