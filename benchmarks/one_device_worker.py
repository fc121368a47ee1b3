"""Measures one kind of training step on one device, in its own process, for ``one_device.py``.

The process writes one JSON object per line to standard output (phases, then a result or a failure), and waits
for one line on standard input before it uses the device. Before that it imports, and on request compiles a
model of one layer with the same widths. Several processes do that at the same time; only the device is not
shared during measurements.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_shapes import BATCHES, COMPARED, SHAPES, SMALL, SMALL_BATCHES

from meshwright.launch.environment import prepare_environment

OURS = (
    "train.precision=bf16",
    "train.block_backend=triton",
    "train.residual_dtype=bf16",
    "layout.recompute=selective",
)
"""Settings of our job for the shapes that are compared; ``--set`` overrides them."""
OUTSIDE_THE_FIT = ("train.precision=bf16", "layout.recompute=selective")
"""Settings of our job for the other shapes; the block backend is the default."""
TRITON_KERNELS = ("train.gemm_autotune=true", "train.grad_dtype=bf16")
"""Further settings if Triton blocks are possible."""
CPU_BACKEND = ("train.block_backend=compile", "train.compile_backend=aot_eager")
"""On a CPU, where Triton blocks do not run and C++ takes too long to compile."""
OTHER_KERNELS = {"train.block_backend=compile", "train.block_backend=eager"}
"""Settings that exclude Triton blocks."""
WARM_UP = 3
"""Steps that are not timed; ours audits its second one."""
PROFILED = 2
"""Steps of a profile; two of them include the gap between steps."""
TRACEBACK_LINES = 25
REASON_LENGTH = 200


@dataclass(frozen=True)
class Task:
    """The task of one process."""

    kind: str
    """``ours``, ``bare``, ``transformers`` or ``floor``."""
    name: str
    """Name of the result."""
    shape: str
    steps: int
    small: bool
    device: str
    settings: tuple[str, ...] = ()
    """``key=value`` for our job."""
    precompile: bool = False
    """Whether to compile a model of one layer before using the device."""
    profile: bool = False
    threads: int = 1
    length: int = 0
    """Tokens per sequence, with as many sequences as keep the tokens per step; 0 for the shape's own."""
    text: str = ""
    """A prepared dataset; ours then reports the loss of every step. Random tokens by default."""

    def sequences(self) -> tuple[int, int]:
        """Sequences per step, at least one, and tokens of each."""
        batch, length = (SMALL_BATCHES if self.small else BATCHES)[self.shape]
        return (max(1, batch * length // self.length), self.length) if self.length else (batch, length)


def build_shape(task: Task, folder: Path, layers: int | None = None) -> Any:
    """The job of our side; the other kinds take their sizes from it."""
    from meshwright.spec.load import apply_override, build_job  # noqa: PLC0415

    batch, length = task.sequences()
    tree: dict[str, Any] = {
        "model": dict((SMALL if task.small else SHAPES)[task.shape]),
        "data": {"path": str(folder), "seq_len": length},
        "train": {"steps": 10**6, "global_batch": batch, "lr": 1e-4, "clip": 1.0},
        "layout": {"dp_replicate": 1, "micro_batch": batch},
        "cluster": {
            "device": task.device,
            "matmul_flops_per_s": 1e15,
        },  # given, as a run would measure it for a second
        "checkpoint": {"every_minutes": 0.0},
    }
    on_cpu = task.device == "cpu"
    backend = CPU_BACKEND if on_cpu else ()
    compared = task.shape in COMPARED
    own = () if on_cpu or not compared or OTHER_KERNELS & set(task.settings) else TRITON_KERNELS
    if any(text.startswith(("train.optimizer=", "train.grad_noise=")) for text in task.settings):
        own = tuple(text for text in own if not text.startswith("train.grad_dtype="))  # only with AdamW
    settings = (*(OURS if compared else OUTSIDE_THE_FIT), *own, *backend, *task.settings)
    problems = [problem for text in settings if (problem := apply_override(tree, text))]
    if layers is not None:
        tree["model"]["num_layers"] = layers
        tree["train"]["gemm_autotune"] = False  # several processes compile at a time: timings would be wrong
    return build_job(tree, problems)


def _seconds_since_start() -> float:
    """Age of this process, imports included; 0 if unknown."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


class Reporter:
    """Sends messages with times and device memory to the parent."""

    def __init__(self) -> None:
        # Prints of libraries go to standard error: standard output carries messages to the parent.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._last = time.perf_counter() - _seconds_since_start()

    def send(self, **content: Any) -> None:
        """Send one object; adds seconds since the last one, and current memory."""
        now = time.perf_counter()
        content.setdefault("seconds", now - self._last)
        self._last = now
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            content["held_bytes"] = torch.cuda.memory_allocated()
            content["peak_bytes"] = content.get("peak_bytes") or torch.cuda.max_memory_allocated()
        self._out.write(json.dumps(content) + "\n")


def write_tokens(folder: Path, job: Any) -> None:
    """Random tokens as prepared data: their values do not affect the time."""
    from meshwright.data.shard_writer import ShardWriter  # noqa: PLC0415
    from meshwright.data.tokenizer import ByteTokenizer  # noqa: PLC0415

    generator = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = job.model.vocab_size
    with ShardWriter(folder, tokenizer) as writer:
        for split, samples in (("train", 64), ("eval", 1)):
            length = samples * job.data.seq_len + 1
            writer.add(split, generator.integers(0, job.model.vocab_size, length).astype(np.uint32))
        writer.finish()


class EnoughSteps(Exception):  # noqa: N818  (not an error)
    """Ends the training loop."""


class StepClock:
    """Event listener that times the steps."""

    def __init__(self, warm_up: int, steps: int, task: Task, reporter: Reporter) -> None:
        self._first, self._last = warm_up, warm_up + steps
        self._profile = _Profile(task.device) if task.profile and steps > 1 else None
        self._reporter, self._on_gpu, self._reports_loss = reporter, task.device == "cuda", bool(task.text)
        self._ends: list[float] = []
        self.event_step_s: list[float] = []
        """Step times in the events of the timed steps."""
        self.loss: float | None = None
        self.audited: dict[str, Any] = {}
        """The event of the audited step."""
        self.measured: dict[str, Any] = {}
        self.folded: dict[str, Any] | None = None
        """The profile, if requested."""

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event; ends the run after enough steps."""
        if event["event"] == "state":
            self.audited = event
        if event["event"] != "step":
            return
        step = event["step"]
        self._ends.append(time.perf_counter())
        self.loss = event["loss"]
        if self._reports_loss:
            self._reporter.send(step=step, loss=self.loss)
        if step == 1:
            self._reporter.send(phase="first step")
        if step == self._first:
            _reset_peak(self._on_gpu)
        if self._first < step <= self._last:
            self.event_step_s.append(event["step_s"])
        if step == self._last:
            ends = self._ends[self._first - 1 :]
            times = [b - a for a, b in itertools.pairwise(ends)]
            self.measured = {**_figures(times), **_peaks(self._on_gpu)}
            self._reporter.send(phase="timed", **self.measured)
            if self._profile is None:
                raise EnoughSteps
            self._profile.start()
        elif step == self._last + PROFILED and self._profile is not None:
            self.folded = self._profile.stop()
            raise EnoughSteps


class _Profile:
    """Torch's profiler around some steps, summarized by kind of kernel; failures are not fatal."""

    def __init__(self, device: str) -> None:
        from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

        self._on_gpu = device == "cuda"
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profiler = profile(activities=[activity])
        self._failed = ""

    def start(self) -> None:
        """Start profiling."""
        try:
            self._synchronize()
            self._profiler.start()
        except Exception:
            self._failed = last_lines()

    def stop(self) -> dict[str, Any]:
        """The profile, or why there is none."""
        from kernel_classes import fold_trace  # noqa: PLC0415

        if self._failed:
            return {"failed": self._failed}
        try:
            self._synchronize()
            self._profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(trace))
                return fold_trace(json.loads(trace.read_text())["traceEvents"], PROFILED)
        except Exception:
            return {"failed": last_lines()}

    def _synchronize(self) -> None:
        """Wait for the device: a step may be reported before its optimizer step has finished."""
        import torch  # noqa: PLC0415

        if self._on_gpu:
            torch.cuda.synchronize()


def _reset_peak(on_gpu: bool) -> None:
    import torch  # noqa: PLC0415

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()


def _peaks(on_gpu: bool) -> dict[str, int | None]:
    import torch  # noqa: PLC0415

    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
    }


