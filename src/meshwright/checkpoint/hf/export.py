"""Exports a checkpoint as a Hugging Face folder with config, weights and tokenizer, atomically.

A run that started from a Hugging Face folder gives the same kind of folder back: the same files bit for bit,
tensor names and dtypes, except for what training or the caller changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.copying import fetch_small_files
from meshwright.checkpoint.hf.chat_template import add_chat_template
from meshwright.checkpoint.hf.config import build_hf_config, require_hf_form, to_json_bytes
from meshwright.checkpoint.hf.names import (
    HEAD,
    MIXTRAL,
    HfLocation,
    full_name,
    list_hf_locations,
    list_hf_shapes,
)
from meshwright.checkpoint.hf.source import SOURCE_FILE, HfSource, load_source
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import sync_path
from meshwright.core.object_path import AnyPath
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE, hf_tokenizer_config, hf_tokenizer_text
from meshwright.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from meshwright.layout.state_chunks import SELECTION_BIAS, TensorSlice
from meshwright.spec.hf_config import INDEX_FILE, WEIGHTS_FILE, read_config
from meshwright.spec.hf_config_reader import CONFIG_FILE
from meshwright.spec.model import DecoderModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors files."""
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True)
class Exported:
    """The files and sizes of an exported folder."""

    architecture: str
    step: int
    dtype: str
    """Dtype of the weights; several names if they differ."""
    bytes: int
    """Size of the tensors."""
    files: tuple[str, ...]


