"""Initial weights of a run from a Hugging Face folder."""

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
    """The weights of ``model.hf``; found on first use."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @cached_property
    def found(self) -> HfWeights | None:
        """The folder's weights, checked against the job; None if weights are initialised from the seed.

        Raises:
            UserError: Folder and job do not match.
        """
        model = self._job.model
        if not isinstance(model, DecoderModel) or model.hf is None:
            return None
        check_config(model, self._job.data.seq_len)  # the folder may have changed since the plan was made
        return find_weights(Path(model.hf), model)

    def announce(self, reporter: Reporter) -> bool:
        """Report which weights a new run starts from; returns whether they come from the folder."""
        model, weights = self._job.model, self.found
        if not isinstance(model, DecoderModel) or model.hf is None:
            return False
        if weights is None:
            reporter.message(f"weights: {model.hf} has a config but no weights: training starts from scratch")
            return False
        files = format_plural(len(weights.files), "file")
        reporter.message(f"weights: {files} of {model.hf}, {format_bytes(weights.bytes)}")
        return True
