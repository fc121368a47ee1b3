"""Time of a ResNet's step: convolutions at the cluster's rates, ring all-reduces of the gradients.

Data parallelism only. The constants were set by hand on five small models on a 2-core Xeon virtual machine
(November 2026), on no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout.flops import flops_per_token, matmul_rate
from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.placement import RANK_ORDER, Slots, tier_of
from meshwright.layout.stages import local_parameters
from meshwright.plan.contract import CollectiveTraffic
from meshwright.plan.time.activation_bytes import count_passes
from meshwright.plan.time.optimizer import streamed_s
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel

CONVOLUTION_EFFICIENCY = 0.4
"""Rate of convolutions, over a large GEMM: five ResNets on one core, within a factor of 1.8."""
CPU_LAUNCH_S = {"cpu": 1.0e-3, "cuda": 2.0e-3}
"""CPU launch time per block and micro-batch."""
OVERLAP = {"cpu": 0.5, "cuda": 0.9}
"""Share of the gradient all-reduce that overlaps with the last backward pass."""

BACKWARD_SHARE = 2 / 3
"""Share of the compute that is backward."""


def estimate_resnet_step(
    job: Job,
    micro_batches: int,
    touched_bytes: int,
    traffic: Sequence[CollectiveTraffic],
    slots: Slots = RANK_ORDER,
) -> tuple[dict[str, float], dict[str, float]]:
    """Parts of a ResNet's step, and the overlapped communication.

    Args:
        job: With a complete layout.
        micro_batches: Micro-batches of one step.
        touched_bytes: Activation bytes of one micro-batch.
        traffic: The collectives of the layout.
        slots: The slot of each rank.
    """
    cluster, device = job.cluster, job.cluster.device
    rate = matmul_rate(cluster, job.train.precision) * CONVOLUTION_EFFICIENCY
    compute_s = _compute_s(job, micro_batches, touched_bytes, rate)
    cost = predict_optimizer(local_parameters(job, 0), job.train)
    update_s = cost.moved_bytes / cluster.memory_bytes_per_s + cost.flops / rate
    if job.layout.offload == "optimizer" and device == "cuda":
        update_s = float(streamed_s(update_s, cost.state_bytes, cluster.host_bytes_per_s))
    reduced_s, control_s = _communication_s(cluster, tier_of(job, "control", slots) != "node", traffic)
    hidden_s = min(reduced_s * OVERLAP[device], compute_s * BACKWARD_SHARE / micro_batches)
    parts = {
        "compute": compute_s,
        "gradient reduction": reduced_s - hidden_s,
        "optimizer": update_s,
        "step overhead": control_s,
    }
    return parts, {"data parallel": hidden_s}


def _compute_s(job: Job, micro_batches: int, touched_bytes: int, rate: float) -> float:
    """Convolutions, passes over the activations, and CPU launch time, which a GPU hides."""
    model, device = job.model, job.cluster.device
    assert isinstance(model, ResNetModel), "the engine estimates decoders"
    images = micro_batches * (job.layout.micro_batch or 1)
    device_s = images * flops_per_token(model, job.data.seq_len) / rate
    moved = micro_batches * touched_bytes * count_passes(job.layout.recompute)
    device_s += moved / job.cluster.memory_bytes_per_s
    cpu_launch_s = micro_batches * (sum(model.blocks) + 1) * CPU_LAUNCH_S[device]
    return max(device_s, cpu_launch_s) if device == "cuda" else device_s + cpu_launch_s


def _communication_s(
    cluster: Cluster, crossing: bool, traffic: Sequence[CollectiveTraffic]
) -> tuple[float, float]:
    """Ring all-reduces of a step: gradients, and control; ``crossing`` if ranks are on several nodes."""
    bandwidth = (cluster.nic_bytes_per_s if crossing else None) or cluster.link_bytes_per_s
    latency = (cluster.nic_latency_s if crossing else None) or cluster.link_latency_s
    seconds = {"control": 0.0, "gradients": 0.0}
    for row in traffic:
        if row.phase == "step":
            rounds = 2 if row.op == "all_reduce" else 1
            moved = row.bytes * rounds * (row.ranks - 1) / row.ranks
            kind = "control" if row.axis == "control" else "gradients"
            seconds[kind] += moved / bandwidth + row.calls * latency
    return seconds["gradients"], seconds["control"]
