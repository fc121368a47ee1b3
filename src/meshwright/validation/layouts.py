"""The layout of a published run: its degrees, and the framework's defaults for blank cells."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import Profile
from meshwright.plan.time.block import SOFTMAX_BATCH
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.numbers import divisors
from meshwright.validation.cells import NO, OFFLOADED_ACTIVATIONS, YES, Cells, NotExpressedError, find_stated

SHARDING_PROFILES = ("torchtitan", "torchtitan-2025", "composer-fsdp", "huggingface")
"""Profiles that use ZeRO-3 (FSDP) by default."""
DISTRIBUTED_OPTIMIZER_PROFILES = ("megatron-core", "megatron-bridge", "megatron-like", "hai-llm")
"""Profiles of Megatron with a distributed optimizer."""
LEAST_MICRO_BATCHES_PER_STAGE = 2
"""Least micro-batches per pipeline stage with a micro-batch that we choose."""


def count_devices(cells: Cells) -> int:
    """Number of devices of a row: as published, or the product of its degrees.

    Raises:
        NotExpressedError: Neither is published.
    """
    if found := re.fullmatch(r"(\d{1,5})\s*[x*]\s*(\d{1,3})", cells.text("num_gpus").lower()):
        return max(1, int(found[1]) * int(found[2]))
    given = cells.optional("num_gpus")
    if given is not None:
        return given
    if found := re.match(r"(\d+)\s*x\s*(?=[a-z])", cells.text("gpu").lower()):
        cells.fill("num_gpus", int(found[1]), "from gpu")
        return max(1, int(found[1]))
    degrees = [cells.optional(name) for name in ("tp", "pp", "dp")]
    if None in degrees:
        raise NotExpressedError("num_gpus not published")
    devices = int(np.prod([d or 1 for d in degrees])) * (cells.optional("cp") or 1)
    cells.fill("num_gpus", devices, "the product of the degrees")
    return devices


def build_layout(cells: Cells, profile: Profile, cluster: Cluster, devices: int) -> Layout:
    """The layout of a row; its micro-batch may be open.

    Raises:
        NotExpressedError: Degrees are not published, or their product is not the number of devices.
    """
    tp, pp, cp, dp = _degrees(cells, profile, devices)
    zero = _zero_stage(cells, profile) if dp * cp > 1 else 0
    shard, replicate = _sharding(cells, zero, dp, tp, cluster)
    ep = cells.optional("ep") or _guess_ep(cells, dp * cp * tp)
    if dp * cp * tp % ep:
        cells.remark(f"ep={ep} does not divide dp x cp x tp={dp * cp * tp}")
    if zero == 0 and ep > 1:
        shard = next((n for n in range(ep, dp + 1) if dp % n == 0), dp)
        replicate = dp // shard
    virtual = _virtual_stages(cells, pp)
    return Layout(
        mode="given",
        pp=pp,
        cp=cp,
        tp=tp,
        dp_replicate=replicate,
        dp_shard=shard,
        ep=ep,
        etp=cells.optional("etp") or _guess_etp(cells, profile, tp, ep, dp * cp * tp),
        zero=zero,
        sequence_parallel=_sequence_parallel(cells, profile, tp),
        schedule=_schedule(cells, virtual),
        virtual_stages=virtual,
        context=_context(cells),
        micro_batch=_micro_batch(cells, dp),
        recompute=_recompute(cells, profile),
        offload=_offload(cells),
    )


def _guess_ep(cells: Cells, ranks: int) -> int:
    """Expert parallelism of a row without it: none, unless a dispatcher between ranks is named."""
    experts = cells.optional("experts")
    if not experts or not re.search(r"deep-?ep|hybrid-?ep|expert parallel", cells.note):
        return 1
    ep = math.gcd(experts, ranks)
    cells.fill("ep", ep, "as many ranks as share the experts evenly: the note names a dispatcher")
    return ep


def _guess_etp(cells: Cells, profile: Profile, tp: int, ep: int, ranks: int) -> int:
    """Tensor parallelism of experts without a cell: tp in Megatron-Core, and in any Megatron if ep is 1.

    `--expert-tensor-parallel-size` is `--tensor-model-parallel-size` by default. The recipes of NeMo and
    Megatron Bridge set it to 1 for expert parallelism.
    """
    core = profile.name == "megatron-core" or (profile.name.startswith("megatron") and ep == 1)
    if not cells.optional("experts") or not core or tp == 1 or ranks % (ep * tp):
        return 1
    cells.fill("etp", tp, "tp, default of Megatron-Core")
    return tp


def _micro_batch(cells: Cells, dp: int) -> int | None:
    """As published, at most the samples per rank; None if blank."""
    given, batch = cells.optional("micro_batch"), cells.optional("global_batch")
    if given is None or batch is None or given <= -(-batch // dp):
        return given
    cells.remark(f"micro_batch={given}: predicted with {-(-batch // dp)}, the samples per rank")
    return -(-batch // dp)


def _context(cells: Cells) -> Any:
    """Context parallel method: from the note."""
    return "ulysses" if "ulysses" in cells.note else "ring"


def _degrees(cells: Cells, profile: Profile, devices: int) -> tuple[int, int, int, int]:
    """tp, pp, cp and dp of a row."""
    names = ("tp", "pp", "dp", "cp")
    given = {name: cells.optional(name) for name in names}
    sharded = profile.name in SHARDING_PROFILES and (cells.zero_stage() or 3) == 3
    if not sharded and devices > 1 and all(given[name] is None for name in ("tp", "pp", "dp")):
        raise NotExpressedError("layout not published")
    for name in ("cp", "tp", "pp"):
        if given[name] is None:
            if name != "cp" and not sharded and devices > 1 and given["dp"] is None:
                raise NotExpressedError(f"{name} not published")
            given[name] = 1
            if name != "cp":
                cells.fill(name, 1)
    tp, pp, cp = (given[name] or 1 for name in ("tp", "pp", "cp"))
    dp = given["dp"]
    if dp is None:
        dp = max(devices // (tp * pp * cp), 1)
        cells.fill("dp", dp, "devices over the other degrees")
    elif cp > 1 and tp * pp * dp == devices and dp % cp == 0:
        cells.remark(f"dp={dp} includes cp={cp}: predicted with dp={dp // cp}")
        dp //= cp
    if tp * pp * cp * dp != devices:
        raise NotExpressedError(f"the product of the degrees is {tp * pp * cp * dp}, not {devices} devices")
    return tp, pp, cp, dp


_ZERO_NAME = re.compile(r"\bzero[- ]?(?:stage[- ]?)?([0-3])\b")


def _named_zero_stage(cells: Cells) -> int | None:
    """The stage that the framework's name or the note states: `DeepSpeed ZeRO-2`, `PyTorch DDP`."""
    for text in (cells.text("framework").lower(), cells.note):
        if found := find_stated(_ZERO_NAME, text):
            return int(found[1])
    return 0 if re.search(r"\bddp\b", cells.text("framework").lower()) else None


