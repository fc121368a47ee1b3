"""Traffic of context parallelism (``cp``): ring attention and Ulysses.

With N tokens of a micro-batch on a rank, Q and K the widths of its query and key heads, e bytes of an operand
(2 under bf16 and fp16, else 4), a block moves:

=======  ======================================  =======================================================
method   forward                                 backward
=======  ======================================  =======================================================
ring     cp - 1 sends of keys and values, 2 N K  cp - 1 of the same, and of their gradients, 2 N K 4 each
         e each
ulysses  2 all-to-alls: of N (Q + 2 K') e, of    the same two
         N Q e
=======  ======================================  =======================================================

Keys and values of a block pass once around the ring. Their float32 gradients follow one hop behind, and end
on the rank of their keys. Each send is split into up to eight head chunks, so that attention can begin with
the first chunk; each chunk is one call. Ulysses repeats key heads where there are fewer heads than ranks: K'
is then the width of ``cp`` heads, else K.

Activation checkpointing: ``full`` repeats the forward sends; ``selective`` saves the output of ring
attention, and repeats the all-to-alls of Ulysses.
"""

from __future__ import annotations

from meshwright.layout.parameters import FLOAT32_BYTES, operand_bytes
from meshwright.layout.ring_chunks import list_head_chunks
from meshwright.layout.stages import local_stages
from meshwright.layout.tensor_parallel import count_tokens, local_model
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel


def predict_context(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """The ``cp`` traffic of attention on a rank."""
    blocks = sum(len(part.layers) for part in local_stages(job, pp_rank))
    steps = blocks * count_micro_batches(job)
    evaluations = blocks * count_micro_batches(job, job.train.eval_samples)
    if job.layout.context == "ulysses":
        passes = 2 + (job.layout.recompute != "none")
        return [
            _ulysses_all_to_alls(job, "step", steps * passes),
            _ulysses_all_to_alls(job, "eval", evaluations),
        ]
    ranks = job.layout.cp
    return [
        CollectiveTraffic("cp", "send", "setup", ranks, 1, FLOAT32_BYTES),  # opens the connection
        *_ring_sends(job, "step", steps, backward=True),
        *_ring_sends(job, "eval", evaluations, backward=False),
    ]


def _ring_sends(job: Job, phase: str, blocks: int, backward: bool) -> list[CollectiveTraffic]:
    """Ring attention: sends of keys and values, and of their gradients."""
    model, ranks = local_model(job), job.layout.cp
    assert isinstance(model, DecoderModel), "the legality rules allow it for decoders only"
    elements = 2 * count_tokens(job) * model.kv_size
    rounds = 1 + backward + (backward and job.layout.recompute == "full")
    hops, head_chunks = blocks * (ranks - 1), len(list_head_chunks(model.num_kv_heads))
    size = rounds * elements * operand_bytes(job.train.precision)
    rows = [CollectiveTraffic("cp", "send", phase, ranks, hops * rounds * head_chunks, hops * size)]
    if backward:
        rows.append(
            CollectiveTraffic("cp", "send", phase, ranks, hops * head_chunks, hops * elements * FLOAT32_BYTES)
        )
    return rows


def _ulysses_all_to_alls(job: Job, phase: str, passes: int) -> CollectiveTraffic:
    """Ulysses: all-to-all of queries, keys and values (sequence to heads), and of the output (back)."""
    model, ranks = local_model(job), job.layout.cp
    assert isinstance(model, DecoderModel), "the legality rules allow it for decoders only"
    keys = model.head_size * max(model.num_kv_heads, ranks)
    elements = count_tokens(job) * (2 * model.query_size + 2 * keys)
    size = elements * operand_bytes(job.train.precision)
    return CollectiveTraffic("cp", "all_to_all", phase, ranks, 2 * passes, passes * size)
