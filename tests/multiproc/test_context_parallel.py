"""Context parallelism on real ranks: one-process attention, less memory per rank, all bytes as predicted."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from reference_runs import (
    TEN_STEPS,
    ResumeChecker,
    max_relative_diff,
    reference_losses,
    require_equal_losses_and_plan,
)

from meshwright.audit.event_scan import read_record
from meshwright.layout.ring_chunks import HEAD_CHUNKS, list_head_chunks
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel import ring_attention as ring
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.parallel.ring_attention import ring_attention, zigzag_positions
from meshwright.runs.ranks import build_launch
from meshwright.spec.load import load_job

HEADS = ((4, 4), (6, 3), (3, 1), (9, 9))
"""Query and key heads: equal, grouped, one key head, and more heads than head chunks."""
CASES = list(itertools.product((True, False), (True, False), HEADS))
"""Causal or not, with documents or not."""
RINGS = (2, 3, 4)
RING = ("layout.cp=4",)


def reference_attention(q, k, v, segments, causal):
    """Attention by its definition, with the full score matrix."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def largest_differences(group, causal, documents, heads):
    """Largest relative differences of a rank's output and gradients to those of one process."""
    rank, size = group.rank(), group.size()
    torch.manual_seed(7)
    length = 12 * size
    whole = [torch.randn(2, h, length, 8, requires_grad=True) for h in (heads[0], heads[1], heads[1])]
    segments = torch.randint(0, 2, (2, length)).cumsum(1) // 4 if documents else None
    expected = reference_attention(*whole, segments, causal)
    grad = torch.randn_like(expected)
    expected = [expected, *torch.autograd.grad(expected, whole, grad)]
    here = zigzag_positions(length, rank, size)
    own = [part[:, :, here].detach().requires_grad_() for part in whole]
    out, _ = ring_attention(*own, segments, causal, group.group_name)
    found = [out, *torch.autograd.grad(out, own, grad[:, :, here])]
    pairs = zip(found, expected, strict=True)
    return [((a - b[:, :, here]).abs().max() / b.abs().max()).item() for a, b in pairs]


def attend(run_dir, listener):
    """One of four ranks: every case in rings of 2, 3 and 4 ranks; with 4 the mask is built in parts."""
    counter = CollectiveCounter()
    counter.install()
    job = load_job(f"{run_dir}/job.toml", RING)
    mesh = init_mesh(job, counter)
    rings = [dist.new_group(range(size)) for size in RINGS]
    found = {}
    for group in rings:
        if isinstance(group, dist.ProcessGroup):  # this rank is in the group
            ring.MASK_ELEMENTS = 100 if group.size() == RINGS[-1] else ring.MASK_ELEMENTS
            found[str(group.size())] = [largest_differences(group, *case) for case in CASES]
    listener({"event": "compared", "rank": mesh.rank, "differences": found})
    destroy_mesh(mesh)
    return 0


def test_ring_attention_equals_full_attention(job_file, tmp_path):
    """Output and gradients of queries, keys and values on every rank, for every mask."""
    events = []
    build_launch(f"{__name__}:attend", load_job(str(job_file), RING), tmp_path, events.append).run()
    by_rank = {event["rank"]: event["differences"] for event in events if event["event"] == "compared"}
    for size in RINGS:
        found = [differences[str(size)] for differences in by_rank.values() if str(size) in differences]
        assert len(found) == size
        for of_rank in found:
            for case, differences in zip(CASES, of_rank, strict=True):
                message = f"{size} ranks; causal, documents, heads: {case}; output, q, k, v: {differences}"
                assert max(differences) < 1e-5, message


def test_head_chunks_have_every_key_head_once():
    for heads in range(1, 4 * HEAD_CHUNKS):
        chunks = list_head_chunks(heads)
        assert len(chunks) <= HEAD_CHUNKS
        assert [head for first, end in chunks for head in range(first, end)] == list(range(heads))


def activation_bytes(trained):
    """Activation bytes between forward and backward, equal on all ranks."""
    [kept] = {state.activation_bytes for state in read_record(trained.run_dir).state.values()}
    return kept


