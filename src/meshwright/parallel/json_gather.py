"""Gathers small values of all ranks as JSON: torch's collectives of objects send pickles, which run code."""

from __future__ import annotations

import json
from typing import Any

import torch

from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.mesh import Mesh

MAX_BYTES = 2**22
"""Longest JSON text of a rank."""


def all_gather_json(value: Any, mesh: Mesh) -> list[Any]:
    """Every rank sends a value and gets those of all ranks, in rank order. Tuples become lists.

    Two all-gathers over the control group: of the lengths, and of the texts, padded to the longest.

    Args:
        value: What JSON can hold; NaN and Inf too.
        mesh: Mesh of this rank.

    Raises:
        ValueError: The text of a rank is longer than ``MAX_BYTES``. All ranks raise it.
    """
    text = json.dumps(value).encode()
    if mesh.control is None:
        return [json.loads(text)]
    lengths = torch.empty(mesh.world_size, dtype=torch.int64, device=mesh.device)
    all_gather_into(lengths, lengths.new_tensor([len(text)]), group=mesh.control)
    sizes: list[int] = lengths.tolist()
    longest = max(sizes)
    if longest > MAX_BYTES:
        raise ValueError(f"rank {sizes.index(longest)} has {longest} bytes; at most {MAX_BYTES} are sent")
    padded = text.ljust(longest)
    own = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(mesh.device)
    gathered = own.new_empty(mesh.world_size * len(own))
    all_gather_into(gathered, own, group=mesh.control)
    texts = bytes(gathered.cpu().numpy())
    return [json.loads(texts[rank * len(own) :][: len(own)]) for rank in range(mesh.world_size)]
