"""The weights that a run begins with, where the model comes from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import Output
from meshwright.core.units import format_bytes, format_plural
from meshwright.spec.hf import check_config
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.survive.hf.weights import HfWeights, find_weights


def find_initial_weights(job: Job) -> HfWeights | None:
    """The folder's weights, held against the job by their headers; None if they are drawn from the seed."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.hf is None:
        return None
    check_config(model, job.data.seq_len)  # a plan is older than the folder may be
    return find_weights(Path(model.hf), model)


def settle_weights(output: Output, job: Job) -> bool:
    """Whether a run that starts at the beginning takes the weights of ``model.hf``; says which."""
    if not isinstance(job.model, DecoderModel) or job.model.hf is None:
        return False
    weights = find_initial_weights(job)
    if weights is None:
        output.say(f"weights: {job.model.hf} holds a config and none, so training starts from scratch")
        return False
    files = format_plural(len(weights.files), "file")
    output.say(f"weights: {files} of {job.model.hf}, {format_bytes(weights.bytes)}")
    return True
