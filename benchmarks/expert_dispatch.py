"""Expert dispatch: time and device syncs of our MoE layer against a loop over experts.

Both layers have the same weights and router, on the same device, in the same process:

- ours: tokens sorted by expert, one grouped GEMM per matrix (``models.moe``); with ``--ranks`` the experts
  are sharded over processes and tokens are exchanged by all-to-all (``parallel.expert``);
- the loop of most published models: for every expert the CPU finds its tokens, gathers them, and adds the
  outputs back. Every process has all experts; nothing is sent.

The forward pass of our layer may sync once: to read the number of tokens per expert. Syncs are counted on a
GPU by torch's debug mode, on CPU by the operations that would sync on a GPU.

    python benchmarks/expert_dispatch.py
    python benchmarks/expert_dispatch.py --ranks 2
    python benchmarks/expert_dispatch.py --device cuda --hidden 2048 --ffn 4096 --tokens 16384 --experts 32
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dataclasses
import functools
import socket
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from baseline import report, time_pairs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.layout.tensor_parallel import shard_decoder
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.expert import TokenDispatcher
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from meshwright.spec.model import DecoderModel

SYNCING = {
    getattr(Tensor, name) for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero")
} | {torch.nonzero, torch.where, Tensor.masked_select}
"""Operations that read a value, or make a tensor with a data-dependent size: they sync on a GPU."""
TARGET = 0.0
"""Our time over the loop's, in one process: at most equal."""


class SyncCounter(TorchFunctionMode):
    """Counts operations that would sync on a GPU."""

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call and run it."""
        kwargs = kwargs or {}
        elementwise = func is torch.where and len(args) + len(kwargs) > 1  # torch.where(condition, a, b)
        self.count += func in SYNCING and not elementwise
        return func(*args, **kwargs)


class LoopOfExperts(nn.Module):
    """The usual loop over experts."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The output of the MoE layer, with its router and weights."""
        tokens, experts = x.flatten(0, 1), self.layer.experts
        choice = self.layer.router(tokens, None, self.layer.tokens)
        out = torch.zeros_like(tokens)
        matrices = [
            part.weight.view(experts.num_local, -1, part.weight.shape[1])
            for part in (experts.gate, experts.up, experts.down)
        ]
        for expert in range(experts.num_local):
            token, slot = torch.where(choice.experts_NK == expert)
            gate, up, down = (matrix[expert] for matrix in matrices)
            rows = tokens[token]
            made = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            out.index_add_(0, token, made * choice.weights_NK[token, slot].unsqueeze(1).to(made.dtype))
        return out.view_as(x)


def count_syncs(run: Callable[[], Any], device: torch.device) -> int:
    """Device syncs in a call."""
    if device.type != "cuda":
        with SyncCounter() as syncs:
            run()
        return syncs.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def build_layer(job: Job, device: torch.device, dtype: torch.dtype) -> MixtureOfExperts:
    """A layer of the job's model, or a rank's shard of it, with random weights."""
    assert isinstance(job.model, DecoderModel), "only decoders have experts"
    torch.manual_seed(0)
    layer = MixtureOfExperts(shard_decoder(job.model, 1, job.layout.ep)).to(device, dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer


def forward_backward(layer: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    layer(x).square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank; rank 0 reports."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    job = build_layer_job(options)
    mesh = None
    if options.ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, options.ranks, is_master=rank == 0)
        mesh = init_mesh(job, CollectiveCounter(), store, rank)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ours = build_layer(job, device, dtype)
    alone = build_layer(dataclasses.replace(job, layout=dataclasses.replace(job.layout, ep=1)), device, dtype)
    loop = LoopOfExperts(alone)
    if mesh is not None:
        ours.dispatch = TokenDispatcher(job, mesh)
    x = torch.randn(1, options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    runs = [functools.partial(forward_backward, layer, x) for layer in (ours, loop)]
    for run in runs:
        run()
    syncs = [count_syncs(functools.partial(layer, x), device) for layer in (ours, loop)]
    out = ours(x).square().mean()
    backward_syncs = count_syncs(out.backward, device)
    pairs = list(time_pairs(options.pairs, *runs))
    if rank == 0:
        row = {
            "ours_s": statistics.median(one for one, _ in pairs),
            "loop_s": statistics.median(other for _, other in pairs),
            "overhead": statistics.median(one / other for one, other in pairs) - 1,
            "pairs": len(pairs),
            "target": TARGET if mesh is None else None,
            "forward_syncs": syncs[0],
            "backward_syncs": backward_syncs,
            "loop_forward_syncs": syncs[1],
        }
        where = f"{options.ranks} ranks" if options.ranks > 1 else str(device)
        report(f"One layer of {options.experts} experts on {where}", [row], _line, options.json)
    if mesh is not None:
        destroy_mesh(mesh)


def _line(row: dict[str, Any]) -> str:
    times = f"forward and backward {row['ours_s'] * 1e3:.1f} ms, loop {row['loop_s'] * 1e3:.1f} ms"
    syncs = f"syncs: forward {row['forward_syncs']} (loop {row['loop_forward_syncs']})"
    return f"{times}; {syncs}, backward {row['backward_syncs']}"


def build_layer_job(options: argparse.Namespace) -> Job:
    """A job whose model has one MoE layer of the given sizes."""
    model = {
        "num_layers": 1, "hidden_size": options.hidden, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 256,
        "ffn_size": options.ffn, "num_experts": options.experts, "experts_per_token": options.per_token,
    }  # fmt: skip
    layout = {"dp_shard": options.ranks, "ep": options.ranks, "zero": 1} if options.ranks > 1 else {"pp": 1}
    return build_job(
        {
            "model": model,
            "data": {"path": "builtin:python-stdlib", "tokenizer": "byte", "seq_len": 128},
            "train": {"steps": 1, "global_batch": options.ranks},
            "layout": {**layout, "micro_batch": 1},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": options.ranks},
        }
    )


def main() -> None:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("ranks", 1), ("tokens", 4096), ("hidden", 256), ("ffn", 512), ("experts", 8), ("per-token", 2),
        ("pairs", 20),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.ranks > 1 and options.device == "cuda":
        parser.error("--ranks is for processes on CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
