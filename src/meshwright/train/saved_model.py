"""Loads the model of a checkpoint or of a Hugging Face folder, to generate text or to evaluate it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.checkpoint.resume import load_selection_bias, require_finite
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import UserError
from meshwright.data.chat_templates import TOKENIZER_TEMPLATE, has_template
from meshwright.models.decoder import Decoder
from meshwright.models.init import find_weight_source
from meshwright.models.resnet import ResNet
from meshwright.models.weight_source import WeightSource
from meshwright.parallel.apply import parallelize
from meshwright.parallel.mesh import Mesh
from meshwright.spec.hf_config import read_config
from meshwright.spec.job import Job
from meshwright.spec.load import SpecError, apply_override, build_job
from meshwright.spec.model import DecoderModel
from meshwright.spec.paths import resolve_paths
from meshwright.train.expert_balance import set_biases

MAX_CONTEXT = 4096
"""Longest context of a Hugging Face model; many allow more positions than fit in memory."""

Tree = dict[str, Any]


def build_saved_job(folder: Path, data: Tree, overrides: Sequence[str] = (), tp: int = 1) -> Job:
    """The job of a saved model, with a legal layout.

    Args:
        folder: A verified checkpoint, or a Hugging Face folder.
        data: Keys of ``[data]``, over those that the model was trained with.
        overrides: ``key=value`` texts, over both.
        tp: Tensor-parallel degree.

    Raises:
        UserError: An override is wrong, or the degree is illegal.
    """
    model, trained_with = _read_tables(folder)
    trained_with["seq_len"] = max(tp, trained_with["seq_len"] // tp * tp)  # each rank routes an equal part
    cluster: Tree = {"preset": "local"}
    if not torch.cuda.is_available():
        cluster |= {"device": "cpu", "devices_per_node": tp}  # ranks may share CPU cores
    tables: Tree = {
        "model": model,
        "data": {**trained_with, **data},
        "train": {"steps": 1, "global_batch": 1, "block_backend": "eager"},
        "layout": {"tp": tp, "micro_batch": 1},
        "cluster": cluster,
    }
    if problems := [problem for text in overrides if (problem := apply_override(tables, text))]:
        raise UserError(*problems)
    resolve_paths(tables, Path.cwd())
    try:
        return build_job(tables)
    except SpecError as error:  # without the suggested training layouts
        raise UserError(*error.problems) from None


def saved_template(folder: Path) -> str | None:
    """The chat template of a saved model, for the tokenizer in its folder; None if there is none."""
    if (folder / MANIFEST).is_file():
        return read_manifest(folder, verify=False).template
    return TOKENIZER_TEMPLATE if has_template(folder) else None


def is_image_model(folder: Path) -> bool:
    """Whether a saved model reads images."""
    return _read_tables(folder)[0].get("architecture") == "resnet"


def _read_tables(folder: Path) -> tuple[Tree, Tree]:
    """The tables ``[model]`` and ``[data]`` of a saved model."""
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder, verify=False)  # the caller has verified it
        CheckpointReader(folder, manifest).read_model()  # before anything of its size is allocated
        model = {k: v for k, v in manifest.model.items() if v is not None and k not in ("hf", "preset")}
        keys = ("seq_len", "mask", "prompt_masking", "template", "eval_fraction")
        return model, {key: getattr(manifest, key) for key in keys}
    config = read_config(folder)
    lengths = (config.fields.get("max_positions"), config.sliding_window, MAX_CONTEXT)
    data = {"seq_len": min(n for n in lengths if n is not None), "template": saved_template(folder)}
    return {"hf": str(folder.absolute())}, data


class _CheckpointWeights(WeightSource):
    """Reads the weights of a checkpoint, one at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self.saved = CheckpointReader(checkpoint)

    def full_tensor(self, name: str) -> Tensor:
        """A full parameter."""
        values = self.saved.read(name)
        require_finite(self.saved.location, name, values)
        return values


def load_saved_model(folder: Path, job: Job, mesh: Mesh | None = None) -> Decoder | ResNet:
    """The model, or the shard of this rank; without a mesh for one process."""
    mesh = mesh or Mesh(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    checkpoint = _CheckpointWeights(folder) if (folder / MANIFEST).is_file() else None
    weights: WeightSource = checkpoint or find_weight_source(job, from_hf=True)
    model = parallelize(job, mesh, weights).model
    assert isinstance(model, Decoder | ResNet), "a saved model has no pipeline stages"
    if checkpoint is not None and isinstance(job.model, DecoderModel):
        biases = load_selection_bias(checkpoint.saved)
        if biases is not None:
            set_biases(model, biases.to(mesh.device), job.model.dense_layers)
    if checkpoint is not None and job.mixes_samples:  # running statistics of batch norms
        for name, buffer in model.named_buffers():
            buffer.copy_(checkpoint.full_tensor(name))
    return model.eval()
