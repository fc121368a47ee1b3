"""Checks that a run resumes with the data of its checkpoint, or with data that only grew."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import AnyPath
from meshwright.data.epochs import CorpusState
from meshwright.data.growth import DataChangedError, check_growth
from meshwright.data.images import image_shape, open_images
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel


def check_same_data(
    manifest: Manifest, job: Job, folder: Path, corpus: CorpusState | None, checkpoint: AnyPath
) -> None:
    """Refuse data in which the position of a checkpoint would refer to other samples.

    Args:
        manifest: Manifest of the checkpoint; its job matches.
        job: To resume.
        folder: Its prepared data, or images.
        corpus: What is in it; None for images.
        checkpoint: For the error.

    Raises:
        UserError: The data changed, and did not only grow.
    """
    try:
        if corpus is None:
            assert isinstance(job.model, ResNetModel), "text has a corpus"
            shape, fraction = image_shape(job.model), job.data.eval_fraction
            if open_images(job.data.path, "train", shape, fraction).sha256 != manifest.data_sha256:
                raise DataChangedError("the images or labels differ")
        elif corpus.sha256 != manifest.data_sha256:
            check_growth(manifest.data, folder)
    except DataChangedError as error:
        rule = f"was saved with other data than {job.data.path or 'data.sources'}: {error}"
        fix = "Use the data of that run, in which documents may only be added after the others"
        raise UserError(Problem("resume-data-changed", rule, path=str(checkpoint), fix=fix)) from None
