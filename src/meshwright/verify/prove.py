"""One rank of ``meshwright prove``: real steps of the real loop, written down or compared.

The reference, one process, keeps what modules read and put out in its first step, its gradients, and its
weights after the first step. Every rank of the layout holds its own beside them, whole, tensor by tensor, so
that no rank ever holds a second model and replicas that disagree are seen on the rank that is wrong.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.core.events import Listener
from meshwright.models.moe import ExpertLinear, Experts
from meshwright.models.routing import Router
from meshwright.parallel.context import gather_full_sequence
from meshwright.parallel.full_tensors import canonical_name, full_tensor, is_dtensor, named_parameters
from meshwright.parallel.tensor import gather_full_activation
from meshwright.train.batches import split_into_micro_batches
from meshwright.train.loop import report_end, start_meter
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_with_trainer
from meshwright.verify.proof_task import (
    ACTIVATIONS_FILE,
    GRADIENT_STEPS,
    PROOF_PHASE,
    WEIGHTS_FILE,
    ActivationDifference,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    TensorDifference,
    gradients_file,
)
from meshwright.verify.routing_decisions import RecordedRouting, ReplayedRouting, RoutingDecisions

ActivationCallback = Callable[[str, str, int, Tensor], None]
"""Told module, `input` or `output`, the sample's place in the batch, and its part of the tensor."""


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Prove as this rank; returns the exit status."""
    return run_with_trainer(prove, run_dir, listener)


def prove(trainer: Trainer) -> None:
    """Take the steps of the proof with a witness beside them."""
    folder = Path(trainer.assignment.run_dir)
    task = ProofTask.read(folder)
    witness = (
        ReferenceRecorder(trainer, task, folder)
        if task.reference is None
        else ReferenceComparer(trainer, task, folder)
    )
    meter = start_meter(trainer)
    stopping = False
    while trainer.step < task.steps and not stopping:
        stopping = trainer.train_step(meter, witness).stop_requested
        witness.after_step()
    if not stopping:
        witness.finish()
    report_end(trainer, evaluations=0, stopping=stopping)


class ActivationHooks:
    """Hooks on every module that show what chosen samples look like on their way in and out."""

    def __init__(self, trainer: Trainer, positions: Sequence[int], on_activation: ActivationCallback) -> None:
        batches, self._split, self._context = (
            trainer.data.train,
            trainer.parallel.tp,
            trainer.parallel.cp,
        )
        self._counter = trainer.counter
        places = np.arange(trainer.job.train.global_batch)
        self._parts = list(split_into_micro_batches(places, batches.rank, batches.ranks, batches.micro_batch))
        self._rows = batches.micro_batch
        self._wanted = set(positions)
        self._on_activation = on_activation
        self._index = -1
        self._met: set[tuple[str, str]] = set()
        self._on = False
        self._handles: list[RemovableHandle] = []
        for name, module in trainer.model.named_modules():
            if not isinstance(module, Router | Experts | ExpertLinear):  # their rows are no samples
                self._watch(canonical_name(name), module)

    def begin(self, micro_batch: int) -> None:
        """A forward pass of the first step begins."""
        self._index = micro_batch
        self._met = set()
        self._on = self._index < len(self._parts)

    def end(self) -> None:
        """Its forward pass is over: what is computed again in the backward pass is not looked at."""
        self._on = False

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: nn.Module) -> None:
        # First of all hooks: a layout's own, which change what is read, are a part of the module.
        entry = module.register_forward_pre_hook(
            lambda _, inputs: self._look(name, "input", inputs), prepend=True
        )
        end = module.register_forward_hook(lambda _, inputs, output: self._look(name, "output", output))
        self._handles += [entry, end]

    def _look(self, name: str, what: str, value: Any) -> None:
        if not self._on or (name, what) in self._met:  # a module that runs twice is looked at once
            return
        self._met.add((name, what))
        tensor = _first_tensor(value)
        if tensor is not None and tensor.ndim:
            with self._counter.during(PROOF_PHASE):
                self._show(name, what, self._whole(name, what, tensor))

    def _whole(self, name: str, what: str, tensor: Tensor) -> Tensor:
        whole = full_tensor(tensor)
        if self._split is not None:
            whole = gather_full_activation(self._split, name, what, whole)
        return whole if self._context is None else gather_full_sequence(self._context, name, what, whole)

    def _show(self, name: str, what: str, tensor: Tensor) -> None:
        # Positions that every sample counts from zero are looked up once for all of them.
        shared = len(tensor) != self._rows
        for row, position in enumerate(self._parts[self._index]):
            if int(position) in self._wanted:
                self._on_activation(name, what, int(position), tensor if shared else tensor[row])


class ProofObserver(ABC):
    """What recorder and comparer have in common: when they look."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        self.trainer, self.task, self.folder = trainer, task, folder
        self.modules: ActivationHooks | None = ActivationHooks(trainer, task.positions, self.on_activation)
        self.routing: RoutingDecisions
        """Of experts."""

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self.routing.micro_batch = micro_batch
        if self.modules is not None:
            self.modules.begin(micro_batch)

    def after_forward(self, border_bytes: int = 0) -> None:
        """It is over."""
        if self.modules is not None:
            self.modules.end()

    def before_backward(self, micro_batch: int) -> None:
        """A backward pass begins, which may compute again."""
        self.routing.micro_batch = micro_batch

    def after_backward(self) -> None:
        """The gradients are complete, before anything is done with them."""
        step = self.trainer.step + 1
        if step in GRADIENT_STEPS:
            with self.trainer.counter.during(PROOF_PHASE):
                self.on_gradients(step)

    def after_step(self) -> None:
        """The weights are updated."""
        self.routing.end_step()
        if self.trainer.step == 1 and self.modules is not None:
            self.modules.remove()
            self.modules = None
            with self.trainer.counter.during(PROOF_PHASE):
                self.on_weights()

    @abstractmethod
    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """One sample's part of what went in or came out."""

    @abstractmethod
    def on_gradients(self, step: int) -> None:
        """After the backward pass of a step that is compared."""

    @abstractmethod
    def on_weights(self) -> None:
        """After the first update."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step."""


