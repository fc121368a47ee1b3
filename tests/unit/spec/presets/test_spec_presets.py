"""Presets: each one loads; clusters have the figures of data sheets; unknown names get a suggestion."""

from __future__ import annotations

import pytest

from meshwright.core.errors import Problem
from meshwright.spec.load import load_job
from meshwright.spec.presets import preset_names, read_preset

PEAKS = {
    "a10": (125, None, None),
    "a100-40g-pcie": (312, None, None),
    "a100-40g-sxm": (312, None, None),
    "a100-64g-leonardo": (358, None, None),
    "a100-80g-omnipath": (312, None, None),
    "a100-80g-pcie": (312, None, None),
    "a100-80g-sxm": (312, None, None),
    "a10g": (70, None, None),
    "a40": (149.7, None, None),
    "a800-sxm": (312, None, None),
    "b200": (2250, 4500, 9000),
    "b300": (2250, 4500, 13500),
    "gb200-nvl72": (2500, 5000, 10000),
    "gb300-nvl72": (2500, 5000, 15000),
    "gh200": (989, 1979, None),
    "h100-64g-marenostrum5": (989, 1979, None),
    "h100-96g-hbm2e": (989, 1979, None),
    "h100-nvl": (835, 1671, None),
    "h100-pcie": (756, 1513, None),
    "h100-sxm": (989, 1979, None),
    "h20": (148, 296, None),
    "h200-sxm": (989, 1979, None),
    "h800-sxm": (989, 1979, None),
    "l4": (121, 242, None),
    "l40": (181, 362, None),
    "l40s": (362, 733, None),
    "mi250x": (191.5, None, None),
    "mi300x": (1307, 2615, None),
    "mi325x": (1307, 2615, None),
    "mi350x": (2306.9, 4613.9, 9227.4),
    "mi355x": (2516.6, 5033, 10066),
    "rtx-3090": (71, None, None),
    "rtx-4090": (165.2, 330.3, None),
    "rtx-5090": (209.5, 419, 1676),
    "rtx-a6000": (154.8, None, None),
    "v100-16g-pcie": (112, None, None),
    "v100-16g-sxm": (125, None, None),
    "v100-32g-pcie": (112, None, None),
    "v100-32g-sxm": (125, None, None),
}
"""Dense TFLOP/s of the data sheets in bf16 (V100: fp16; GeForce: float32 sums), fp8 and fp4."""


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_model_preset_is_a_legal_job(name):
    assert load_job(name, on="h100-sxm", to_run=False).model.preset == name


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_cluster_preset_loads_with_the_basis_of_its_figures(name):
    cluster = load_job("tiny", [f"cluster.preset={name}"]).cluster
    assert cluster.preset == name
    assert cluster.basis
    assert cluster.device_name
    if name != "local":
        assert cluster.device == "cuda"
        assert cluster.bf16_flops_per_s < cluster.peak_bf16_flops_per_s, "reached is below the data sheet"


@pytest.mark.parametrize("name", sorted(set(preset_names("clusters")) - {"local"}))
def test_preset_has_data_sheet_peaks_and_names_assumptions(name):
    cluster = load_job("tiny", on=name, to_run=False).cluster
    found = (cluster.peak_bf16_flops_per_s, cluster.peak_fp8_flops_per_s, cluster.peak_fp4_flops_per_s)
    for peak, expected in zip(found, PEAKS[name], strict=True):
        assert peak == (None if expected is None else pytest.approx(expected * 1e12))
    assert cluster.cost_per_hour
    assert cluster.failure_hours
    assert "assumed" in cluster.basis
    assert "failures and price (USD)" in cluster.basis


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("h100", "Did you mean 'h100-sxm' or 'h100-"),
        ("H200", "Did you mean 'h200-sxm'?"),
        ("b2000-sxm", "Did you mean"),
        ("toaster", "Presets: a10, a100-"),
    ],
)
def test_unknown_preset_gets_the_nearest_names_or_all(name, fix):
    problem = read_preset("clusters", name)
    assert isinstance(problem, Problem)
    assert (problem.code, problem.path) == ("cluster-unknown-preset", "cluster.preset")
    assert (problem.fix or "").startswith(fix)
