"""Overlap of transfers and compute in ring attention: two ranks in network namespaces with a slow link.

The benchmark creates two network namespaces and a link with a limited rate in each direction (``tc``, token
bucket), and removes them at the end. In each namespace a rank trains the same small model with long sequences
and ``layout.cp=2``, on one core. It times alternately, in the same processes:

- compute: the same ring steps without transfers; a rank receives its own data;
- transfer: the same messages, all started at once, without compute;
- both: as in training.

The figure is the time of both over the larger of the other two; the minimum of several runs each, as other
load only adds time. The link rates are relative to the compute time: transfers take half of it, all of it,
and so on. Three kinds of work are measured:

- attention with timed waits: forward and backward of one call with sleeps instead of kernels. A sleep needs
  no core, so only the order of sends, waits and ring steps is measured;
- attention, with its kernels;
- a training step. Its feed-forward, norms and loss overlap no transfer, as the keys of the next block do not
  exist yet.

    python benchmarks/ring_overlap.py [--repeats 5] [--only waits] [--json]

It needs root, ``ip`` and ``tc``; without them the exit status is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.parallel import ring_attention as ring  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.plan.contract import PLAN_FILE, write_plan  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402
from meshwright.train.loop import report_end, start_meter  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402
from meshwright.train.worker import run_with_trainer  # noqa: E402

NAMESPACES = [f"mw-ring-{os.getpid()}-{rank}" for rank in range(2)]
DEVICE = "eth0"
ADDRESSES = ["10.98.77.1", "10.98.77.2"]
PORT = 29577
SHARES = {
    "waits": (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0),
    "attention": (0.5, 1.0, 2.0),
    "step": (0.5, 1.0, 2.0),
}
"""Transfer time over compute time."""
TITLES = {"waits": "attention, timed waits", "attention": "attention", "step": "training step"}
WAIT_S = 0.012
"""Sleep per query head in one forward ring step."""
BACKWARD = 2.5
"""Backward time over forward time."""
TARGET = 1.2
LIMIT_S = 900
"""Seconds after which the ranks are stopped."""
MODEL = {"num_layers": 1, "hidden_size": 128, "num_heads": 16, "num_kv_heads": 8, "head_dim": 32}
MODEL |= {"ffn_size": 256, "vocab_size": 320, "tied_embeddings": True}
TOKENS = 8192

Work = Callable[[], Any]
Message = tuple[tuple[int, ...], torch.dtype]


class NoTransfer:
    """Replaces a transfer: returns the sent tensor at once."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent

    def wait(self) -> Tensor:
        """The sent tensor."""
        return self._sent


class SleepingBlock(ring.AttentionBlock):
    """A ring step that sleeps instead of computing."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Zeros in the shape of the output."""
        time.sleep(WAIT_S * self._q.shape[1])
        return torch.zeros_like(self._q), torch.zeros(self._q.shape[:3])

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros in the shape of the gradients."""
        time.sleep(BACKWARD * WAIT_S * self._q.shape[1])
        return torch.zeros_like(self._q), torch.zeros_like(self._k), torch.zeros_like(self._v)


def record_messages(work: Work) -> list[Message]:
    """The messages that the work sends around the ring."""
    messages: list[Message] = []

    class Recorded(ring.RingSendRecv):
        def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
            messages.append((tuple(sent.shape), sent.dtype))
            super().__init__(sent, group)

    with mock.patch.object(ring, "RingSendRecv", Recorded):
        work()
    return messages


def send_all(messages: list[Message], group: dist.ProcessGroup) -> None:
    """Send the same messages without compute."""
    transfers = [ring.RingSendRecv(torch.empty(shape, dtype=dtype), group) for shape, dtype in messages]
    for transfer in transfers:
        transfer.wait()


def limit_rate(bits_per_s: float) -> None:
    """Limit the rate out of this rank's namespace."""
    burst = max(2**16, int(bits_per_s / 8 * 0.002))
    # A queue this long drops no packet: TCP's congestion control does not affect the measurement.
    rule = ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{burst}b", "latency", "4s"]
    subprocess.run(["tc", "qdisc", "replace", "dev", DEVICE, "root", *rule], check=True)


def lift_limit() -> None:
    """Remove the limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], check=False, stderr=subprocess.DEVNULL)


def time_together(work: Work) -> float:
    """Seconds from when both ranks are ready to when both are done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def broadcast_s(seconds: float) -> float:
    """The value of rank 0, so that both ranks set the same rate."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(value, 0)
    return value.item()


def measure(work: Work, group: dist.ProcessGroup, repeats: int, shares: tuple[float, ...]) -> dict[str, Any]:
    """One kind of work at all rates."""
    lift_limit()
    messages = record_messages(work)
    sent = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in messages)

    def compute() -> None:
        with mock.patch.object(ring, "RingSendRecv", NoTransfer):
            work()

    compute_s = broadcast_s(min(time_together(compute) for _ in range(repeats)))
    rows = []
    for share in shares:
        rate = 8 * sent / (share * compute_s)
        limit_rate(rate)
        times: dict[str, list[float]] = {"compute": [], "transfer": [], "both": []}
        for _ in range(repeats):
            times["both"].append(time_together(work))
            times["transfer"].append(time_together(lambda: send_all(messages, group)))
            times["compute"].append(time_together(compute))
        least = {name: min(found) for name, found in times.items()}
        ratio = least["both"] / max(least["compute"], least["transfer"])
        rows.append({"mbit_per_s": rate / 1e6, **{f"{k}_s": v for k, v in least.items()}, "ratio": ratio})
    lift_limit()
    return {"sent_bytes": sent, "messages": len(messages), "rows": rows}


def attend_once(trainer: Trainer) -> Work:
    """Forward and backward of one attention call, in the model's shape."""
    model, length = trainer.job.model, trainer.job.data.seq_len // 2
    torch.manual_seed(trainer.mesh.rank)
    heads = (MODEL["num_heads"], MODEL["num_kv_heads"], MODEL["num_kv_heads"])
    q, k, v = (torch.randn(1, h, length, model.head_size, requires_grad=True) for h in heads)  # type: ignore[union-attr]
    grad, name = torch.randn_like(q), trainer.mesh.group("cp").group_name

    def work() -> None:
        out, _ = ring.ring_attention(q, k, v, None, True, name)
        out.backward(grad)

    return work


