"""Exports a checkpoint as a Hugging Face folder with config, weights and tokenizer, atomically."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.hf.config import build_hf_config, require_hf_form
from meshwright.checkpoint.hf.names import MIXTRAL, HfLocation, list_hf_locations, list_hf_shapes
from meshwright.checkpoint.manifest import MODEL_FILE, SELECTION_BIAS, read_manifest
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import sync_path
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE, hf_tokenizer_config, hf_tokenizer_text
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.spec.hf_config import INDEX_FILE, WEIGHTS_FILE
from meshwright.spec.hf_config_reader import CONFIG_FILE
from meshwright.spec.model import DecoderModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    architecture: str
    step: int
    bytes: int
    """Size of the tensors."""
    files: tuple[str, ...]


def export_checkpoint(checkpoint: Path, out: Path, dtype: str, shard_bytes: int) -> Exported:
    """Write a folder that transformers loads.

    Args:
        checkpoint: Folder of one checkpoint; every file's checksum is verified.
        out: A new or empty folder.
        dtype: A key of ``DTYPES``.
        shard_bytes: Maximum size of a file, unless a single tensor is larger.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  (the draft is put beside it, also for "..")
    manifest = read_manifest(checkpoint)
    if (kind := manifest.model.get("architecture")) != "llama":
        rule = "cannot be exported; only decoders can"
        raise UserError(Problem("export-no-hf-form", rule, path="model.architecture", value=kind))
    model = DecoderModel(**manifest.model)
    architecture = require_hf_form(model)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        rule, fix = "is not an empty folder", "Name a new one"
        raise UserError(Problem("export-out-exists", rule, path=str(out), fix=fix))
    tokenizer = load_tokenizer(checkpoint)
    end = tokenizer.end_of_document
    texts = {
        CONFIG_FILE: build_hf_config(model, manifest.seq_len, end, dtype),
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        TOKENIZER_CONFIG_FILE: hf_tokenizer_config(tokenizer, model.max_positions or manifest.seq_len),
    }
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
        for name, content in texts.items():
            (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (draft / TOKENIZER_FILE).write_bytes(hf_tokenizer_text(tokenizer).encode())
        total = _write_weights(checkpoint, draft, model, DTYPES[dtype], shard_bytes)
        for written in draft.iterdir():
            written.chmod(0o644)  # safetensors creates files that only their owner can read
            sync_path(written)
        sync_path(draft)
        draft.rename(out)
        sync_path(out.parent)
    except (OSError, SafetensorError) as error:  # SafetensorError: for example a full disk
        rule = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UserError(
            Problem("export-not-writable", rule, path=str(out), fix="Name another folder")
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(architecture, manifest.step, total, tuple(sorted(p.name for p in out.iterdir())))


def _write_weights(checkpoint: Path, out: Path, model: DecoderModel, dtype: torch.dtype, limit: int) -> int:
    """Write one file, or shards with an index; holds one shard at a time. Returns the size in bytes."""
    shapes = list_hf_shapes(model)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = split_into_shards(sizes, limit)
    weight_map: dict[str, str] = {}
    tensors = _iter_hf_tensors(checkpoint, model, dtype)
    for number, names in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS_FILE if len(shards) == 1 else several
        save_file({name: next(tensors)[1] for name in names}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def split_into_shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, split where the next tensor would exceed the limit."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _iter_hf_tensors(
    checkpoint: Path, model: DecoderModel, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors in the order of ``list_hf_shapes``, assembled from those of the checkpoint."""
    holders: dict[str, list[tuple[str, HfLocation]]] = {}
    for own, location in list_hf_locations(model).items():
        for name in location.names:
            holders.setdefault(name, []).append((own, location))
    with safe_open(checkpoint / MODEL_FILE, framework="pt") as file:
        _require_no_bias(checkpoint, set(file.keys()))
        for name, (rows, *_) in list_hf_shapes(model).items():
            parts = []
            for own, location in holders[name]:
                if location.parts:
                    first = location.parts.index(name) * rows
                    parts.append(file.get_slice(own)[first : first + rows])
                else:
                    parts.append(file.get_tensor(own).T if location.transposed else file.get_tensor(own))
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
            low = tensor.to(dtype).contiguous()
            if not low.isfinite().all():
                rule = f"cannot be written as {str(dtype).removeprefix('torch.')}: {name} is out of range"
                fix = "Use --dtype bfloat16"
                raise UserError(Problem("export-dtype-range", rule, path=str(checkpoint), fix=fix))
            yield name, low


def _require_no_bias(checkpoint: Path, names: set[str]) -> None:
    """Refuse a model with selection biases, which Mixtral does not have."""
    if SELECTION_BIAS in names:
        rule = f"has no Hugging Face form: {MIXTRAL} selects experts without biases (train.balance_rate)"
        fix = "Train with train.balance_loss instead"
        raise UserError(Problem("export-no-hf-form", rule, path=str(checkpoint), fix=fix))
