"""The planner's columns and its probed steps agree about Triton blocks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.block import COUNTED_KERNEL_TIME_FACTOR, BlockModel
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.rates import rates_of
from meshwright.plan.time.triton_block_bytes import block_bytes
from meshwright.spec.execution import uses_triton_blocks
from meshwright.spec.layout import Layout

LAYOUTS = [
    Layout(mode="given", pp=pp, tp=tp, cp=cp, dp_shard=shard, dp_replicate=replicas, zero=zero, micro_batch=1)
    for pp, tp, cp, shard, replicas, zero in itertools.product(
        (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), range(4)
    )
]


@pytest.fixture
def job(make_h200_job):
    return make_h200_job()


def block_model(job, layouts):
    workload = Workload.of(job)
    return BlockModel(workload, Device.of(workload, rates_of(workload)), Grid.of(layouts))


@pytest.mark.parametrize(
    ("changes", "some"),
    [
        ({}, True),
        ({"precision": "fp8"}, True),
        ({"block_backend": "triton"}, True),
        ({"block_backend": "compile"}, False),
        ({"block_backend": "eager"}, False),
        ({"compile_backend": "aot_eager"}, False),
    ],
)
def test_search_and_run_agree_where_triton_blocks_run(job, changes, some):
    """A workload is built from the job of the search or of a given layout; its columns say the same."""
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))
    expected = [uses_triton_blocks(dataclasses.replace(job, layout=layout)) for layout in LAYOUTS]
    for given in (LAYOUTS[0], LAYOUTS[-1]):
        found = block_model(dataclasses.replace(job, layout=given), LAYOUTS).triton
        assert found.tolist() == expected
    assert any(expected) == some


@pytest.mark.parametrize("residual", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_kernels_move_the_bytes_of_a_probed_step(job, recompute, residual):
    """In fp8 the columns count casts with the GEMMs, so only 16-bit blocks are compared."""
    job = dataclasses.replace(
        job,
        train=dataclasses.replace(job.train, precision="bf16", residual_dtype=residual),
        layout=dataclasses.replace(job.layout, recompute=recompute),
    )
    model = block_model(job, [job.layout])
    times = model.times()
    seconds = times.elementwise.total + (times.selective_recompute_s if recompute == "selective" else 0.0)
    moved = seconds * model.device.bytes_per_s / (COUNTED_KERNEL_TIME_FACTOR * model.rows)
    np.testing.assert_allclose(moved, block_bytes(job, job.model), rtol=1e-12)