def _figures(times: list[float]) -> dict[str, Any]:
    return {"step_s": statistics.median(times), "mean_s": statistics.fmean(times), "times_s": times}


def _free(on_gpu: bool) -> None:
    import torch  # noqa: PLC0415

    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_ours(task: Task, job: Any, reporter: Reporter, warm_up: int, steps: int) -> dict[str, Any]:
    """The training loop of a rank, as ``meshwright train`` runs it, until there are enough steps."""
    from one_rank import DeviceWeights, build_rank  # noqa: PLC0415

    from meshwright.train.loop import train  # noqa: PLC0415

    clock = StepClock(warm_up, steps, task, reporter)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not task.text:
            write_tokens(folder, job)
        data = Path(task.text or folder)
        trainer = build_rank(job, folder, data, clock.on_event, DeviceWeights(job))
        reporter.send(phase="built")
        try:
            with suppress(EnoughSteps):
                train(trainer)
        finally:
            trainer.counter.remove()
            trainer.events.close()
        found = {
            **clock.measured,
            "loss": clock.loss,
            "event_step_s": statistics.median(clock.event_step_s),
            "audited_peak_bytes": clock.audited.get("peak_bytes"),
        }
        return {**found, "profile": clock.folded} if clock.folded else found


def run_steps(step: Callable[[], Any], warm_up: int, steps: int, device: str) -> dict[str, Any]:
    """Steps of a plain loop: not synchronized in between on a GPU, timed by CUDA events."""
    import torch  # noqa: PLC0415

    on_gpu = device == "cuda"
    for _ in range(warm_up):
        loss = step()
    if not on_gpu:
        ends = [time.perf_counter()]
        for _ in range(steps):
            loss = step()
            ends.append(time.perf_counter())
        times = [b - a for a, b in itertools.pairwise(ends)]
    else:
        torch.cuda.synchronize()
        _reset_peak(on_gpu)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            loss = step()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return {**_figures(times), **_peaks(on_gpu), "loss": float(loss)}


