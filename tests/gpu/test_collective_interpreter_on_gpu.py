"""Collective schedules over NCCL: ranks on one GPU that pose as several hosts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shared_gpu_ranks import pose_as_another_host  # noqa: E402

from collective_ranks import check_counts, run_groups  # noqa: E402
from meshwright.elastic.supervisor import Supervisor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_ranks(ranks, run_dir, listener):
    pose_as_another_host()
    overrides = [
        f"layout.dp_replicate={ranks}",
        f"cluster.devices_per_node={ranks}",
        "cluster.device=cuda",
        "train.precision=fp32",
    ]
    return run_groups(overrides, run_dir, listener, lambda group: None)


def run_two(run_dir, listener):
    return run_ranks(2, run_dir, listener)


def run_four(run_dir, listener):
    return run_ranks(4, run_dir, listener)


@pytest.mark.parametrize(("ranks", "entry"), [(2, "run_two"), (4, "run_four")])
def test_every_schedule_over_nccl(job_file, tmp_path, ranks, entry):
    """Results equal the reference; the counter has exactly the bytes that the schedules send."""
    events = []
    Supervisor(f"{__name__}:{entry}", tmp_path, ranks, 0, 30.0, events.append).run()
    check_counts(events, ranks)
