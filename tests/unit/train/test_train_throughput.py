"""The matmul rate that MFU is measured against."""

from __future__ import annotations

import math

import torch

from meshwright.train.throughput import measure_matmul


def test_matmul_probe_gives_a_rate():
    rate = measure_matmul(torch.device("cpu"), torch.float32, seconds=0.02)
    assert math.isfinite(rate)
    assert rate > 1e8
