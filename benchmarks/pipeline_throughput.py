"""Overhead of our pipeline over torch's: two CPU ranks, one core each, 1F1B.

Both train the same two stages from the same weights on the same micro-batches, in the same two processes,
in alternate steps, so that other load on the machine affects both. Torch's side is ``PipelineStage`` and
``Schedule1F1B`` of ``torch.distributed.pipelining`` with a plain loop: reading, clipping over both ranks,
the optimizer step, the loss for both ranks. Before the timing, both must have equal losses, step by step.
The figure is the median over pairs of (ours - torch) / torch, of rank 0: of full steps, and of forward and
backward only.

    python benchmarks/pipeline_throughput.py [--pairs 100]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from baseline import build_adamw, open_tokens, report, time_pairs  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402

from meshwright.core.events import EVENTS_FILE  # noqa: E402
from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.models.decoder import Stages  # noqa: E402
from meshwright.models.init import find_weight_source  # noqa: E402
from meshwright.parallel.batch import Batch  # noqa: E402
from meshwright.parallel.build import build_local_model, init_weights  # noqa: E402
from meshwright.parallel.pipeline.pipeline import activation_shape  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.plan.contract import PLAN_FILE, write_plan  # noqa: E402
from meshwright.runs.ranks import build_launch  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402
from meshwright.train.loop import report_end, start_meter  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402
from meshwright.train.worker import run_with_trainer  # noqa: E402

WARM_UP = 5
"""Untimed steps of both; their losses must be equal."""
TOLERANCE = 1e-4
"""Largest relative difference of losses due to rounding."""


class TorchPipeline:
    """The same stage in torch's schedule, with a plain loop."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        self._job, self._pp_rank, self._order = job, trainer.mesh.pp_rank, trainer.data.order
        model = build_local_model(job, trainer.mesh)
        init_weights(model, job, find_weight_source(job, from_hf=False), trainer.mesh)
        assert isinstance(model, Stages), "the job has pp=2"
        (self.module,) = model
        self._optimizer, self._tokens = build_adamw(self.module, job.train), open_tokens(trainer)
        self._targets = job.train.global_batch * job.data.seq_len
        self._positions = 0
        activations = torch.empty(activation_shape(job), requires_grad=True)
        tokens = torch.empty(activations.shape[:2], dtype=torch.int64)
        stage = PipelineStage(
            self.module,
            self._pp_rank,
            2,
            torch.device("cpu"),
            input_args=activations if self._pp_rank else tokens,
            output_args=torch.empty(()) if self._pp_rank else activations,
            group=trainer.mesh.group("pp"),
        )
        # The last stage returns the summed loss; torch's loss_fn divides it by the number of targets.
        self._schedule = Schedule1F1B(
            stage,
            trainer.plan.micro_batches,
            loss_fn=lambda loss, targets: loss / self._targets,
            scale_grads=False,
        )

    def step(self) -> float:
        """One step; returns the loss."""
        loss = self.passes(self.read())
        parameters = list(self.module.parameters())
        local_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        squared = local_norm.square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, self._job.train.clip, squared.sqrt())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss)  # both ranks report the loss
        return loss.item()

    def read(self) -> Tensor:
        """The samples of a step, in our order."""
        count, length = self._job.train.global_batch, self._job.data.seq_len
        samples = self._order.samples_at(np.arange(self._positions, self._positions + count))
        self._positions += count
        rows = [self._tokens[s * length : s * length + length + 1].astype(np.int64) for s in samples]
        return torch.from_numpy(np.stack(rows))

    def passes(self, rows: Tensor) -> Tensor:
        """All forward and backward passes; returns the loss, zero on the first rank."""
        if not self._pp_rank:
            self._schedule.step(rows[:, :-1].contiguous())
            return torch.zeros(())
        targets, losses = rows[:, 1:].contiguous(), list[Tensor]()
        self._schedule.step(target=targets, losses=losses, targets_BT=targets, return_outputs=False)
        return torch.stack(losses).detach().sum()


