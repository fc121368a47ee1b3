"""Reasons of a plan: every automatic choice is printed with why it was made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from meshwright.core.units import format_plural, format_seconds
from meshwright.layout.lr_schedule import explain_lr
from meshwright.layout.text import describe_layout
from meshwright.plan.predict import Prediction
from meshwright.plan.search.alternatives import compare, describe_pins, explain_neighbours
from meshwright.plan.search.failure import NOT_BUILT
from meshwright.plan.search.find import SIMPLICITY_MARGIN, SearchResult, find_layouts, score
from meshwright.plan.time.stages import part_costs
from meshwright.spec.execution import explain_block_backend, explain_transport
from meshwright.spec.hf_config import notes_on
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems
from meshwright.spec.model import BATCH_NORM_NOTE, DecoderModel
from meshwright.spec.train_defaults import explain_defaults

MOST_LISTED = 12
"""Stages up to which layers are listed one by one."""
MOST_OTHERS = 3
"""Next best layouts that are compared with the chosen one."""
WORTH_NAMING = 0.05
"""Share of the step that devices wait for kernel launches, from which a line says so."""
WORTH_IT, NO_GAIN = 0.5, 1.05
"""Speed-up per device below which one device is suggested; speed-up that counts as none."""
BEST = {
    "time": "shortest predicted step",
    "cost": "least device time per step",
    "memory": "least memory per rank",
}


def explain_choice(requested: Job, found: SearchResult, neighbours: bool = False) -> list[str]:
    """Reasons for the best layout, against the others, and notes on what it implies.

    Args:
        requested: The job as given; its layout may be open.
        found: The search, with at least one layout that fits.
        neighbours: Predict and compare layouts one change away; else compare the next best.
    """
    best = found.best[0]
    if requested.layout.mode == "given":
        given = dataclasses.replace(best.layout, micro_batch=requested.layout.micro_batch)
        reasons = [f"{describe_layout(given)}: given in the job"]
    else:
        alone = _explain_one_device(requested, best) if neighbours and found.objective != "memory" else []
        reasons = [_explain_best(requested, found), *alone, *_explain_others(found, neighbours)]
    reasons += [*_explain_micro_batch(requested, best), *explain_stages(requested, best)]
    reasons += [best.placement_reason] if best.placement_reason else []
    reasons += _explain_launches(best)
    return [*reasons, *_explain_not_built(best.job), *_explain_job(best.job, best.micro_batches)]


def _explain_best(requested: Job, found: SearchResult) -> str:
    best, devices = found.best[0], requested.cluster.world_size
    fixed = f" with {describe_pins(found.pins)}" if found.pins else ""
    count = f"{format_plural(len(found.best), 'checked layout')}{fixed} that fit"
    text = f"{describe_layout(best.layout)}: {BEST[found.objective]} among {count}"
    first = min(found.best, key=lambda p: score(found.objective, p))
    more = score(found.objective, best) / score(found.objective, first) - 1
    if more > 1e-4:
        margin = f"{SIMPLICITY_MARGIN[requested.cluster.device]:.0%} of the {BEST[found.objective]}"
        against = f"{more:+.2%} over {describe_layout(first.layout)}"
        text = f"{describe_layout(best.layout)}: simplest within {margin} among {count} ({against})"
    if best.layout.world_size == 1 < devices:
        text += "; one device is enough: communication would cost more than it saves"
    elif best.layout.world_size < devices:
        text += f"; the other {devices - best.layout.world_size} devices would not speed it up"
    if best.layout.offload != "none" and found.objective != "memory" and "offload" not in found.pins:
        without = found.without_offload_s
        slow = "nothing fits" if without is None else f"{format_seconds(without)} with recompute=full"
        text += f"; without offload {slow}. {NOT_BUILT}"
    return text


def _explain_others(found: SearchResult, neighbours: bool) -> list[str]:
    """Neighbours of the best layout, or the next best ones (ResNets have only dp_replicate)."""
    best = found.best[0]
    if neighbours and isinstance(best.job.model, DecoderModel):
        return [f"rejected {sentence}" for sentence in explain_neighbours(found)]
    return [
        f"rejected {describe_layout(other.layout)}: {compare(best, other, found.objective)}"
        for other in found.best[1 : 1 + MOST_OTHERS]
    ]


def _explain_one_device(requested: Job, best: Prediction) -> list[str]:
    """A line where one device is not much slower than the best layout."""
    devices = best.layout.world_size
    if devices == 1 or not isinstance(requested.model, DecoderModel):
        return []
    open_ = dataclasses.replace(requested, layout=Layout())
    alone = find_layouts(open_, {"offload": "none"}, 1, worlds=[1])
    if not alone.best:
        return []
    times = alone.best[0].step_s / best.step_s
    if times > max(WORTH_IT * devices, NO_GAIN):
        return []
    advice = "use one device" if times < NO_GAIN else "consider one device"
    text = f"{describe_layout(alone.best[0].layout)} takes {format_seconds(alone.best[0].step_s)}/step"
    return [f"{advice}: {text}; {devices} devices are {times:.2f}x as fast"]


def _explain_micro_batch(requested: Job, best: Prediction) -> list[str]:
    """The rule that chose the micro-batch of a given layout."""
    if requested.layout.mode != "given" or requested.layout.micro_batch is not None:
        return []
    rule = "largest size that fits with at least 2 micro-batches"
    stages = " per stage" if best.layout.pp > 1 else ""
    rule += stages
    if best.micro_batches < 2 * best.layout.pp:
        rule = f"smallest size: the batch is too small for 2 micro-batches{stages}"
    if best.layout.schedule == "interleaved":
        rule += ", a multiple of layout.pp of them"
    rule += " and divides the samples per rank" if requested.mixes_samples else ""
    return [f"micro_batch={best.layout.micro_batch}: {rule}"]


def _explain_launches(best: Prediction) -> list[str]:
    """A line where the CPU launches kernels more slowly than the devices run them."""
    share = best.time.launch_wait_s / best.step_s
    if share < WORTH_NAMING:
        return []
    fewer = "a larger micro-batch or less tp" if best.layout.tp > 1 else "a larger micro-batch"
    return [f"devices wait for kernel launches in {share:.0%} of the step: {fewer} needs fewer per token"]


def explain_stages(requested: Job, best: Prediction) -> list[str]:
    """Why each pipeline stage has its number of layers, and the bubble."""
    layout, planned = best.layout, best.time.pipeline
    if planned is None:
        return []
    layers = _list_layers(layout.stage_layers or ())
    if requested.layout.stage_layers is not None:
        why = "given in the job"
    else:
        costs = part_costs(best.job)
        head, embedding = costs.head_blocks, costs.embedding_blocks
        why = f"the output head takes as long as {head:.1f} layers"
        why += f", the embedding as {embedding:.1f}" if embedding >= 0.1 else ""
    name = layout.schedule_file or layout.schedule
    return [
        f"layers per stage {layers}: {why}",
        f"{name} with {best.micro_batches} micro-batches: pipeline ranks idle {planned.bubble:.1%}",
    ]


def _list_layers(counts: Sequence[int]) -> str:
    """Layers of each stage; equal neighbours are grouped where there are many."""
    if len(counts) <= MOST_LISTED:
        return ", ".join(map(str, counts))
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return ", ".join(f"{count} ({times} stages)" if times > 1 else str(count) for count, times in runs)


def _explain_not_built(job: Job) -> list[str]:
    """A line where the layout can be planned but not trained."""
    codes = [problem.code for problem in find_problems(job)]
    if not codes:
        return []
    return [f"plan only: train does not support it yet ({', '.join(codes)}); memory is estimated, not exact"]


def _explain_job(job: Job, micro_batches: int) -> list[str]:
    """Notes on padding, positions, learning rate and precision."""
    notes = []
    padded = job.layout.data_degree * micro_batches * (job.layout.micro_batch or 1)
    if padded > job.train.global_batch:
        empty = padded - job.train.global_batch
        notes.append(
            f"{empty} of {padded} samples per step are zero-weight padding: all ranks run equal batches"
        )
    if job.mixes_samples:
        notes.append(BATCH_NORM_NOTE)
    return [
        *notes,
        *explain_positions(job),
        *explain_lr(job.train),
        *explain_defaults(job.train),
        *explain_block_backend(job),
        *explain_transport(job),
        *notes_on(job.model),
    ]


def explain_positions(job: Job) -> list[str]:
    """A warning where sequences are longer than the model's RoPE positions."""
    model, length = job.model, job.data.seq_len
    if not isinstance(model, DecoderModel) or model.max_positions is None or length <= model.max_positions:
        return []
    limit = f"model.max_positions={model.max_positions}"
    unseen = "pretrained weights have never seen the positions beyond it"
    return [f"warning: data.seq_len={length} is more than {limit}: {unseen}"]