_GATHERED = re.compile(r"reshard_after_forward\W{0,4}(never|false|0)|\bno reshard_after_forward")
"""Notes of FSDP runs that gather parameters once per step."""


def _zero_stage(cells: Cells, profile: Profile) -> int:
    zero = cells.zero_stage()
    if zero is None and (zero := _named_zero_stage(cells)) is not None:
        cells.fill("zero_stage", zero, "from the framework or the note")
    if zero is None:
        if profile.name in (*SHARDING_PROFILES, "deepspeed-zero"):
            zero = 3
        else:
            zero = 1 if profile.name.startswith(DISTRIBUTED_OPTIMIZER_PROFILES) else 0
        cells.fill("zero_stage", zero, f"default of {profile.name}")
    if zero > 3:
        raise cells.cell_error("zero_stage", "is not 0, 1, 2 or 3")
    if zero == 3 and _GATHERED.search(cells.note):
        cells.remark("parameters stay gathered after the forward pass: ZeRO-2")
        return 2
    return zero


def _count_copies(note: str) -> int:
    """Copies of the sharded state (`--num-distributed-optimizer-instances`); 0 if not stated."""
    found = re.search(r"(\d+) (?:distributed[- ])?optimizer instances|optimizer-instances[ =](\d+)", note)
    return int(found[1] or found[2]) if found else 0


