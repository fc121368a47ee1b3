"""Uncertainty of a predicted step time.

For decoders on GPUs it comes from the errors on similar runs of sources that the rates were not fitted to
(leave-one-source-out). The table ``residuals.toml`` is written by ``benchmarks/validation.py``.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import NamedTuple

from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.probed import is_probed
from meshwright.spec.cluster import chip_of
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

TABLE = "residuals.toml"
LEAST_SPREAD = 0.03
"""Least half-width of an interval."""
GENERATIONS = {
    "V100": "Volta",
    "MI250X": "CDNA2", "MI300X": "CDNA3", "MI325X": "CDNA3", "MI350X": "CDNA4", "MI355X": "CDNA4",
    "A100": "Ampere", "A800": "Ampere", "A10": "Ampere", "A10G": "Ampere", "A40": "Ampere", "A6000": "Ampere",
    "3090": "Ampere",
    "L4": "Ada", "L40": "Ada", "L40S": "Ada", "4090": "Ada",
    "H100": "Hopper", "H200": "Hopper", "H800": "Hopper", "H20": "Hopper", "GH200": "Hopper",
    "B200": "Blackwell", "B300": "Blackwell", "GB200": "Blackwell", "GB300": "Blackwell", "5090": "Blackwell",
}  # fmt: skip
"""By chip."""


class Interval(NamedTuple):
    """Factors on a predicted time, and their basis."""

    low: float
    high: float
    basis: str


UNCERTAINTY = Interval(
    0.5, 2.0, "a factor of 2 either way; there are no published runs on CPUs or of ResNets to compare with"
)
PROBED = {
    "cpu": Interval(0.7, 1.4, "what meshwright probe measured; cores that others use are slower"),
    "cuda": Interval(0.93, 1.07, "what meshwright probe measured on the device"),
}
"""For steps predicted from probed operations; not fitted to measurements."""
Key = tuple[str, str, str]
"""Kind of model, profile, device or generation; empty for any."""
Residuals = dict[Key, tuple[int, float, float]]
"""Rows of each group, and two percentiles of measured over predicted."""


def generation_of(device: str) -> str:
    """The generation of a device; empty if unknown."""
    return GENERATIONS.get(chip_of(device), "")


def similar_groups(workload: Workload) -> list[Key]:
    """Groups of published rows similar to a workload, most similar first; the last is all rows."""
    kind = "experts" if workload.model.num_experts else "dense"
    profile, device = workload.profile.name, workload.cluster.device_name
    generation = generation_of(device)
    keys = [(kind, profile, device), (kind, profile, "")]
    if generation:
        keys.append((kind, "", generation))
    return [*keys, (kind, "", ""), ("", "", "")]


def step_interval(job: Job) -> Interval:
    """The uncertainty of a job's predicted step, and its basis."""
    if is_probed(job):
        return PROBED[job.cluster.device]
    if job.cluster.device == "cuda" and isinstance(job.model, DecoderModel):
        return interval(Workload.of(job))
    return UNCERTAINTY


@functools.cache
def _table() -> Residuals:
    text = resources.files("meshwright.plan.time").joinpath(TABLE).read_text(encoding="utf-8")
    return {
        (entry["kind"], entry["profile"], entry["device"]): (entry["rows"], entry["low"], entry["high"])
        for entry in tomllib.loads(text)["groups"]
    }


def interval(workload: Workload, residuals: Residuals | None = None) -> Interval:
    """Factors on a predicted step time, which 80% of the runs of a new source are between.

    Over rows of left-out sources with the same kind of model, framework and device if there are enough, else
    with the same framework, else with the same device generation, else over all. The interval contains the
    prediction.

    Args:
        workload: What is predicted.
        residuals: Residuals; those of the package if left out.
    """
    table = _table() if residuals is None else residuals
    key = next(key for key in similar_groups(workload) if key in table)
    rows, low, high = table[key]
    low, high = min(low, 1 - LEAST_SPREAD), max(high, 1 + LEAST_SPREAD)
    return Interval(low, high, f"{rows} runs{_describe(key)} of sources that were left out of the fit")


def _describe(key: Key) -> str:
    kind, profile, device = key
    models = {"dense": " of dense models", "experts": " of models with experts", "": ""}[kind]
    return models + (f" with {profile}" if profile else "") + (f" on {device}" if device else "")
