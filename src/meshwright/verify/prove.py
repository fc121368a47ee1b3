"""One rank of ``meshwright prove``: real training steps, recorded or compared.

The reference runs in one process. It saves the inputs and outputs of all modules in its first step, its
gradients, and its weights after the first step. Every rank of the layout compares its own with them, one full
tensor at a time. So no rank holds a second model, and a diverging replica is reported with its rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.core.events import Listener
from meshwright.parallel.full_tensors import full_tensor, is_dtensor, named_parameters
from meshwright.train.loop import report_end, start_meter
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_with_trainer
from meshwright.verify.activation_hooks import ActivationHooks
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


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Prove as this rank; returns the exit status."""
    return run_with_trainer(prove, run_dir, listener)


def prove(trainer: Trainer) -> None:
    """Run the steps of the proof under an observer."""
    folder = Path(trainer.assignment.run_dir)
    task = ProofTask.read(folder)
    observe = ReferenceRecorder if task.reference is None else ReferenceComparer
    observer = observe(trainer, task, folder)
    meter = start_meter(trainer)
    stopping = False
    while trainer.step < task.steps and not stopping:
        stopping = trainer.train_step(meter, observer).stop_requested
        observer.after_step()
    if not stopping:
        observer.finish()
    report_end(trainer, evaluations=0, stopping=stopping)


class ProofObserver(ABC):
    """Base of recorder and comparer: both observe the same points of a step."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        self.trainer, self.task, self.folder = trainer, task, folder
        self.hooks: ActivationHooks | None = ActivationHooks(trainer, task.positions, self.on_activation)
        self.routing: RoutingDecisions

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self.routing.micro_batch = micro_batch
        if self.hooks is not None:
            self.hooks.begin(micro_batch)

    def after_forward(self, border_bytes: int = 0) -> None:
        """The forward pass has ended."""
        if self.hooks is not None:
            self.hooks.end()

    def before_backward(self, micro_batch: int) -> None:
        """A backward pass begins; it may recompute a forward pass."""
        self.routing.micro_batch = micro_batch

    def after_backward(self) -> None:
        """The gradients are complete, and not clipped yet."""
        step = self.trainer.step + 1
        if step in GRADIENT_STEPS:
            with self.trainer.counter.during(PROOF_PHASE):
                self.on_gradients(step)

    def after_step(self) -> None:
        """The weights are updated."""
        self.routing.end_step()
        if self.trainer.step == 1 and self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
            with self.trainer.counter.during(PROOF_PHASE):
                self.on_weights()

    @abstractmethod
    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """The input or output of a module in the first step, for one sample."""

    @abstractmethod
    def on_gradients(self, step: int) -> None:
        """After the backward pass of a step whose gradients are compared."""

    @abstractmethod
    def on_weights(self) -> None:
        """After the first optimizer step."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step."""


class ReferenceRecorder(ProofObserver):
    """Saves the reference."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        super().__init__(trainer, task, folder)
        self.routing = RecordedRouting(trainer, folder)
        self.record = ReferenceRecord(shared=_shared_names(trainer.model))
        self._activations: dict[str, Tensor] = {}
        self._initial = {name: p.detach().clone() for name, p in named_parameters(trainer.model)}
        for name, parameter in named_parameters(trainer.model):
            parameter.register_post_accumulate_grad_hook(self._record_order(name))

    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """Keep it."""
        if what == "output" and module not in self.record.modules:
            self.record.modules.append(module)
        self._activations[f"{position}/{what}/{module}"] = tensor.detach().cpu().clone()

    def on_gradients(self, step: int) -> None:
        """Save the gradients."""
        found = {
            n: p.grad.detach().cpu() for n, p in named_parameters(self.trainer.model) if p.grad is not None
        }
        self.record.gradient_norms[str(step)] = {name: _norm(gradient) for name, gradient in found.items()}
        save_file({n: g.contiguous() for n, g in found.items()}, self.folder / gradients_file(step))

    def on_weights(self) -> None:
        """Save the weights, their updates' norms, and the activations."""
        weights = {name: p.detach().cpu().contiguous() for name, p in named_parameters(self.trainer.model)}
        self.record.update_norms = {n: _norm(w - self._initial[n].cpu()) for n, w in weights.items()}
        self._initial = {}
        save_file(weights, self.folder / WEIGHTS_FILE)
        save_file(self._activations, self.folder / ACTIVATIONS_FILE)
        self._activations = {}

    def finish(self) -> None:
        """Write the record; parameters without a gradient come last."""
        names = self.record.parameters
        names += [name for name, _ in named_parameters(self.trainer.model) if name not in names]
        self.record.write(self.folder)

    def _record_order(self, name: str) -> Callable[[Tensor], None]:
        def on_grad(_: Tensor) -> None:
            if name not in self.record.parameters:
                self.record.parameters.append(name)

        return on_grad