def _sharding(cells: Cells, zero: int, dp: int, tp: int, cluster: Cluster) -> tuple[int, int]:
    """dp_shard and dp_replicate."""
    if zero == 0:
        return 1, dp
    shard = dp
    found = re.search(r"(?:fsdp|dp_shard) ?= ?(\d+)|shard(?:ed|ing)? (?:size|degree|over) (\d+)", cells.note)
    if found:
        shard = int(found[1] or found[2])
    elif (copies := _count_copies(cells.note)) and dp % copies == 0:
        shard = dp // copies
        cells.remark(f"{copies} copies of the optimizer state: shards of {shard} ranks")
    elif re.search(r"hsdp|hybrid.?shard", cells.note) and cluster.devices_per_node > tp:
        shard = cluster.devices_per_node // tp
        cells.remark(f"hybrid sharding read as {min(shard, dp)} ranks, those of a node")
    if shard < 1 or dp % shard:
        return dp, 1
    return shard, dp // shard


def _sequence_parallel(cells: Cells, profile: Profile, tp: int) -> bool:
    given = cells.flag("sequence_parallel")
    if tp == 1:
        return False
    if given is None:
        given = profile.name.startswith((*DISTRIBUTED_OPTIMIZER_PROFILES, "torchtitan", "meshwright"))
        cells.fill("sequence_parallel", "y" if given else "n", f"default of {profile.name}")
    return given


def _virtual_stages(cells: Cells, pp: int) -> int:
    if pp == 1:
        return 1
    given = cells.optional("interleave")
    if given is not None:
        return given
    if re.search(r"(?<!before )interleaved (1f1b|schedule)", cells.note):
        cells.fill("interleave", 2, "the note says interleaved")
        return 2
    cells.fill("interleave", 1)
    return 1


def _schedule(cells: Cells, virtual: int) -> Any:
    note = cells.note
    named = (
        (r"dual.?pipe", "dualpipe-v"),
        (r"\bzb-?v\b|zero.bubble v", "zbv"),
        (r"\bzb-?h1\b|zero.bubble", "zb-h1"),
        (r"gpipe", "gpipe"),
    )
    found = next((name for pattern, name in named if re.search(pattern, note)), None)
    if found:
        return found
    return "interleaved" if virtual > 1 else "1f1b"


_AC = r"(?:[ -](?:ac|sac|recompute|recomputation|(?:(?:activation|gradient) )?checkpointing))?"
_RECOMPUTE = re.compile(
    rf"(?P<none>(?:none|no|off|without|disabled){_AC})|"
    rf"(?P<selective>selective{_AC}|sac|per-op sac|selective (?:op|layer))|"
    rf"(?P<full>(?:full|block|uniform|all){_AC}|ac|(?:activation|gradient) checkpointing)"
)
"""Usual spellings of the three settings of activation checkpointing."""


def _recompute(cells: Cells, profile: Profile) -> Any:
    text, note = cells.text("recompute").lower(), cells.note
    if re.search(r"ac every 2nd layer", note):
        cells.remark("every 2nd layer recomputed: predicted as selective")
    if found := _RECOMPUTE.fullmatch(text):
        return next(kind for kind, value in found.groupdict().items() if value)
    if not text:
        from_note = next(
            (kind for kind in ("full", "selective") if re.search(rf"{kind}[^;,]{{0,12}}(ac\b|recomp)", note)),
            None,
        )
        default = from_note or ("selective" if profile.name.startswith(("torchtitan", "hai-llm")) else "none")
        cells.fill("recompute", default, "from the note" if from_note else f"default of {profile.name}")
        return default
    if text in NO:
        return "none"
    if text in YES:
        return "full"
    if re.search(r"attn|attention|mlp|norm|moe|op\b|partial|core|proj|act\b", text):
        cells.remark(f"recompute {text}: predicted as selective")
        return "selective"
    raise cells.cell_error("recompute", "is none of none, selective, full")