class ReferenceRecorder(ProofObserver):
    """Writes the reference down."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        super().__init__(trainer, task, folder)
        self.routing = RecordedRouting(trainer, folder)
        self.notes = ReferenceRecord(shared=_shared_names(trainer.model))
        self._activations: dict[str, Tensor] = {}
        self._before = {name: p.detach().clone() for name, p in named_parameters(trainer.model)}
        for name, parameter in named_parameters(trainer.model):
            parameter.register_post_accumulate_grad_hook(self._note_order(name))

    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """Keep it."""
        if what == "output" and module not in self.notes.modules:
            self.notes.modules.append(module)
        self._activations[f"{position}/{what}/{module}"] = tensor.detach().cpu().clone()

    def on_gradients(self, step: int) -> None:
        """Save those that are there."""
        found = {
            n: p.grad.detach().cpu() for n, p in named_parameters(self.trainer.model) if p.grad is not None
        }
        self.notes.gradient_norms[str(step)] = {name: _norm(gradient) for name, gradient in found.items()}
        save_file({n: g.contiguous() for n, g in found.items()}, self.folder / gradients_file(step))

    def on_weights(self) -> None:
        """Save them, and how far they have moved."""
        after = {name: p.detach().cpu().contiguous() for name, p in named_parameters(self.trainer.model)}
        self.notes.update_norms = {n: _norm(w - self._before[n].cpu()) for n, w in after.items()}
        self._before = {}
        save_file(after, self.folder / WEIGHTS_FILE)
        save_file(self._activations, self.folder / ACTIVATIONS_FILE)
        self._activations = {}

    def finish(self) -> None:
        """Name every parameter: those without a gradient come last."""
        named = self.notes.parameters
        named += [name for name, _ in named_parameters(self.trainer.model) if name not in named]
        self.notes.write(self.folder)

    def _note_order(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if name not in self.notes.parameters:
                self.notes.parameters.append(name)

        return note


class ReferenceComparer(ProofObserver):
    """Holds a rank of the layout against the reference."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        assert task.reference is not None, "there is a reference to compare with"
        self._reference = Path(task.reference)
        self._names = ReferenceRecord.read(self._reference).parameters
        self._activations = safe_open(self._reference / ACTIVATIONS_FILE, framework="pt")
        self._known = set(self._activations.keys())
        self.findings = RankFindings(trainer.mesh.rank)
        super().__init__(trainer, task, folder)
        self.routing: ReplayedRouting = ReplayedRouting(trainer, self._reference)

    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """Compare it, where the rank holds all of it."""
        key = f"{position}/{what}/{module}"
        if key not in self._known:
            return
        expected = self._activations.get_tensor(key)
        if expected.shape != tensor.shape:
            if what == "output" and module not in self.findings.not_compared:
                self.findings.not_compared.append(module)
            return
        off = compare_tensors(tensor, expected).difference
        relative = None if off is None else off / max(_norm(expected), torch.finfo(torch.float32).tiny)
        self.findings.activations.append(ActivationDifference(module, what, position, relative))

    def on_gradients(self, step: int) -> None:
        """Compare every gradient that this rank holds a part of."""
        held = {name: p.grad for name, p in named_parameters(self.trainer.model)}
        self.findings.gradients[str(step)] = dict(self._compare(gradients_file(step), held))
        self.findings.write(self.folder)  # the step may still end in a loss that is not finite

    def on_weights(self) -> None:
        """Compare every parameter that this rank holds a part of."""
        held: dict[str, Tensor | None] = dict(named_parameters(self.trainer.model))
        self.findings.weights = dict(self._compare(WEIGHTS_FILE, held))

    def finish(self) -> None:
        """Write down what was found."""
        self.findings.replayed_ties = self.routing.replayed
        self.findings.write(self.folder)

    def _compare(self, file: str, held: dict[str, Tensor | None]) -> Iterator[tuple[str, TensorDifference]]:
        """Hold tensors against those in a file, all ranks in the same order: a sharded one needs them all."""
        there = self._count([name in held for name in self._names])
        present = self._count([held.get(name) is not None for name in self._names])
        for name in held.keys() - set(self._names):  # a parameter that the reference does not have
            yield name, TensorDifference(None)
        with safe_open(self._reference / file, framework="pt") as expected:
            known = set(expected.keys())
            for name in self._names:
                if name not in held:
                    continue
                tensor = held[name]
                # A rank that lacks its shard could not take part: nobody asks the others for theirs.
                whole = present[name] == there[name] or not (
                    is_dtensor(tensor) or self.trainer.parallel.local_shards
                )
                if tensor is None or not whole:
                    if name in known:
                        yield name, TensorDifference(None, missing=True)
                    continue
                found = self.trainer.sharded_state.unshard(name, full_tensor(tensor))
                wanted = expected.get_tensor(name) if name in known else torch.zeros(found.shape)
                yield name, compare_tensors(found, wanted)

    def _count(self, flags: list[bool]) -> dict[str, float]:
        """On how many ranks something holds, for each parameter of the reference."""
        sums = self.trainer.mesh.all_reduce_scalars([float(flag) for flag in flags])
        return dict(zip(self._names, sums, strict=True))


def compare_tensors(found: Tensor, expected: Tensor) -> TensorDifference:
    """How far a tensor is from what was expected, and how far a factor would explain it."""
    if found.shape != expected.shape:
        return TensorDifference(None)
    one, other = found.detach().cpu().double(), expected.double()
    difference = _norm(one - other)
    if not math.isfinite(difference):
        return TensorDifference(None)
    size = float((other * other).sum())
    if not size or not difference:
        return TensorDifference(difference)
    factor = float((one * other).sum()) / size
    return TensorDifference(difference, factor, _norm(one - factor * other) / math.sqrt(size))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list):
        return next((part for part in value if isinstance(part, Tensor)), None)
    return None


def _shared_names(model: nn.Module) -> dict[str, list[str]]:
    """Other names of parameters that more than one module has."""
    first: dict[Tensor, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            others.setdefault(first[parameter], []).append(name)
        else:
            first[parameter] = name
    return others