class ReferenceComparer(ProofObserver):
    """Compares a rank of the layout with the reference."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        assert task.reference is not None, "there is a reference to compare with"
        self._reference = Path(task.reference)
        self._names = ReferenceRecord.read(self._reference).parameters
        self._activations = safe_open(self._reference / ACTIVATIONS_FILE, framework="pt")
        self._recorded = set(self._activations.keys())
        self.findings = RankFindings(trainer.mesh.rank)
        super().__init__(trainer, task, folder)
        self.routing: ReplayedRouting = ReplayedRouting(trainer, self._reference)

    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """Compare it, if the rank holds all of it."""
        key = f"{position}/{what}/{module}"
        if key not in self._recorded:
            return
        expected = self._activations.get_tensor(key)
        if expected.shape != tensor.shape:
            if what == "output" and module not in self.findings.not_compared:
                self.findings.not_compared.append(module)
            return
        difference = compare_tensors(tensor, expected).difference
        norm = max(_norm(expected), torch.finfo(torch.float32).tiny)
        relative = None if difference is None else difference / norm
        self.findings.activations.append(ActivationDifference(module, what, position, relative))

    def on_gradients(self, step: int) -> None:
        """Compare every gradient that this rank holds a shard of."""
        held = {name: p.grad for name, p in named_parameters(self.trainer.model)}
        self.findings.gradients[str(step)] = dict(self._compare(gradients_file(step), held))
        self.findings.write(self.folder)  # the step may still end in a loss that is not finite

    def on_weights(self) -> None:
        """Compare every parameter that this rank holds a shard of."""
        held: dict[str, Tensor | None] = dict(named_parameters(self.trainer.model))
        self.findings.weights = dict(self._compare(WEIGHTS_FILE, held))

    def finish(self) -> None:
        """Write the findings."""
        self.findings.replayed_ties = self.routing.replayed
        self.findings.write(self.folder)

    def _compare(self, file: str, held: dict[str, Tensor | None]) -> Iterator[tuple[str, TensorDifference]]:
        """Compare tensors with those of a file, on all ranks in the same order: gathers are collectives."""
        holders = self._count([name in held for name in self._names])
        present = self._count([held.get(name) is not None for name in self._names])
        for name in held.keys() - set(self._names):  # a parameter that the reference does not have
            yield name, TensorDifference(None)
        with safe_open(self._reference / file, framework="pt") as expected:
            recorded = set(expected.keys())
            for name in self._names:
                if name not in held:
                    continue
                tensor = held[name]
                # A rank without its shard could not join the gather, so no rank starts it.
                sharded = is_dtensor(tensor) or self.trainer.parallel.local_shards
                if tensor is None or (sharded and present[name] != holders[name]):
                    if name in recorded:
                        yield name, TensorDifference(None, missing=True)
                    continue
                found = self.trainer.sharded_state.unshard(name, full_tensor(tensor))
                wanted = expected.get_tensor(name) if name in recorded else torch.zeros(found.shape)
                yield name, compare_tensors(found, wanted)

    def _count(self, flags: list[bool]) -> dict[str, float]:
        """The number of ranks on which a flag is set, for each parameter of the reference."""
        sums = self.trainer.mesh.all_reduce_scalars([float(flag) for flag in flags])
        return dict(zip(self._names, sums, strict=True))


def compare_tensors(found: Tensor, expected: Tensor) -> TensorDifference:
    """The norm of the difference, and how well one factor explains it."""
    if found.shape != expected.shape:
        return TensorDifference(None)
    one, other = found.detach().cpu().double(), expected.double()
    difference = _norm(one - other)
    if not math.isfinite(difference):
        return TensorDifference(None)
    square = float((other * other).sum())
    if not square or not difference:
        return TensorDifference(difference)
    factor = float((one * other).sum()) / square
    return TensorDifference(difference, factor, _norm(one - factor * other) / math.sqrt(square))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _shared_names(model: nn.Module) -> dict[str, list[str]]:
    """The other names of parameters that several modules share."""
    first: dict[Tensor, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            others.setdefault(first[parameter], []).append(name)
        else:
            first[parameter] = name
    return others
