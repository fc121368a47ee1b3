"""Time of a step of what runs: matrix work, the optimizer, and communication that nothing hides.

Decoders on GPUs have the estimate of ``plan/estimate``. CPUs and ResNets have the one below: the cluster's
rates, four constants, ring all-reduces. The constants were set by hand on five small models on a 2-core Xeon
virtual machine (November 2026), all within 1.5 times. It ranks one process against replicas; it does not
claim more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.comms import Traffic
from meshwright.plan.estimate import step as estimate
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.interval import Interval, interval
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.optimizer import predict_optimizer
from meshwright.plan.resnet_shapes import image_flops
from meshwright.plan.shapes import count_active_matmul_parameters, list_parameters
from meshwright.plan.stage_times import EFFICIENCY, HOST_S
from meshwright.plan.tensor import held_model
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model, ResNetModel

CONVOLUTION_EFFICIENCY = 0.4
"""The same for convolutions: five ResNets on one core, within 1.8 times; not measured on a GPU."""
ACTIVATION_PASSES = 8
"""Times that the activations cross the memory bus in forward and backward."""
OVERLAP = {"cpu": 0.5, "cuda": 0.9}
"""Share of the gradient reduction that hides behind the last backward pass (CPU: measured with gloo)."""
RECOMPUTE_PASSES = {"none": 0, "selective": 2, "full": 3}
"""Times that the activations cross it once more when they are computed again."""
UNCERTAINTY = Interval(0.5, 2.0, "a guess: no published run on CPUs or of ResNets was compared")
"""Of the estimate below."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank."""

    compute_s: float
    optimizer_s: float
    communication_s: float
    exposed_s: float
    """The part of the communication that delays the step."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.optimizer_s + self.exposed_s

    def breakdown(self) -> dict[str, float]:
        """The parts that add up to the step."""
        return {"compute": self.compute_s, "optimizer": self.optimizer_s, "communication": self.exposed_s}


def flops_per_token(model: Model, seq_len: int) -> float:
    """Forward and backward FLOPs of one token, or of one image.

    Of a token: 6 for each parameter that multiplies it (the head and the chosen experts included, the input
    embedding not), plus attention over the positions that it sees on average: half of the sequence, or of a
    window all but what the start lacks; 2 FLOPs for the scores and 2 for their use, times 3.
    Of an image: see ``image_flops``.
    """
    if isinstance(model, ResNetModel):
        return float(image_flops(model))
    window, windowed = min(model.window or seq_len, seq_len), model.windowed_layers
    seen = (model.num_layers - windowed) * seq_len / 2 + windowed * (window - window**2 / (2 * seq_len))
    queries = model.query_size + (
        model.num_heads * (model.rope_head_dim or 0) if model.attention == "latent" else 0
    )
    return 6.0 * count_active_matmul_parameters(model) + 6.0 * seen * (queries + model.value_size)


def recomputed_flops(job: Job) -> float:
    """FLOPs that recomputation adds to one token: the blocks' forward pass, and not the head's."""
    model = job.model
    if job.layout.recompute != "full" or not isinstance(model, DecoderModel):
        return 0.0
    head = model.vocab_size * model.hidden_size
    return flops_per_token(model, job.data.seq_len) / 3 - 2.0 * head


def _efficiency(model: Model) -> float:
    return CONVOLUTION_EFFICIENCY if isinstance(model, ResNetModel) else EFFICIENCY


def _depth(model: Model) -> int:
    """Blocks that the host sends one after the other."""
    return model.num_layers if isinstance(model, DecoderModel) else sum(model.blocks)


def matmul_rate(cluster: Cluster, precision: str) -> float:
    """The large-product rate that a precision reaches."""
    return cluster.fp32_flops_per_s if precision == "fp32" else cluster.bf16_flops_per_s


def peak_rate(cluster: Cluster, precision: str) -> tuple[float, str]:
    """What MFU is counted against before a run, and its name."""
    if cluster.matmul_flops_per_s is not None:
        return cluster.matmul_flops_per_s, "cluster.matmul_flops_per_s"
    if precision != "fp32" and cluster.peak_bf16_flops_per_s is not None:
        return cluster.peak_bf16_flops_per_s, "the data sheet's dense 16-bit peak"
    return matmul_rate(cluster, precision), "the cluster's large-product rate"


def step_interval(job: Job) -> Interval:
    """How far the predicted time may be off, and what that rests on."""
    return interval(Workload.of(job)) if _is_estimated(job) else UNCERTAINTY


def _is_estimated(job: Job) -> bool:
    return job.cluster.device == "cuda" and isinstance(job.model, DecoderModel)


def _estimated(job: Job) -> StepTime:
    """The step of a decoder on GPUs."""
    found = estimate.estimate_step(Workload.of(job), Grid.of([job.layout]))
    total, optimizer = float(found.step_s[0]), float(found.parts["optimizer"][0])
    shown = float(found.parts["gradient reduction"][0])
    hidden = sum(float(part[0]) for part in found.hidden.values())
    return StepTime(total - optimizer - shown, optimizer, shown + hidden, shown)


def estimate_step(job: Job, micro_batches: int, touched_bytes: int, traffic: Sequence[Traffic]) -> StepTime:
    """The step of a rank.

    Args:
        job: With the layout settled, its micro-batch included.
        micro_batches: Of one step.
        touched_bytes: Activations that one micro-batch makes.
        traffic: The collectives of the layout.
    """
    if _is_estimated(job):
        return _estimated(job)
    cluster, train = job.cluster, job.train
    tokens = micro_batches * (job.layout.micro_batch or 1) * job.data.seq_len
    rate = matmul_rate(cluster, train.precision) * _efficiency(job.model)
    flops = flops_per_token(job.model, job.data.seq_len) + recomputed_flops(job)
    matmul_s = tokens * flops / rate / job.layout.tp
    passes = ACTIVATION_PASSES + RECOMPUTE_PASSES[job.layout.recompute]
    memory_s = micro_batches * touched_bytes * passes / cluster.memory_bytes_per_s
    host_s = micro_batches * (_depth(job.model) + 1) * HOST_S[cluster.device]
    # A GPU computes while the host goes on; a core is both.
    on_gpu = cluster.device == "cuda"
    compute_s = max(matmul_s + memory_s, host_s) if on_gpu else matmul_s + memory_s + host_s
    optimizer = predict_optimizer(list_parameters(held_model(job)), train)
    optimizer_s = optimizer.moved_bytes / cluster.memory_bytes_per_s + optimizer.flops / rate
    optimizer_s /= job.layout.dp_shard  # each rank moves its rows
    crossing = job.layout.world_size > cluster.devices_per_node
    bandwidth = (cluster.nic_bytes_per_s if crossing else None) or cluster.link_bytes_per_s
    latency = (cluster.nic_latency_s if crossing else None) or cluster.link_latency_s
    communication_s = waited_s = 0.0
    for row in traffic:
        if row.phase != "step":
            continue
        rounds = 2 if row.op == "all_reduce" else 1
        ring_s = row.bytes * rounds * (row.ranks - 1) / row.ranks / bandwidth + row.calls * latency
        if row.axis == "control" or row.axis.startswith("tp"):  # the step waits for these
            waited_s += ring_s
        else:
            communication_s += ring_s
    last_backward_s = compute_s * 2 / 3 / micro_batches
    hidden_s = min(communication_s * OVERLAP[cluster.device], last_backward_s)
    return StepTime(compute_s, optimizer_s, communication_s + waited_s, communication_s - hidden_s + waited_s)
