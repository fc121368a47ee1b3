"""A checkpoint of a real model of one layer, and a job that can resume it; commands start no rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint_files import build_write
from meshwright.checkpoint.manifest import TensorFacts, read_manifest
from meshwright.checkpoint.tensor_files import DTYPES
from meshwright.data.growth import data_sha256
from saved_checkpoints import load_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v1"
JOB = """
name = "tiny"
checkpoint.dir = "root"
[model]
num_layers = 1
hidden_size = 8
num_heads = 2
num_kv_heads = 1
ffn_size = 16
vocab_size = 257
tied_embeddings = true
[data]
path = "{corpus}"
seq_len = 8
[train]
steps = 3
global_batch = 2
[cluster]
device = "cpu"
devices_per_node = 1
matmul_flops_per_s = 1e11
"""


def save_golden(root: Path, data: Path) -> Path:
    """A checkpoint of two ranks in format 2, of a real model of one layer, as if trained on these data."""
    tensors, manifest = load_tensors(GOLDEN), read_manifest(GOLDEN)
    facts = {name: TensorFacts(DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    writes = [build_write(root, rank, 2, 2, tensors) for rank in (1, 0)]
    writes[1].manifest = replace(
        manifest, version=2, world_size=2, files={}, tensors=facts, data_sha256=data_sha256(data)
    )
    writes[1].small_files = {"tokenizer.json": (GOLDEN / "tokenizer.json").read_bytes()}
    for write in writes:
        write._run()
    assert writes[1].path is not None, writes[1].error
    return writes[1].path
