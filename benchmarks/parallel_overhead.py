"""Overhead of our layouts over the same layouts in plain torch: two CPU ranks, one core each.

Both train the same model on the same batches in the same two processes, in alternate steps, so that other
load on the machine affects both. Plain torch is DDP, FSDP2 (``fully_shard``) or tensor parallelism
(``parallelize_module``) with a plain loop. The figure is the median over pairs of (ours - torch) / torch,
of rank 0.

    python benchmarks/parallel_overhead.py [--pairs 100] [--layout ddp]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from baseline import build_adamw, open_tokens, report, time_pairs  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.models.decoder import Decoder  # noqa: E402
from meshwright.parallel.build import build_model  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.plan.contract import PLAN_FILE, write_plan  # noqa: E402
from meshwright.runs.ranks import build_launch  # noqa: E402
from meshwright.spec.layout import Layout  # noqa: E402
from meshwright.spec.legality.table import with_layout  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402
from meshwright.train.loop import report_end, start_meter  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402
from meshwright.train.worker import run_with_trainer  # noqa: E402

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp+sp": {"tp": 2, "sequence_parallel": True},
}
WARM_UP = 5


def build_torch(trainer: Trainer, kind: str) -> Callable[[], Any]:
    """The same model parallelized by torch, with a plain loop."""
    job = trainer.job
    alone = with_layout(job, Layout(mode="given", micro_batch=job.layout.micro_batch))
    whole = build_model(alone, torch.device("cpu"))
    assert isinstance(whole, Decoder), "the job has a decoder"
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = whole
    if kind == "ddp":
        model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    elif kind == "fsdp2":
        for block in whole.list_blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        assert isinstance(whole, FSDPModule), "fully_shard changes the class of the module"
        whole._set_unshard_async_op(True)  # without it nothing overlaps on a CPU
    else:
        _apply_torch_tp(whole, mesh, sequence=kind == "tp+sp")
    optimizer, tokens = build_adamw(model, job.train), open_tokens(trainer)
    length, data_ranks = job.data.seq_len, job.layout.data_degree
    share = job.train.global_batch // data_ranks
    position = trainer.mesh.dp_rank * share

    def step() -> float:
        nonlocal position
        starts = [(position + i) * length for i in range(share)]
        rows = torch.from_numpy(np.stack([tokens[s : s + length + 1].astype(np.int64) for s in starts]))
        position += job.train.global_batch
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if data_ranks > 1:
            loss = model(inputs, targets) / (share * length)
        else:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        _clip(model, job.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reported = loss.detach()
        if data_ranks > 1:  # every rank reports the loss of all ranks
            dist.all_reduce(reported)
        return reported.item()

    return step


def _clip(model: nn.Module, most: float) -> None:
    """Clip the gradients. Torch cannot compute one norm of DTensors and plain tensors together."""
    kinds = [
        [p for p in model.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False)
    ]
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(full))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, most, total)


def _apply_torch_tp(model: Decoder, mesh: Any, sequence: bool) -> None:
    """The tensor-parallel plan of torch's tutorial."""
    residual = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
            "head": ColwiseParallel(input_layouts=residual, output_layouts=Replicate()),
            **({"norm": SequenceParallel()} if sequence else {}),
        },
    )
    for block in model.list_blocks():
        plan: dict[str, Any] = {
            "attention": PrepareModuleInput(
                input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=residual),
            "ffn": PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),)),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=residual),
        }
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)


def compare(trainer: Trainer) -> None:
    """Time our steps and torch's alternately; rank 0 writes the pairs."""
    task = json.loads(Path(trainer.assignment.run_dir, "task.json").read_text())
    torch_step, meter = build_torch(trainer, task["kind"]), start_meter(trainer)

    def ours() -> None:
        trainer.train_step(meter)

    pairs = list(time_pairs(WARM_UP + task["pairs"], ours, torch_step))
    if trainer.mesh.rank == 0:
        Path(trainer.assignment.run_dir, "pairs.json").write_text(json.dumps(pairs[WARM_UP:]))
    report_end(trainer, evaluations=0, stopping=False)


def run_rank(run_dir: str, listener: Any = None) -> int:
    """One of the two ranks."""
    return run_with_trainer(compare, run_dir, listener)


def measure(kind: str, pairs: int, data: Path, folder: Path) -> dict[str, Any]:
    """Run one layout on two ranks."""
    tree = {
        "model": {"num_layers": 6, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 768,
                  "vocab_size": 320, "tied_embeddings": False},
        "data": {"path": str(data), "seq_len": 128},
        "train": {"steps": 10**6, "global_batch": 16, "lr": 1e-3},
        "layout": LAYOUTS[kind] | {"micro_batch": 16 if "tp" in kind else 8},
        "cluster": {"device": "cpu", "devices_per_node": 2, "matmul_flops_per_s": 1e11},
    }  # fmt: skip
    plan, _ = build_plan(build_job(tree))
    folder.mkdir()
    write_plan(plan, folder / PLAN_FILE)
    Assignment(str(folder), str(data), str(folder / "checkpoints")).write()
    (folder / "task.json").write_text(json.dumps({"kind": kind, "pairs": pairs}))
    build_launch("parallel_overhead:run_rank", plan.job, folder, lambda event: None).run()
    times = json.loads((folder / "pairs.json").read_text())
    ours, torchs = zip(*times, strict=True)
    return {
        "layout": kind,
        "pairs": pairs,
        "ours_s": statistics.median(ours),
        "torch_s": statistics.median(torchs),
        "overhead": statistics.median((a - b) / b for a, b in times),
        "target": 0.03,
    }


def main() -> None:
    """Print the overhead of each layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        prepare_corpus(CorpusSpec(sources=("builtin:python-stdlib",), out=str(data)), Path(place))
        kinds = arguments.layout or list(LAYOUTS)
        rows = [measure(kind, arguments.pairs, data, Path(place) / kind) for kind in kinds]
    report("our layouts against plain torch", rows, _line, arguments.json)


def _line(row: dict[str, Any]) -> str:
    ours_ms, torch_ms = row["ours_s"] * 1e3, row["torch_s"] * 1e3
    return f"{row['layout']:6} ours {ours_ms:7.2f} ms, torch {torch_ms:7.2f} ms"


if __name__ == "__main__":
    main()