_OFFLOAD = r"offload\w*|zero-infinity"
_OFFLOADS_ALL = (
    r"zero-infinity|param\w* (and \w+ )?offload|offload\w*[ (:]*(of )?((the )?\w+,? (and )?)?"
    r"(all\b|everything|param|weights)"
)


def _offload(cells: Cells) -> Any:
    note = OFFLOADED_ACTIVATIONS.sub("", cells.note)
    note = re.sub(r"(no|without) (cpu |optimizer |param\w* |activation )?offload\w*( of \w+)?", "", note)
    if not find_stated(_OFFLOAD, note):
        return "none"
    return "all" if find_stated(_OFFLOADS_ALL, note) else "optimizer"


def read_global_batch(cells: Cells, layout: Layout, seq_len: int) -> int:
    """Global batch: as published, or from the note's local batch, accumulation or tokens per batch."""
    given = cells.optional("global_batch")
    if given is not None:
        return given
    share, why = None, ""
    if found := re.search(r"local batch (?:size )?(\d+)", cells.note):
        share, why = int(found[1]), "from the local batch"
    elif layout.micro_batch:
        accumulated = re.search(r"grad_?\s?accum\w*\s?=?\s?(\d+)", cells.note)
        rounds = LEAST_MICRO_BATCHES_PER_STAGE * layout.pp if layout.pp > 1 else 1
        share = layout.micro_batch * (int(accumulated[1]) if accumulated else rounds)
        why = "from the micro-batch" + (" and accumulation" if accumulated else "")
        if rounds > 1 and not accumulated:
            why += f", {rounds} micro-batches"
    if share:
        cells.fill("global_batch", share * layout.data_degree, why)
        return share * layout.data_degree
    if found := re.search(r"([\d.]+)\s?m[ -]tokens?(?: per)? batch", cells.note):
        batch = max(1, round(float(found[1]) * 2**20 / seq_len))
        cells.fill("global_batch", batch, "from tokens per batch")
        return batch
    raise NotExpressedError("global_batch not published")


def choose_micro_batch(cells: Cells, workload: Workload, layout: Layout) -> int:
    """The micro-batch of a row without one: from its accumulation, the framework's default, or our rule."""
    share = max(1, workload.global_batch // layout.data_degree)
    if found := re.search(r"grad_?\s?accum\w*\s?=?\s?(\d+)", cells.note):
        micro_batch = max(1, share // max(1, int(found[1])))
        cells.fill("micro_batch", micro_batch, "from the accumulation")
        return micro_batch
    if workload.profile.name.startswith("torchtitan"):
        # By default as many micro-batches as stages; one without a pipeline.
        micro_batch = max(1, share // layout.pp)
        cells.fill("micro_batch", micro_batch, "as many micro-batches as stages, default of torchtitan")
        return micro_batch
    if workload.profile.name.startswith("megatron"):
        micro_batch = _fused_softmax_micro_batch(workload, layout, share)
        cells.fill("micro_batch", micro_batch, "as Megatron's published tables at scale")
        return micro_batch
    rounds = LEAST_MICRO_BATCHES_PER_STAGE * layout.pp if layout.pp > 1 else 1
    options = [n for n in divisors(share) if share // n >= rounds] or [1]
    grid = Grid.of([layout] * len(options))
    columns = {**vars(grid), "micro_batch": np.array(options, dtype=np.int64)}
    fits = estimate_memory(workload, Grid(**columns)).fits(workload)
    micro_batch = max((n for n, fit in zip(options, fits, strict=True) if fit), default=1)
    left = f" with at least {rounds} micro-batches" if rounds > 1 else ""
    cells.fill("micro_batch", micro_batch, f"largest size that fits{left}")
    return micro_batch


def _fused_softmax_micro_batch(workload: Workload, layout: Layout, share: int) -> int:
    """One sample, or as many as Megatron's old fused softmax needs."""
    heads = workload.model.num_heads / layout.tp
    if workload.profile.time.flash_attention:
        return 1
    return next((n for n in range(1, min(share, SOFTMAX_BATCH) + 1) if n * heads % SOFTMAX_BATCH == 0), 1)