def run_bare(task: Task, job: Any, reporter: Reporter, warm_up: int, steps: int) -> dict[str, Any]:
    """The Llama of ``torch_llama``."""
    from torch_llama import Sizes, build_step, fast_attention  # noqa: PLC0415

    model = job.model
    sizes = Sizes(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_size,
        vocab=model.vocab_size,
        theta=model.rope_theta,
        length=job.data.seq_len,
    )
    backend = "aot_eager" if task.device == "cpu" else "inductor"
    with fast_attention(task.device):
        step = build_step(sizes, job.train.global_batch, task.device, backend)
        reporter.send(phase="built")
        step()
        reporter.send(phase="first step")
        found = run_steps(step, warm_up - 1, steps, task.device)
    reporter.send(phase="timed", **found)
    return found


def run_transformers(task: Task, job: Any, reporter: Reporter, warm_up: int, steps: int) -> dict[str, Any]:
    """A plain loop around the transformers model, compiled as a whole."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    model, device = job.model, torch.device(task.device)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=job.data.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with device:
        network = LlamaForCausalLM(config)
    called = torch.compile(network, backend="aot_eager" if task.device == "cpu" else "inductor")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    shape = (job.train.global_batch, job.data.seq_len)
    reporter.send(phase="built")

    def step() -> torch.Tensor:
        tokens = torch.randint(0, model.vocab_size, shape, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step()
    reporter.send(phase="first step")
    found = run_steps(step, warm_up - 1, steps, task.device)
    reporter.send(phase="timed", **found)
    return found


RUNS = {"ours": run_ours, "bare": run_bare, "transformers": run_transformers}


def precompile(task: Task, job: Any, reporter: Reporter) -> None:
    """Compile everything once; if that fails, the measurement may still succeed.

    Args:
        task: The task to be measured.
        job: Its job with one layer.
        reporter: Gets the result.
    """
    try:
        RUNS[task.kind](replace(task, text=""), job, reporter, 1, 1)
    except Exception:
        reporter.send(phase="precompile", failed=last_lines())
    _free(task.device == "cuda")
    reporter.send(phase="precompiled")


def last_lines() -> str:
    """The end of the current traceback."""
    return "\n".join(traceback.format_exc().strip().splitlines()[-TRACEBACK_LINES:])


def name_failure(error: Exception) -> str:
    """The error in one line."""
    if "out of memory" in str(error):  # torch's own error, or a library's
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:REASON_LENGTH].rstrip(": ")


def measure(task: Task, reporter: Reporter, wait: Callable[[], None]) -> dict[str, Any]:
    """All phases of a process.

    Args:
        task: The task.
        reporter: Gets each phase.
        wait: Returns when the device may be used.
    """
    prepare_environment(threads=task.threads)
    import torch  # noqa: PLC0415

    from meshwright.layout.flops import flops_per_token  # noqa: PLC0415
    from meshwright.plan.build import build_plan  # noqa: PLC0415

    on_gpu = task.device == "cuda"
    if on_gpu:
        torch.cuda.init()
        torch.empty(1, device="cuda")
    reporter.send(phase="imported", torch=torch.__version__)
    with tempfile.TemporaryDirectory() as name:
        job = build_shape(task, Path(name))
        if task.precompile and task.kind != "floor":
            precompile(task, build_shape(task, Path(name), layers=1), reporter)
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if task.kind == "ours":
        plan, _ = build_plan(job)
        reporter.send(
            phase="planned", planned_step_s=plan.step_s, planned_peak_bytes=plan.ranks[0].peak_bytes
        )
    reporter.send(phase="ready", ready=True)
    wait()
    reporter.send(phase="waited")
    if task.kind == "floor":
        from step_floor import time_floor  # noqa: PLC0415

        found = time_floor(job, reporter.send)
    else:
        found = RUNS[task.kind](task, job, reporter, WARM_UP, task.steps)
    tokens = job.train.global_batch * job.data.seq_len
    flops = tokens * flops_per_token(job.model, job.data.seq_len)
    step_s = found.get("step_s")
    return {
        "flops": flops,
        "tokens_per_s": tokens / step_s if step_s else None,
        "flops_per_s": flops / step_s if step_s else None,
        "held_before_bytes": held,
        **found,
    }


def main() -> None:
    """Run the task of the command line."""
    reporter = Reporter()
    values = json.loads(sys.argv[1])
    task = Task(**{**values, "settings": tuple(values["settings"])})

    def wait() -> None:
        if not sys.stdin.readline():  # the parent has exited
            raise SystemExit(1)

    try:
        reporter.send(result=measure(task, reporter, wait))
    except Exception as error:
        reporter.send(failed=last_lines(), reason=name_failure(error))
        sys.stdout.flush()
        os._exit(1)  # a broken device may hang at exit
    os._exit(0)  # freeing everything would take seconds


if __name__ == "__main__":
    main()
