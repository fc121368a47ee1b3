"""FLOPs per token computed by hand, and active parameters as published."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.layout.flops import flops_per_token
from meshwright.layout.parameters import count_active_matmul_parameters, count_parameters
from meshwright.spec.load import load_job


def model_of(preset):
    return load_job(preset, on="8xh100-sxm", to_run=False).model


def test_flops_per_token_depend_on_windows_and_latent_heads():
    """A dense model has 6 FLOPs per matrix element and 6 s h per layer.

    A window has fewer, latent heads are wider.
    """
    model = model_of("llama3-8b")
    dense = 6.0 * (count_parameters(model) - 128256 * 4096)
    assert flops_per_token(model, 8192) == pytest.approx(dense + 6 * 32 * 8192 * 4096)
    windowed = dataclasses.replace(model, window=1024)
    seen = 1024 - 1024**2 / (2 * 8192)
    assert flops_per_token(windowed, 8192) == pytest.approx(dense + 12 * 32 * seen * 4096)
    latent = model_of("deepseek-v3")
    attention = flops_per_token(latent, 8192) - 6.0 * count_active_matmul_parameters(latent)
    assert attention == pytest.approx(6 * 61 * 4096 * 128 * (192 + 128))


def test_only_chosen_experts_count_as_active():
    """Mixtral has 12.9 of 46.7 billion parameters active, without the input embedding, as published."""
    model = model_of("mixtral-8x7b")
    assert count_parameters(model) == pytest.approx(46.7e9, rel=0.005)
    assert count_active_matmul_parameters(model) == pytest.approx(12.9e9 - 32000 * 4096, rel=0.005)
    deepseek = model_of("deepseek-v3")
    assert count_parameters(deepseek) == pytest.approx(671e9, rel=0.01)
    assert count_active_matmul_parameters(deepseek) == pytest.approx(37e9, rel=0.03)
