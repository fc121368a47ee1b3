"""Time of a step of what runs: matrix work, the optimizer, and communication that nothing hides.

Steps of a kind that ``meshwright probe`` measured on the device are built of what it measured
(``plan.time.probed``). Other decoders on GPUs have the estimate of ``plan/estimate``. All else on CPUs, and
ResNets, have the one below: the cluster's rates, four constants, ring all-reduces. The constants were set by
hand on five small models on a 2-core Xeon virtual machine (November 2026), all within 1.5 times. It ranks one
process against replicas; it does not claim more. A pipeline's step is its schedule, walked with the stages'
shares of that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.plan.axes import dense_shard_axis
from meshwright.plan.comms import Traffic
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.optimizer import predict_optimizer
from meshwright.plan.parts import held_parameters
from meshwright.plan.resnet_shapes import image_flops
from meshwright.plan.shapes import count_active_matmul_parameters
from meshwright.plan.time import engine as estimate
from meshwright.plan.time.interval import Interval, interval
from meshwright.plan.time.pipeline import PipelineTime, link, plan_pipeline
from meshwright.plan.time.probed import ACTIVATION_PASSES, RECOMPUTE_PASSES, count_work, is_probed
from meshwright.plan.time.stages import EFFICIENCY, HOST_S
from meshwright.plan.time.walked import pass_shares, walked_bubble_s
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model, ResNetModel

CONVOLUTION_EFFICIENCY = 0.4
"""The same for convolutions: five ResNets on one core, within 1.8 times; not measured on a GPU."""
OVERLAP = {"cpu": 0.5, "cuda": 0.9}
"""Share of the gradient reduction that hides behind the last backward pass (CPU: measured with gloo)."""
UNCERTAINTY = Interval(0.5, 2.0, "a guess: no published run on CPUs or of ResNets was compared")
"""Of the estimate below."""
PROBED = {
    "cpu": Interval(0.7, 1.4, "what meshwright probe measured; cores that others use are slower"),
    "cuda": Interval(0.93, 1.07, "what meshwright probe measured on the device"),
}
"""Of steps that are built of probed times; a guess."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank."""

    compute_s: float
    optimizer_s: float
    communication_s: float
    exposed_s: float
    """The part of the communication that delays the step."""
    bubble_s: float = 0.0
    """What the busiest rank of a pipeline waits for the others, and for what they send."""
    pipeline: PipelineTime | None = None
    """The schedule as planned; None without a pipeline."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.bubble_s + self.optimizer_s + self.exposed_s

    def breakdown(self) -> dict[str, float]:
        """The parts that add up to the step."""
        parts = {"compute": self.compute_s, "optimizer": self.optimizer_s, "communication": self.exposed_s}
        return parts if self.pipeline is None else {**parts, "bubble": self.bubble_s}


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
    whose = "the cluster's" if cluster.probed is None else "the probed"
    return matmul_rate(cluster, precision), f"{whose} large-product rate"


def step_interval(job: Job) -> Interval:
    """How far the predicted time may be off, and what that rests on."""
    if is_probed(job):
        return PROBED[job.cluster.device]
    return interval(Workload.of(job)) if _is_estimated(job) else UNCERTAINTY


def _is_estimated(job: Job) -> bool:
    return job.cluster.device == "cuda" and isinstance(job.model, DecoderModel)


def _estimated(job: Job, micro_batches: int) -> StepTime:
    """The step of a decoder on GPUs; the stages of a pipeline share its work as ``stage_times`` says."""
    found = estimate.estimate_step(Workload.of(job), Grid.of([job.layout]))
    parts = {name: float(values[0]) for name, values in found.parts.items()}
    optimizer, shown, bubble = (parts[name] for name in ("optimizer", "gradient reduction", "bubble"))
    hidden = sum(float(part[0]) for part in found.hidden.values())
    compute_s = float(found.step_s[0]) - optimizer - shown - bubble
    step = StepTime(compute_s, optimizer, shown + hidden, shown)
    if job.layout.pp == 1:
        return step
    walked = walked_bubble_s(job.layout, micro_batches, parts, pass_shares(found, 1)[0])
    step = replace(step, bubble_s=bubble if walked is None else walked)
    return replace(
        step, pipeline=plan_pipeline(job, micro_batches, compute_s * job.layout.pp / micro_batches)
    )


def estimate_step(job: Job, micro_batches: int, touched_bytes: int, traffic: Sequence[Traffic]) -> StepTime:
    """The step of a rank; of a pipeline's ranks, that of the slowest.

    Args:
        job: With the layout settled, its micro-batch and stages included.
        micro_batches: Of one step.
        touched_bytes: Activations that one micro-batch makes, in all stages.
        traffic: The collectives of the layout.
    """
    if _is_estimated(job) and not is_probed(job):
        return _estimated(job, micro_batches)
    compute_s, optimizer_s = _own_work_s(job, micro_batches, touched_bytes)
    optimizer_s /= dense_shard_axis(job.layout).size  # each rank moves its rows
    waits = [_communication_s(job, traffic, place) for place in range(job.layout.pp)]
    reduced_s, waited_s = max(waits, key=sum)
    if job.layout.pp > 1:  # reductions begin when the schedule is done: nothing hides them
        planned = plan_pipeline(job, micro_batches, compute_s / micro_batches)
        all_s = reduced_s + waited_s
        return StepTime(planned.work_s, optimizer_s, all_s, all_s, planned.bubble_s, planned)
    last_backward_s = compute_s * 2 / 3 / micro_batches
    hidden_s = min(reduced_s * OVERLAP[job.cluster.device], last_backward_s)
    return StepTime(compute_s, optimizer_s, reduced_s + waited_s, reduced_s - hidden_s + waited_s)


def _own_work_s(job: Job, micro_batches: int, touched_bytes: int) -> tuple[float, float]:
    """What a rank computes, all stages together; and the update of the fullest, as if it moved every row."""
    probed = job.cluster.probed
    if probed is not None and is_probed(job):
        work = count_work(job, micro_batches, touched_bytes)
        return work.compute_s(probed), work.update_s
    rate = _rate(job)
    optimizers = [predict_optimizer(held_parameters(job, place), job.train) for place in range(job.layout.pp)]
    update_s = max(o.moved_bytes / job.cluster.memory_bytes_per_s + o.flops / rate for o in optimizers)
    return _compute_s(job, micro_batches, touched_bytes), update_s


def _rate(job: Job) -> float:
    return matmul_rate(job.cluster, job.train.precision) * _efficiency(job.model)


def _compute_s(job: Job, micro_batches: int, touched_bytes: int) -> float:
    """Work of all stages: products, passes over the activations, the host."""
    cluster = job.cluster
    tokens = micro_batches * (job.layout.micro_batch or 1) * job.data.seq_len
    flops = flops_per_token(job.model, job.data.seq_len) + recomputed_flops(job)
    matmul_s = tokens * flops / _rate(job) / (job.layout.tp * job.layout.cp)
    passes = ACTIVATION_PASSES + RECOMPUTE_PASSES[job.layout.recompute]
    memory_s = micro_batches * touched_bytes * passes / cluster.memory_bytes_per_s
    host_s = micro_batches * (_depth(job.model) + 1) * HOST_S[cluster.device]
    # A GPU computes while the host goes on; a core is both.
    on_gpu = cluster.device == "cuda"
    return max(matmul_s + memory_s, host_s) if on_gpu else matmul_s + memory_s + host_s


def _communication_s(job: Job, traffic: Sequence[Traffic], place: int) -> tuple[float, float]:
    """Collectives of a step on a rank at a place: of gradients, and those that everything waits for.

    What a pipeline sends is in its schedule.
    """
    bandwidth, latency = link(job.cluster, job.layout.world_size)
    reduced_s = waited_s = 0.0
    for row in traffic:
        if row.phase != "step" or row.place not in (None, place) or row.axis == "pp":
            continue
        rounds = 2 if row.op == "all_reduce" else 1
        share = 1 if row.op == "send" else (row.ranks - 1) / row.ranks
        ring_s = row.bytes * rounds * share / bandwidth + row.calls * latency
        if _is_awaited(row):
            waited_s += ring_s
        else:
            reduced_s += ring_s
    return reduced_s, waited_s


def _is_awaited(row: Traffic) -> bool:
    """Whether the layers wait for it: anything but gradients, and parameters that are cut."""
    return row.op in ("send", "all_to_all") or row.axis in ("control", "tp", "tp_kv", "cp+tp")