def compare(trainer: Trainer) -> None:
    """On a rank: attention only, then full steps."""
    folder = Path(trainer.assignment.run_dir)
    task, group = json.loads((folder / "task.json").read_text()), trainer.mesh.group("cp")
    attend, meter, found = attend_once(trainer), start_meter(trainer), {}
    for kind in task["kinds"]:
        block = SleepingBlock if kind == "waits" else ring.AttentionBlock
        with mock.patch.object(ring, "AttentionBlock", block):
            work = (lambda: trainer.train_step(meter)) if kind == "step" else attend
            found[kind] = measure(work, group, task["repeats"], SHARES[kind])
    if trainer.mesh.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    report_end(trainer, evaluations=0, stopping=False)


def run_rank(rank: int, run_dir: str) -> int:
    """One of the two ranks, in its namespace."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME=DEVICE)
    store = dist.TCPStore(ADDRESSES[0], PORT, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    return run_with_trainer(compare, run_dir, store=store)


def command(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Two network namespaces with a link; removed at the end."""
    try:
        for space in NAMESPACES:
            command("ip", "netns", "add", space)
        peer = ("peer", "name", DEVICE, "netns", NAMESPACES[1])
        command("ip", "link", "add", DEVICE, "netns", NAMESPACES[0], "type", "veth", *peer)
        for space, address in zip(NAMESPACES, ADDRESSES, strict=True):
            command("ip", "-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            command("ip", "-n", space, "link", "set", DEVICE, "mtu", "9000", "up")
            command("ip", "-n", space, "link", "set", "lo", "up")
            command("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf",
                    "rate", "1gbit", "burst", "256kb", "latency", "400ms")  # fmt: skip
        yield
    finally:
        for space in NAMESPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def run_ranks(folder: Path) -> None:
    """Run both ranks; stop the other one when one fails, or at the time limit."""
    me = [sys.executable, __file__, "--run-dir", str(folder), "--rank"]
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", space, *me, str(rank)])
        for rank, space in enumerate(NAMESPACES)
    ]
    try:
        ends = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > ends or any(rank.poll() not in (None, 0) for rank in ranks):
                sys.exit(f"ring_overlap: a rank failed, or {LIMIT_S} s have passed")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        sys.exit("ring_overlap: a rank failed")


def run_all(task: dict[str, Any]) -> dict[str, Any]:
    """Plan, data, namespaces, ranks."""
    with tempfile.TemporaryDirectory() as place, two_namespaces():
        data, folder = Path(place, "data"), Path(place, "run")
        prepare_corpus(CorpusSpec(sources=("builtin:python-stdlib",), out=str(data)), Path())
        tree = {
            "model": MODEL,
            "data": {"path": str(data), "seq_len": task["tokens"]},
            "train": {"steps": 10**6, "global_batch": 1, "lr": 1e-3},
            "layout": {"cp": 2, "micro_batch": 1},
            "cluster": {"device": "cpu", "devices_per_node": 2, "matmul_flops_per_s": 1e11},
        }
        plan, _ = build_plan(build_job(tree))
        folder.mkdir()
        write_plan(plan, folder / PLAN_FILE)
        Assignment(str(folder), str(data), str(folder / "checkpoints")).write()
        (folder / "task.json").write_text(json.dumps(task))
        run_ranks(folder)
        return json.loads((folder / "found.json").read_text())


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print as text or as one JSON object."""
    date = datetime.datetime.now(tz=datetime.UTC).date()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    if as_json:
        print(json.dumps({"date": str(date), "machine": machine, "target": TARGET, **found}))
        return
    print(f"ring attention over a slow link, {date}, {machine}")
    for name, part in found.items():
        print(f"{TITLES[name]}: {part['messages']} messages, {part['sent_bytes'] / 1e6:.1f} MB each way")
        for row in part["rows"]:
            print(
                f"  {row['mbit_per_s']:7.0f} Mbit/s: compute {row['compute_s'] * 1e3:6.0f} ms, "
                f"transfer {row['transfer_s'] * 1e3:6.0f} ms, both {row['both_s'] * 1e3:6.0f} ms: "
                f"ratio {row['ratio']:.3f}"
            )
        worst = max(row["ratio"] for row in part["rows"])
        print(f"  worst ratio {worst:.3f} (target: at most {TARGET})")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind; the fastest is reported")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens per sequence")
    parser.add_argument("--only", choices=SHARES, action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        sys.exit(run_rank(arguments.rank, arguments.run_dir))
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        print("ring_overlap: network namespaces need root, ip and tc (iproute2)", file=sys.stderr)
        sys.exit(2)
    try:
        task = {"repeats": arguments.repeats, "tokens": arguments.tokens}
        found = run_all({**task, "kinds": arguments.only or list(SHARES)})
    except subprocess.CalledProcessError as error:
        print(f"ring_overlap: cannot create namespaces: {error.cmd}: {error.stderr}", file=sys.stderr)
        sys.exit(2)
    show(found, arguments.json)


if __name__ == "__main__":
    main()
