"""How long each stage of a pipeline works on a micro-batch, and which layers it gets because of it.

Stages are cut by cost, not by the number of layers. All blocks cost alike. The embedding costs its rows and
its dense gradient, the head the product with all words, and its gradient, which is as large as the head.
With N tokens in a micro-batch, M elements of a block's matrices, D hidden, V words (all of one rank of
``tp``), matrix products at the cluster's rate and the rest at its memory's:

=========  ==========================  =============================  ==================
part       forward                     gradient of the input          of the weights
=========  ==========================  =============================  ==================
block      2 N M + attention           2 N M + 2 x attention          2 N M
head       6 N V D, 4 V D elements     V D elements                   none
embedding  N D elements                4 V D elements                 none
=========  ==========================  =============================  ==================

The loss makes both gradients of the head in the forward pass (``run.models.loss``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.axes import is_expert
from meshwright.plan.parts import list_stages, stage_homes
from meshwright.plan.shapes import FLOAT32_BYTES, list_parameters
from meshwright.plan.tensor import count_tokens, held_model
from meshwright.schedule.walk import StageTimes
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

EFFICIENCY = 0.8
"""Rate of a step's matrix products over the rate of one large product."""
HOST_S = {"cpu": 1.0e-3, "cuda": 2.0e-3}
"""Time that eager Python takes for one block of one micro-batch, however small."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one micro-batch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def total_s(self) -> float:
        """Of the whole micro-batch."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True)
class Costs:
    """Of the three kinds of work in a stage."""

    block: Cost
    embedding: Cost
    head: Cost


def part_costs(job: Job) -> Costs:
    """What blocks and ends cost on one rank."""
    model = held_model(job)
    assert isinstance(model, DecoderModel), "the legality table cuts decoders only"
    cluster, low = job.cluster, job.train.precision != "fp32"
    rate = (cluster.bf16_flops_per_s if low else cluster.fp32_flops_per_s) * EFFICIENCY
    tokens = count_tokens(job)
    matrices = _count_worked(job, model)
    product_s = 2 * tokens * matrices / rate
    attention_s = tokens * job.data.seq_len * (model.query_size + model.value_size) / rate
    again_s = product_s + attention_s if job.layout.recompute == "full" else 0.0
    host_s = HOST_S[cluster.device] / 3
    words = model.vocab_size * model.hidden_size
    pass_s = words * FLOAT32_BYTES / cluster.memory_bytes_per_s
    rows_s = tokens * model.hidden_size * FLOAT32_BYTES / cluster.memory_bytes_per_s
    return Costs(
        block=Cost(
            product_s + attention_s + host_s,
            product_s + 2 * attention_s + again_s + host_s,
            product_s + host_s,
        ),
        embedding=Cost(rows_s, 4 * pass_s, 0.0),
        head=Cost(6 * tokens * words / rate + 4 * pass_s, pass_s, 0.0),
    )


def _count_worked(job: Job, model: DecoderModel) -> float:
    """Elements of a block's matrices that a token meets on a rank; of experts, where each gets its share.

    All blocks are taken to be as the last one.
    """
    layout, count = job.layout, 0.0
    for parameter in list_parameters(model):
        if not parameter.name.startswith(f"blocks.{model.num_layers - 1}.") or len(parameter.shape) < 2:
            continue
        if is_expert(parameter.name):  # a rank routes its own 1 / tp of the tokens
            each = parameter.count * layout.etp / (model.held_experts * layout.tp)
            count += each * (model.experts_per_token or 1)
        else:
            count += parameter.count
    return count


def split_layers(job: Job) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest rank is as fast as it can be; None without a pipeline."""
    if job.layout.pp == 1 or not isinstance(job.model, DecoderModel):
        return None
    costs = part_costs(job)
    ends = (costs.embedding.total_s, costs.head.total_s)
    return deal_layers(job.model.num_layers, stage_homes(job), costs.block.total_s, ends)


def deal_layers(
    layers: int, homes: Sequence[int], block_s: float, ends_s: tuple[float, float]
) -> tuple[int, ...]:
    """One layer after the other to the rank with least work, and there to its fastest stage.

    Of equal stages to the latest: late ones hold fewest micro-batches.

    Args:
        layers: Of the model; each stage has one at least.
        homes: The rank of each stage.
        block_s: What a block costs.
        ends_s: What the embedding adds to the first stage, and the head to the last.
    """
    dealt = [1] * len(homes)
    for _ in range(layers - len(homes)):
        stages = stage_seconds(dealt, block_s, ends_s)
        loads = rank_seconds(stages, homes)
        dealt[min(range(len(homes)), key=lambda s: (loads[homes[s]], stages[s], -s))] += 1
    return tuple(dealt)


def stage_seconds(layers: Sequence[int], block_s: float, ends_s: tuple[float, float]) -> list[float]:
    """What each stage costs with so many layers."""
    seconds = [count * block_s for count in layers]
    seconds[0] += ends_s[0]
    seconds[-1] += ends_s[1]
    return seconds


def rank_seconds(stages: Sequence[float], homes: Sequence[int]) -> list[float]:
    """What the stages of each rank cost."""
    return [
        sum(s for s, home in zip(stages, homes, strict=True) if home == rank)
        for rank in range(max(homes) + 1)
    ]


def stage_times(job: Job) -> StageTimes:
    """Seconds of one micro-batch in each stage of a settled job."""
    costs, rows = part_costs(job), []
    for part in list_stages(job):
        ends = [costs.embedding] * part.first + [costs.head] * part.last
        parts = [costs.block] * len(part.layers) + ends
        rows.append(
            (
                sum(c.forward_s for c in parts),
                sum(c.backward_input_s for c in parts),
                sum(c.backward_weight_s for c in parts),
            )
        )
    forward, inputs, weights = zip(*rows, strict=True)
    return StageTimes(forward, inputs, weights)