@pytest.mark.parametrize("context", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_activations_per_rank_are_inversely_proportional_to_cp(train, context):
    """1/2 on two ranks, 1/4 on four, without the head's gradient and the loss, which all ranks hold in full.

    Ulysses saves the attention output once more than one process does, so it compares four ranks with two.
    """
    whole = 320 * 64 * 4 + 4
    job = ("data.seq_len=256", "layout.micro_batch=2", "train.steps=3", "train.global_batch=4")
    job += (f"layout.context={context}", "model.num_kv_heads=4")
    two, four = (activation_bytes(train(f"layout.cp={cp}", *job)) - whole for cp in (2, 4))
    assert two == 2 * four
    if context == "ring":
        assert activation_bytes(train(*job[:-2], job[-1])) - whole == 2 * two


GPT = "model.positions=learned model.max_positions=48 model.norm=layer model.activation=gelu "
GPT += "model.attention_bias=true model.ffn_bias=true"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "job", "tolerance"),
    [
        ("cp=2", "data.mask=document", 1e-5),
        pytest.param("cp=2 context=ulysses zero=3 recompute=full", "", 1e-5, marks=slow),
        pytest.param(
            "cp=2 tp=2 sequence_parallel=true recompute=selective", "", 1e-5, marks=pytest.mark.slow
        ),
        pytest.param("cp=2", "train.precision=bf16", 1e-2, marks=pytest.mark.slow),
        pytest.param("cp=2 zero=1", GPT, 1e-5, marks=slow),
        pytest.param("cp=2 zero=2 recompute=full micro_batch=2", "", 1e-5, marks=slow),
        pytest.param("cp=2 zero=3 recompute=selective", "data.mask=document", 1e-5, marks=slow),
        pytest.param("cp=2 dp_shard=2 zero=3", "", 1e-5, marks=slow),
        pytest.param("cp=3 dp_replicate=2", "data.seq_len=48 model.num_kv_heads=1", 1e-5, marks=slow),
        pytest.param("cp=2 pp=2 micro_batch=2", "data.mask=document", 1e-5, marks=slow),
        pytest.param("cp=2 pp=2 zero=2 micro_batch=2 schedule=zb-h1", "", 1e-5, marks=slow),
        pytest.param("cp=4 recompute=full", "model.num_kv_heads=4", 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses", "data.mask=document", 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses zero=1 recompute=selective", GPT, 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses dp_shard=2 zero=2", "", 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses tp=2", "", 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses pp=2 zero=1 micro_batch=2", "", 1e-5, marks=slow),
        pytest.param("cp=4 context=ulysses", "model.num_kv_heads=1", 1e-5, marks=slow),
        pytest.param("cp=2 context=ulysses", "train.precision=bf16", 1e-2, marks=slow),
    ],
)
def test_losses_equal_one_process_and_the_plan_holds(train, layout, job, tolerance):
    """Ten losses as in one process; state and collectives equal to the byte, the peak within 5%."""
    assert require_equal_losses_and_plan(train, "cp", layout, job, tolerance) >= {"step", "eval"}


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_compiled_blocks_equal_one_process(train, context):
    """torch.compile does not trace into the ring, and its transfers are still counted."""
    compiled = ("train.block_backend=compile", "train.compile_backend=aot_eager")
    split = train("layout.cp=2", f"layout.context={context}", *TEN_STEPS, *compiled)
    assert max_relative_diff(split.losses, reference_losses(train)) < 1e-5
    assert split.result["audit_ok"], split.result["differences"]


@pytest.mark.slow
def test_checkpoints_resume_in_other_layouts(train, tmp_path):
    """From context parallel to one process and to FSDP, and back; the same layout resumes bit-identically."""
    runs = ResumeChecker(train, tmp_path)
    shared = ("layout.cp=2", "layout.zero=1")
    runs.require_bit_identical(shared)
    for other in (("layout.cp=1",), ("layout.dp_shard=2", "layout.zero=3")):
        runs.require_equal_losses(shared, other)
        runs.require_equal_losses(other, shared)
    runs.require_equal_losses(shared, ("layout.cp=2", "layout.context=ulysses", "layout.zero=0"))