class Ours:
    """A step of our trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._meter = trainer, start_meter(trainer)
        assert trainer.pipeline is not None, "the job has pp=2"
        self._pipeline, self._divisor = trainer.pipeline, 1

    def step(self) -> None:
        """One full step of a run."""
        self._trainer.train_step(self._meter)

    def read(self) -> list[Batch]:
        """The micro-batches of the first step."""
        trainer = self._trainer
        samples = trainer.data.order.samples_at(np.arange(trainer.job.train.global_batch))
        self._divisor = trainer.data.train.count_targets(samples)
        return list(trainer.data.train.micro_batches(samples))

    def passes(self, batches: list[Batch]) -> None:
        """All forward and backward passes."""
        self._pipeline.train(batches, self._divisor, None)

    def clear(self) -> None:
        """Zero the gradients."""
        self._trainer.rank_parameters.zero_grads()


def require_equal_losses(trainer: Trainer, ours: Ours, torch_pipeline: TorchPipeline) -> None:
    """Warm both up and check that their losses are equal."""
    theirs = []
    for _ in range(WARM_UP):
        ours.step()
        theirs.append(torch_pipeline.step())
    lines = Path(trainer.assignment.run_dir, EVENTS_FILE).read_text().splitlines()
    events = [json.loads(line) for line in lines if '"step"' in line]
    mine = [e["loss"] for e in events if e["event"] == "step" and e["rank"] == trainer.mesh.rank]
    for step, (loss, other) in enumerate(zip(mine, theirs, strict=True)):
        assert abs(loss - other) <= TOLERANCE * other, f"step {step}: ours {loss}, torch's {other}"


def compare(trainer: Trainer) -> None:
    """Full steps, then passes only; rank 0 writes the pairs."""
    task = json.loads(Path(trainer.assignment.run_dir, "task.json").read_text())
    ours, theirs = Ours(trainer), TorchPipeline(trainer)
    require_equal_losses(trainer, ours, theirs)
    batches, rows = ours.read(), theirs.read()

    def clear() -> None:
        ours.clear()
        theirs.module.zero_grad(set_to_none=True)

    found = {
        "full step": list(time_pairs(task["pairs"], ours.step, theirs.step, clear)),
        "passes": list(
            time_pairs(task["pairs"], lambda: ours.passes(batches), lambda: theirs.passes(rows), clear)
        ),
    }
    if trainer.mesh.rank == 0:
        Path(trainer.assignment.run_dir, "pairs.json").write_text(json.dumps(found))
    report_end(trainer, evaluations=0, stopping=False)


def run_rank(run_dir: str, listener: Any = None) -> int:
    """One of the two ranks."""
    return run_with_trainer(compare, run_dir, listener)


def measure(pairs: int, place: Path) -> list[dict[str, Any]]:
    """Run the pipeline on two ranks."""
    data, folder = place / "data", place / "run"
    prepare_corpus(CorpusSpec(sources=("builtin:python-stdlib",), out=str(data)), place)
    tree = {
        "model": {"num_layers": 4, "hidden_size": 192, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 512,
                  "vocab_size": 320, "tied_embeddings": False},
        "data": {"path": str(data), "seq_len": 128},
        "train": {"steps": 10**6, "global_batch": 16, "lr": 1e-3, "schedule": "constant", "warmup": 0},
        "layout": {"pp": 2, "schedule": "1f1b", "micro_batch": 2},
        "cluster": {"device": "cpu", "devices_per_node": 2, "matmul_flops_per_s": 1e11},
    }  # fmt: skip
    plan, _ = build_plan(build_job(tree))
    folder.mkdir()
    write_plan(plan, folder / PLAN_FILE)
    Assignment(str(folder), str(data), str(folder / "checkpoints")).write()
    (folder / "task.json").write_text(json.dumps({"pairs": pairs}))
    build_launch("pipeline_throughput:run_rank", plan.job, folder, lambda event: None).run()
    found = json.loads((folder / "pairs.json").read_text())
    return [_summarise(what, times) for what, times in found.items()]


def _summarise(what: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    ours, torchs = zip(*times, strict=True)
    overheads = [(a - b) / b for a, b in times]
    quartiles = statistics.quantiles(overheads, n=4)
    return {
        "what": what,
        "pairs": len(times),
        "ours_s": statistics.median(ours),
        "torch_s": statistics.median(torchs),
        "fastest_s": (min(ours), min(torchs)),
        "quartiles": (quartiles[0], quartiles[-1]),
        "overhead": statistics.median(overheads),
        "target": 0.05,
    }


def main() -> None:
    """Print both times and our overhead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with tempfile.TemporaryDirectory() as place:
        rows = measure(arguments.pairs, Path(place))
    report("1F1B with two stages, ours against torch's", rows, _line, arguments.json)


def _line(row: dict[str, Any]) -> str:
    ours_ms, torch_ms = row["ours_s"] * 1e3, row["torch_s"] * 1e3
    ours_best_ms, torch_best_ms = (seconds * 1e3 for seconds in row["fastest_s"])
    low, high = row["quartiles"]
    medians = (
        f"ours {ours_ms:.2f} ms, torch {torch_ms:.2f} ms (fastest {ours_best_ms:.2f}, {torch_best_ms:.2f})"
    )
    return f"{row['what']:10} {medians}, quartiles {low:+.2%} to {high:+.2%}"


if __name__ == "__main__":
    main()
