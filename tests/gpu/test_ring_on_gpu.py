"""Ring attention with GPU kernels, on two ranks of one GPU, against attention in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    (dtype, causal, documents, groups, size)
    for dtype in ("float32", "bfloat16")
    for causal in (True, False)
    for documents in (False, True)
    for groups in (1, 2)
    for size in (64, 20)
    if causal or size == 64
]
"""A head size of 20, which no kernel supports, is padded in ``causal_ring_attention`` only."""


def attend(rank: int, ranks: int, port: int, out: str) -> None:
    """One rank: the largest relative error of output and gradients for each case."""
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812

    from meshwright.parallel.ring_attention import causal_ring_attention, ring_attention, zigzag_positions

    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    group, found = dist.group.WORLD.group_name, []
    for name, causal, documents, groups, size in CASES:
        dtype, generator = getattr(torch, name), torch.Generator().manual_seed(0)
        batch, heads, length = 2, 4, 248

        def draw(count, dtype=dtype, generator=generator, length=length, size=size):
            return torch.randn(2, length, count, size, generator=generator).to("cuda", dtype).transpose(1, 2)

        q, k, v, grad = draw(heads), draw(heads // groups), draw(heads // groups), draw(heads)
        segments = (torch.arange(length, device="cuda") // 37).expand(batch, length) if documents else None
        mask = None
        if documents:
            seen = segments.unsqueeze(2) == segments.unsqueeze(1)
            mask = (seen.tril() if causal else seen).unsqueeze(1)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        repeated = [exact[0], *(t.repeat_interleave(groups, 1) for t in exact[1:])]
        wanted = F.scaled_dot_product_attention(*repeated, attn_mask=mask, is_causal=causal and mask is None)
        expected = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
        own = zigzag_positions(length, rank, ranks).cuda()
        mine = [t[:, :, own].detach().requires_grad_() for t in (q, k, v)]
        if causal:
            mixed = causal_ring_attention(mine[0], mine[1], mine[2], segments, group)
        else:
            mixed, _ = ring_attention(*mine, segments, causal, group)
        got = [mixed, *torch.autograd.grad(mixed, mine, grad[:, :, own])]
        errors = [
            float((g.double() - e[:, :, own]).norm() / e[:, :, own].norm())
            for g, e in zip(got, expected, strict=True)
        ]
        found.append(max(errors))
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def test_ring_attention_equals_attention_in_one_process(tmp_path):
    """Output and gradients with flash attention (bf16) and memory-efficient attention (masks, float32)."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = str(tmp_path / "found.json")
    torch.multiprocessing.spawn(attend, (2, port, out), nprocs=2)
    found = dict(zip(CASES, json.loads(Path(out).read_text(encoding="utf-8")), strict=True))
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}
    assert {case: error for case, error in found.items() if error > tolerance[case[0]]} == {}
