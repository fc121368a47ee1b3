"""Traffic of expert parallelism: dispatch, combine and balance counts.

With N tokens of a micro-batch on a rank, of which it routes n = N / tp, D hidden, E experts, k experts per
token, B sequences, e bytes of an operand (2 under bf16 and fp16, else 4), a block moves:

==========  =======================================================  =====================================
axis        forward                                                  backward
==========  =======================================================  =====================================
``ep``      3 all-to-alls: split sizes E etp 8; rows to the experts  2 all-to-alls of n k D e etp
            and back, n k D e etp each
``tp``      without sequence parallelism 1 all-gather of N D e       the same
``cp+tp``   balance loss: 1 all-reduce of B E 4; with a capacity     nothing
            instead 1 all-gather of cp tp n k 8, the choices
==========  =======================================================  =====================================

Bytes are those of the rank's own tokens: sent to experts, and returned. The number of rows of other ranks'
tokens depends on the router. The audit subtracts the rows that the router dropped for lack of capacity. Each
of the ``etp`` ranks that share an expert gets the full row.

Activation checkpointing repeats the forward pass, except a final all-gather over ``tp`` that no shared expert
follows. An evaluation is a forward pass without the balance loss.
"""

from __future__ import annotations

from meshwright.layout.axes import expert_axis, sequence_axis
from meshwright.layout.parameters import FLOAT32_BYTES, INT64_BYTES, operand_bytes
from meshwright.layout.stages import local_stages
from meshwright.layout.tensor_parallel import count_tokens
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import balance_coefficient


def predict_expert(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """Traffic of routed experts on a rank, without their gradients."""
    blocks = sum(part.expert_layers for part in local_stages(job, pp_rank))
    steps = blocks * count_micro_batches(job)
    evaluations = blocks * count_micro_batches(job, job.train.eval_samples)
    recomputed_calls = 0 if job.layout.recompute == "none" else steps
    followed = recomputed_calls if _model_of(job).shared_experts else 0
    return [
        *_dispatch_and_combine(job, "step", steps + recomputed_calls, backwards=steps),
        *_dispatch_and_combine(job, "eval", evaluations, backwards=0),
        *_gather_tokens(job, "step", 2 * steps + followed),
        *_gather_tokens(job, "eval", evaluations),
        *_share_routing(job, "step", steps + recomputed_calls, learning=True),
        *_share_routing(job, "eval", evaluations, learning=False),
    ]


def _dispatch_and_combine(job: Job, phase: str, forwards: int, backwards: int) -> list[CollectiveTraffic]:
    """All-to-alls over ``ep``. Forward: split sizes, dispatch, combine. Backward: rows only."""
    model, axis = _model_of(job), expert_axis(job.layout)
    if axis.size == 1:
        return []
    rows = _count_routed_rows(job) * job.layout.etp
    sent = rows * routed_row_bytes(job)
    sizes = (model.num_experts or 0) * job.layout.etp * INT64_BYTES
    calls, size = 3 * forwards + 2 * backwards, forwards * sizes + 2 * (forwards + backwards) * sent
    return [CollectiveTraffic(axis.name, "all_to_all", phase, axis.size, calls, size)]


def _gather_tokens(job: Job, phase: str, times: int) -> list[CollectiveTraffic]:
    """All-gathers over ``tp``, as each rank routes N / tp tokens: outputs forward, gradients backward."""
    layout = job.layout
    if layout.tp == 1 or layout.sequence_parallel:
        return []
    size = count_tokens(job) * _model_of(job).hidden_size * operand_bytes(job.train.precision)
    return [CollectiveTraffic("tp", "all_gather", phase, layout.tp, times, times * size)]


def _share_routing(job: Job, phase: str, times: int, learning: bool) -> list[CollectiveTraffic]:
    """Routing data that the ranks of one sequence share: choices (capacity) or counts (balance loss)."""
    model, axis = _model_of(job), sequence_axis(job.layout)
    if axis.size == 1:
        return []
    if model.capacity_factor is not None:
        size = axis.size * _count_routed_rows(job) * INT64_BYTES
        return [CollectiveTraffic(axis.name, "all_gather", phase, axis.size, times, times * size)]
    if not learning or not balance_coefficient(job.train):
        return []
    size = (job.layout.micro_batch or 1) * (model.num_experts or 0) * FLOAT32_BYTES
    return [CollectiveTraffic(axis.name, "all_reduce", phase, axis.size, times, times * size)]


def _count_routed_rows(job: Job) -> int:
    """Rows that a rank sends in one forward pass: one per token and chosen expert."""
    return count_tokens(job) // job.layout.tp * (_model_of(job).experts_per_token or 1)


def routed_row_bytes(job: Job) -> int:
    """Bytes of one row that is sent to an expert, or back."""
    return _model_of(job).hidden_size * operand_bytes(job.train.precision)


def _model_of(job: Job) -> DecoderModel:
    assert isinstance(job.model, DecoderModel), "only decoders have experts"
    return job.model
