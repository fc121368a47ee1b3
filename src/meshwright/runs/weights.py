"""The weights that a run begins with, where the model comes from a Hugging Face folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from meshwright.checkpoint.hf.weights import HfWeights, find_weights
from meshwright.core.units import format_bytes, format_plural
from meshwright.runs.reporter import Reporter
from meshwright.spec.hf_config import check_config
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class InitialWeights:
    """The weights of ``model.hf``, looked for once, when they are first asked for."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @cached_property
    def found(self) -> HfWeights | None:
        """The folder's weights, held against the job by their headers; None if they are drawn from the seed.

        Raises:
            UserError: Folder and job do not fit.
        """
        model = self._job.model
        if not isinstance(model, DecoderModel) or model.hf is None:
            return None
        check_config(model, self._job.data.seq_len)  # a plan is older than the folder may be
        return find_weights(Path(model.hf), model)

    def announce(self, reporter: Reporter) -> bool:
        """Whether a run that starts at the beginning takes weights from the folder; says which."""
        model, weights = self._job.model, self.found
        if not isinstance(model, DecoderModel) or model.hf is None:
            return False
        if weights is None:
            reporter.message(f"weights: {model.hf} holds a config and none, so training starts from scratch")
            return False
        files = format_plural(len(weights.files), "file")
        reporter.message(f"weights: {files} of {model.hf}, {format_bytes(weights.bytes)}")
        return True
