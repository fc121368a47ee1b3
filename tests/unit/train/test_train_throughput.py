"""The matmul rate that MFU is measured against."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.launch.environment import PEAK_VARIABLE
from meshwright.train import throughput
from meshwright.train.throughput import measure_matmul, measure_matmul_once


def test_matmul_probe_gives_a_rate():
    rate = measure_matmul(torch.device("cpu"), torch.float32, seconds=0.02)
    assert math.isfinite(rate)
    assert rate > 1e8


@pytest.fixture
def probes(monkeypatch):
    """Counts the measurements."""
    found = []

    def measure(device, *_):
        found.append(device)
        return 1e9

    monkeypatch.setattr(throughput, "measure_matmul", measure)
    measure_matmul_once.cache_clear()
    yield found
    measure_matmul_once.cache_clear()


def test_a_process_measures_the_peak_of_a_device_once(probes, monkeypatch):
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    cpu = torch.device("cpu")
    assert [measure_matmul_once(cpu, torch.float32, 0.1) for _ in range(2)] == [1e9, 1e9]
    assert probes == [cpu]
    measure_matmul_once(cpu, torch.bfloat16, 0.1)
    assert probes == [cpu, cpu], "another dtype has another rate"


def test_a_process_that_takes_over_a_rank_does_not_measure(probes, monkeypatch):
    monkeypatch.setenv(PEAK_VARIABLE, repr(4.2e10))
    assert measure_matmul_once(torch.device("cpu"), torch.float32, 0.1) == 4.2e10
    assert probes == []