def export_checkpoint(
    checkpoint: AnyPath,
    out: Path,
    dtype: str | None,
    shard_bytes: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write a folder that transformers loads.

    Args:
        checkpoint: One checkpoint, in a folder or an object store; every file's checksum is verified.
        out: A new or empty folder.
        dtype: A key of ``DTYPES``. None for the dtypes of the folder that the run started from; without one,
            float32.
        shard_bytes: Maximum size of a file, unless a single tensor is larger.
        on_progress: Called with the bytes of the tensors that are converted, and of all.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  (the draft is put beside it, also for "..")
    manifest = read_manifest(checkpoint)
    if (kind := manifest.model.get("architecture")) != "llama":
        rule = "cannot be exported; only decoders can"
        raise UserError(Problem("export-no-hf-form", rule, path="model.architecture", value=kind))
    model = CheckpointReader(checkpoint, manifest).read_model()
    assert isinstance(model, DecoderModel), "selected by its architecture"
    require_hf_form(model)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        rule, fix = "is not an empty folder", "Name a new one"
        raise UserError(Problem("export-out-exists", rule, path=str(out), fix=fix))
    with fetch_small_files(checkpoint, manifest) as folder:
        source, tokenizer = load_source(folder), load_tokenizer(folder)
        if source is not None:
            _require_source_of(folder, source, model)
        dtypes = _choose_dtypes(model, source, dtype)
        if source is None:
            files = _build_files(model, manifest.seq_len, tokenizer, dtype or "float32")
        else:
            files = _keep_files(source, model, manifest.seq_len, tokenizer, dtype)
        files = add_chat_template(files, source, folder, manifest.template)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
        for name, content in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(content)
        total = _write_weights(checkpoint, draft, model, dtypes, shard_bytes, on_progress)
        for written in (path for path in draft.rglob("*") if path.is_file()):
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
    names = sorted({str(of).removeprefix("torch.") for of in dtypes.values()})
    written_files = tuple(sorted(p.name for p in out.iterdir()))
    return Exported(read_config(out).architecture, manifest.step, ", ".join(names), total, written_files)


def _require_source_of(checkpoint: Path, source: HfSource, model: DecoderModel) -> None:
    """Check that the kept files are those of a folder with this model.

    Raises:
        UserError: The config is missing or not one, or the table has tensors that the model does not have.
    """
    try:
        for name in (CONFIG_FILE, *({TOKENIZER_CONFIG_FILE} & source.files.keys())):
            if not isinstance(json.loads(source.files[name]), dict):
                raise ValueError(f"{name} is not an object")
        shapes = list_hf_shapes(model)
        for name, stored in source.tensors.items():
            if stored not in STORED_DTYPES or _stored_as(name, model) not in shapes:
                raise ValueError(f"{name} ({stored}) is not a tensor of the model")
    except (ValueError, LookupError, RecursionError) as error:
        rule, fix = f"cannot be used: {error}", "Use another checkpoint"
        path = str(checkpoint / SOURCE_FILE)
        raise UserError(Problem("checkpoint-broken", rule, path=path, fix=fix)) from None


def _choose_dtypes(model: DecoderModel, source: HfSource | None, dtype: str | None) -> dict[str, torch.dtype]:
    """The tensors to write, under the names of the source if it has weights, and the dtype of each."""
    if source is None or not source.tensors:
        configured = "float32" if source is None else _configured_dtype(_config_of(source))
        return dict.fromkeys(list_hf_shapes(model), DTYPES[dtype or configured])
    return {
        name: STORED_DTYPES[stored] if dtype is None else DTYPES[dtype]
        for name, stored in source.tensors.items()
    }


def _build_files(model: DecoderModel, seq_len: int, tokenizer: Tokenizer, dtype: str) -> dict[str, bytes]:
    """The small files of a model that did not come from a Hugging Face folder."""
    config = build_hf_config(model, seq_len, tokenizer.end_of_document, dtype)
    return {CONFIG_FILE: to_json_bytes(config), **_build_tokenizer_files(model, seq_len, tokenizer)}


def _build_tokenizer_files(model: DecoderModel, seq_len: int, tokenizer: Tokenizer) -> dict[str, bytes]:
    end = tokenizer.end_of_document
    return {
        GENERATION_CONFIG_FILE: to_json_bytes({"bos_token_id": end, "eos_token_id": end}),
        TOKENIZER_CONFIG_FILE: to_json_bytes(hf_tokenizer_config(tokenizer, model.max_positions or seq_len)),
        TOKENIZER_FILE: hf_tokenizer_text(tokenizer).encode(),
    }


def _keep_files(
    source: HfSource, model: DecoderModel, seq_len: int, tokenizer: Tokenizer, dtype: str | None
) -> dict[str, bytes]:
    """The files of the source; those of its tokenizer only if the run was trained with that tokenizer."""
    files, config, changes = dict(source.files), _config_of(source), dict[str, Any]()
    if dtype is not None and dtype != _configured_dtype(config):
        changes["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if model.init_std != config.get("initializer_range", model.init_std):
        changes["initializer_range"] = model.init_std
    if hashlib.sha256(files.get(TOKENIZER_FILE, b"")).hexdigest() != tokenizer.fingerprint():
        end = tokenizer.end_of_document
        changes |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
        kept = (CONFIG_FILE, "LICENSE", "NOTICE")
        files = {name: content for name, content in files.items() if name.startswith(kept)}
        files |= _build_tokenizer_files(model, seq_len, tokenizer)
    if changes:
        files[CONFIG_FILE] = to_json_bytes({**config, **changes})
    return files


def _config_of(source: HfSource) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(source.files[CONFIG_FILE])
    return config


def _configured_dtype(config: dict[str, Any]) -> str:
    """The dtype that a config names; transformers reads a missing one as float32."""
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return named if named in DTYPES else "float32"


def _write_weights(
    checkpoint: AnyPath,
    out: Path,
    model: DecoderModel,
    dtypes: Mapping[str, torch.dtype],
    limit: int,
    on_progress: Callable[[int, int], None],
) -> int:
    """Write one file, or shards with an index; holds one shard at a time. Returns the size in bytes."""
    shapes = list_hf_shapes(model)
    sizes = {
        name: math.prod(shapes[_stored_as(name, model)]) * dtype.itemsize for name, dtype in dtypes.items()
    }
    shards = split_into_shards(sizes, limit)
    weight_map: dict[str, str] = {}
    total, done = sum(sizes.values()), 0
    tensors = _iter_hf_tensors(checkpoint, model, dtypes)
    for number, names in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS_FILE if len(shards) == 1 else several
        save_file({name: next(tensors) for name in names}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        done += sum(sizes[name] for name in names)
        on_progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_FILE).write_bytes(to_json_bytes(index))
    return total


def _stored_as(name: str, model: DecoderModel) -> str:
    """The full name of the tensor that a name in a folder means; a tied head is the embedding."""
    full = full_name(name, model)
    return list_hf_locations(model)["embed.weight"].name if full == HEAD and model.tied_embeddings else full


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
    checkpoint: AnyPath, model: DecoderModel, dtypes: Mapping[str, torch.dtype]
) -> Iterator[Tensor]:
    """The Hugging Face tensors in the order of ``dtypes``, assembled from those of the checkpoint."""
    holders: dict[str, list[tuple[str, HfLocation]]] = {}
    for own, location in list_hf_locations(model).items():
        for name in location.names:
            holders.setdefault(name, []).append((own, location))
    shapes = list_hf_shapes(model)
    saved = CheckpointReader(checkpoint)
    _require_no_bias(checkpoint, set(saved.names()))
    for name, dtype in dtypes.items():
        full, parts = _stored_as(name, model), []
        rows = shapes[full][0]
        for own, location in holders[full]:
            if location.parts:
                whole, first = TensorSlice.full(saved.facts(own).shape), location.parts.index(full) * rows
                parts.append(saved.read(own, whole.rows(first, first + rows)))
            else:
                parts.append(saved.read(own).T if location.transposed else saved.read(own))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        low = tensor.to(dtype).contiguous()
        if not low.isfinite().all():
            rule = f"cannot be written as {str(dtype).removeprefix('torch.')}: {name} is out of range"
            fix = "Use --dtype bfloat16"
            raise UserError(Problem("export-dtype-range", rule, path=str(checkpoint), fix=fix))
        yield low if full == full_name(name, model) else low.clone()  # no shared memory in a file


def _require_no_bias(checkpoint: AnyPath, names: set[str]) -> None:
    """Refuse a model with selection biases, which Mixtral does not have."""
    if SELECTION_BIAS in names:
        rule = f"has no Hugging Face form: {MIXTRAL} selects experts without biases (train.balance_rate)"
        fix = "Train with train.balance_loss instead"
        raise UserError(Problem("export-no-hf-form", rule, path=str(checkpoint), fix=fix))
