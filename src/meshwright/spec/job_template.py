"""A commented job file for a model, its data and the devices."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.spec.load import apply_on
from meshwright.spec.paths import BUILTIN
from meshwright.spec.presets import read_preset

LARGE = 1024
"""Hidden size from which a preset gets a long sequence and bf16."""
TEMPLATE = """\
# A job for meshwright. All keys: docs/job-file.md, or meshwright schema.
#   meshwright plan {file}     predicts memory and step time, and chooses a layout
#   meshwright train {file}    trains, and audits the run against the plan

[model]
{model}

[cluster]
{cluster}

[data]
{data}

[train]
steps = {steps:<18} # optimizer steps
global_batch = {batch:<11} # samples per step, over all ranks
lr = {lr:<21} # peak learning rate
warmup = {warmup:<17} # steps of linear warm-up; a cosine schedule follows
precision = {precision:<14} # fp32, bf16, fp16 or fp8
eval_every = {eval_every:<13} # steps between evaluations on held-out data

[checkpoint]
every_minutes = 30.0       # there is always one at the end
keep_last = 2

# [layout]                 # left out: the planner chooses. Any degree fixes the layout:
# dp_shard = 8             # ZeRO (FSDP); dp_replicate is DDP; tp, pp, cp and ep are the other axes
# recompute = "selective"  # activation checkpointing: none, selective or full
"""


@dataclass(frozen=True)
class DataFields:
    """How the records of data are read."""

    template: str | None = None
    """Chat template of conversations."""
    text_field: str | None = None
    """Field with the text; ``text``, the default, is not written."""


def write_job_text(
    model: str, data: str | None, devices: str, out: Path, fields: DataFields | None = None
) -> str:
    """The text of a job file that loads, plans and trains as it is.

    Args:
        model: A model preset, or a Hugging Face folder.
        data: Text, a prepared folder, or images; None for built-in data.
        devices: ``local`` for the devices of this machine, a number of them, or a cluster such as
            ``8x8xh100-sxm``.
        out: The file; paths in it are relative to its folder.
        fields: How its records are read; plain text if left out.

    Raises:
        UserError: The model is neither a preset nor a folder, or the devices are not understood.
    """
    if Path(model).is_dir():
        kind, length = "fine-tune", _longest(Path(model))
        named = f"hf = {_quote(_seen_from(model, out))}"
        note = "weights and tokenizer come from this folder"
    else:
        preset = read_preset("models", model)
        if isinstance(preset, Problem):
            rule, fix = "is neither a model preset nor a Hugging Face folder", preset.fix
            raise UserError(Problem("init-model", rule, path="model", value=model, fix=fix, is_argument=True))
        large, length = preset.get("hidden_size", 0) >= LARGE, preset.get("max_positions") or 4096
        kind = "images" if preset.get("architecture") == "resnet" else "large" if large else "small"
        named, note = f"preset = {_quote(model)}", "or hf = a Hugging Face folder, or the model's fields"
    path = None if data is None else _seen_from(data, out)
    return TEMPLATE.format(
        file=out,
        model=f"{named:<26} # {note}",
        cluster=_cluster_lines(devices),
        data=_data_lines(kind, path, length, fields or DataFields()),
        **_train_values(kind),
    )


def _train_values(kind: str) -> dict[str, Any]:
    """Values of [train] that suit a kind of job."""
    values: dict[str, Any] = {
        "small": {"steps": 100, "batch": 32, "lr": "1e-3", "warmup": 10, "precision": "fp32"},
        "images": {"steps": 100, "batch": 32, "lr": "3e-4", "warmup": 10, "precision": "fp32"},
        "large": {"steps": 1000, "batch": 512, "lr": "3e-4", "warmup": 100, "precision": "bf16"},
        "fine-tune": {"steps": 100, "batch": 32, "lr": "2e-5", "warmup": 10, "precision": "bf16"},
    }[kind]
    return {**values, "precision": _quote(values["precision"]), "eval_every": values["steps"] // 4}


def _data_lines(kind: str, data: str | None, length: int, fields: DataFields) -> str:
    path = _quote(data or f"builtin:{'synthetic-images' if kind == 'images' else 'python-stdlib'}")
    lines = [f"path = {path:<19} # a file, a folder or a glob; relative to this file"]
    if kind != "images":
        longest = {"small": 256, "large": 4096, "fine-tune": 1024}[kind]
        lines.append(f"seq_len = {min(longest, length):<16} # tokens per sample")
    if kind in ("small", "large"):
        lines.append('tokenizer = "byte"         # or "bpe:8192", trained on the data, or a tokenizer.json')
    if fields.text_field not in (None, "text"):
        lines.append(f"text_field = {_quote(fields.text_field):<13} # field or column with the text")
    if fields.template is not None:
        lines += [
            f"template = {_quote(fields.template):<15} # renders the conversations: docs/data.md",
            'mask = "document"          # packed conversations do not attend to each other',
            "prompt_masking = true      # loss on answers only",
        ]
    return "\n".join(lines)


def _cluster_lines(devices: str) -> str:
    tree: dict[str, Any] = {"cluster": {"preset": "local"}}
    if devices.isdigit() and int(devices) > 0:
        tree["cluster"]["devices_per_node"] = int(devices)
    elif problem := apply_on(tree, devices):
        raise UserError(dataclasses.replace(problem, path="gpus"))
    cluster = tree["cluster"]
    what = "the devices of the machine where the job runs" if cluster["preset"] == "local" else "device type"
    first = f"preset = {_quote(cluster.pop('preset')):<17} # {what}"
    if devices.isdigit():
        return f"{first}\ndevices_per_node = {devices:<7} # GPUs, or CPU processes on a machine without them"
    return "\n".join([first, *(f"{key} = {value}" for key, value in cluster.items())])


def _seen_from(path: str, out: Path) -> str:
    """A path as the job file has it, relative to the file's folder; `builtin:` and `~` stay."""
    if path.startswith((BUILTIN, "~")) or Path(path).is_absolute():
        return path
    return os.path.relpath(path, out.parent)


def _longest(folder: Path) -> int:
    """Longest sequence of a Hugging Face model; its config is checked when the job is loaded."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config.get("max_position_embeddings") or config.get("n_positions") or LARGE)
    except (OSError, ValueError, TypeError, AttributeError):
        return LARGE


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
