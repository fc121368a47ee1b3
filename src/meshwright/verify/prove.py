"""One rank of ``meshwright prove``: real training steps, recorded or compared.

The reference runs in one process. It saves the inputs and outputs of all modules in its first step, its
gradients, and its initial weights. Every rank of the layout compares its own with them, one full
tensor at a time. So no rank holds a second model, and a diverging replica is reported with its rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.core.events import Listener
from meshwright.layout.optimizer_state import decays, rule_of
from meshwright.parallel.full_tensors import full_tensor, is_dtensor, named_parameters
from meshwright.spec.train_defaults import setting
from meshwright.train.evaluate import evaluate
from meshwright.train.gradient_noise import draw_noise
from meshwright.train.loop import report_end, start_meter
from meshwright.train.optimizers.adamw import CLIPPING_EPS
from meshwright.train.step_result import StepResult
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_with_trainer
from meshwright.verify.activation_hooks import ActivationHooks
from meshwright.verify.checkpoint_reload import can_save, compare_checkpoints, save_and_reload
from meshwright.verify.local_state import LocalState, list_local_state
from meshwright.verify.proof_task import (
    ACTIVATIONS_FILE,
    EXACT,
    PROOF_PHASE,
    RELOAD_STEP,
    UPDATE_STEPS,
    WEIGHTS_FILE,
    ActivationDifference,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    StateDifference,
    TensorDifference,
    UpdateDifference,
    gradients_file,
)
from meshwright.verify.routing_decisions import RecordedRouting, ReplayedRouting, RoutingDecisions
from meshwright.verify.tensor_difference import compare_tensors, tensor_norm
from meshwright.verify.token_probe import find_wrong_tokens, probe_last_steps
from meshwright.verify.update_formulas import UpdateRule, compare_update


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
    evaluations, stopping = 0, False
    while trainer.step < task.steps and not stopping:
        result = trainer.train_step(meter, observer)
        if result.bad is not None:
            raise result.bad.as_error(trainer.job.train.spike_factor, saved=False)
        stopping = result.stop_requested
        observer.after_step(result)
        if trainer.step == RELOAD_STEP and not stopping:
            with observer.routing.evaluation():
                evaluations = len(evaluate(trainer))
            if can_save(trainer):
                observer.on_reload(save_and_reload(trainer))
    if not stopping:
        observer.finish()
    report_end(trainer, evaluations, stopping=stopping)


class ProofObserver(ABC):
    """Base of recorder and comparer: both observe the same points of a step."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        self.trainer, self.task, self.folder = trainer, task, folder
        self.tokens_read = probe_last_steps(trainer, task.steps)
        self.hooks: ActivationHooks | None = None
        if task.positions:
            self.hooks = ActivationHooks(trainer, task.positions, self.on_activation)
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
        with self.trainer.counter.during(PROOF_PHASE):
            if step in self.task.tolerances.gradient_steps:
                self.on_gradients(step)
            if step in UPDATE_STEPS:
                self.before_update()

    def after_step(self, result: StepResult) -> None:
        """The weights are updated."""
        self.routing.end_step()
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
        with self.trainer.counter.during(PROOF_PHASE):
            self.on_step(result)

    @abstractmethod
    def on_activation(self, module: str, what: str, position: int, tensor: Tensor) -> None:
        """The input or output of a module in the first step, for one sample."""

    @abstractmethod
    def on_gradients(self, step: int) -> None:
        """After the backward pass of a step whose gradients are compared."""

    @abstractmethod
    def before_update(self) -> None:
        """Before an optimizer step that is compared."""

    @abstractmethod
    def on_step(self, result: StepResult) -> None:
        """After an optimizer step."""

    @abstractmethod
    def on_reload(self, found: list[StateDifference]) -> None:
        """After a checkpoint was saved and reloaded."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step."""


class ReferenceRecorder(ProofObserver):
    """Saves the reference."""

    def __init__(self, trainer: Trainer, task: ProofTask, folder: Path) -> None:
        super().__init__(trainer, task, folder)
        self.routing: RecordedRouting = RecordedRouting(trainer, folder)
        self.record = ReferenceRecord(shared=_shared_names(trainer.model))
        self._activations: dict[str, Tensor] = {}
        weights, train = dict(named_parameters(trainer.model)), trainer.job.train
        self.record.weight_norms = {name: tensor_norm(p.detach()) for name, p in weights.items()}
        self.record.rules = {name: rule_of(name, p.ndim, train) for name, p in weights.items()}
        self.record.decayed = [name for name, p in weights.items() if decays(name, p.ndim, train)]
        save_file({n: p.detach().cpu().contiguous() for n, p in weights.items()}, folder / WEIGHTS_FILE)
        for name, parameter in weights.items():
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
        self.record.gradient_norms[str(step)] = {
            name: tensor_norm(gradient) for name, gradient in found.items()
        }
        save_file({n: g.contiguous() for n, g in found.items()}, self.folder / gradients_file(step))

    def before_update(self) -> None:
        """Nothing to do: the layout compares with the formula."""

    def on_step(self, result: StepResult) -> None:
        """Record the learning rate; save the activations of the first step."""
        self.record.lrs.append(result.lr)
        if self._activations:
            save_file(self._activations, self.folder / ACTIVATIONS_FILE)
            self._activations = {}

    def on_reload(self, found: list[StateDifference]) -> None:
        """One process must restore its own checkpoint."""
        assert not found, f"a checkpoint of one process was not restored: {found}"

    def finish(self) -> None:
        """Write the record; parameters without a gradient come last."""
        names = self.record.parameters
        names += [name for name, _ in named_parameters(self.trainer.model) if name not in names]
        self.record.tokens_read, self.record.idle_experts = self.tokens_read, self.routing.list_idle()
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
        self._record = ReferenceRecord.read(self._reference)
        self._names = self._record.parameters
        if task.positions:
            self._activations = safe_open(self._reference / ACTIVATIONS_FILE, framework="pt")
            self._recorded = set(self._activations.keys())
        self.findings = RankFindings(trainer.mesh.rank)
        super().__init__(trainer, task, folder)
        self.routing: ReplayedRouting = ReplayedRouting(trainer, self._reference, task.tolerances.tie)
        self._before: dict[str, LocalState] = {}
        """Copies, before an update that is compared."""
        self._loss_scale = 1.0
        self._updates = 0
        with trainer.counter.during(PROOF_PHASE):
            held: dict[str, Tensor | None] = dict(named_parameters(trainer.model))
            self.findings.weights = dict(self._compare(WEIGHTS_FILE, held))

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
        norm = max(tensor_norm(expected), torch.finfo(torch.float32).tiny)
        relative = None if difference is None else difference / norm
        self.findings.activations.append(ActivationDifference(module, what, position, relative))

    def on_gradients(self, step: int) -> None:
        """Compare every gradient that this rank holds a shard of."""
        held = {name: p.grad for name, p in named_parameters(self.trainer.model)}
        self.findings.gradients[str(step)] = dict(self._compare(gradients_file(step), held))
        self.findings.write(self.folder)  # the step may still end in a loss that is not finite

    def before_update(self) -> None:
        """Copy what the update changes."""
        self._before = {name: state.copy() for name, state in list_local_state(self.trainer).items()}
        self._loss_scale = self.trainer.amp.loss_scale()

    def on_step(self, result: StepResult) -> None:
        """Compare the update of every parameter with its formula."""
        self._updates += not self.trainer.amp.skipped
        if self.trainer.step == 1 and self.task.tolerances is EXACT:
            self.findings.wrong_tokens = find_wrong_tokens(self.trainer)
        if self._before and not self.trainer.amp.skipped:
            step = self.trainer.step
            self.findings.updates[str(step)] = dict(self._compare_updates(step, result))
            self.findings.write(self.folder)
        self._before = {}

    def on_reload(self, found: list[StateDifference]) -> None:
        """Report it; rank 0 also compares the files with those of the reference."""
        self.findings.checkpoint = found
        if self.trainer.mesh.rank == 0 and self.task.tolerances is EXACT:
            step = self.trainer.step
            saved = Path(self.trainer.assignment.checkpoint_dir) / checkpoint_name(step)
            self.findings.checkpoint += compare_checkpoints(saved, self._reference, step)
        self.findings.write(self.folder)

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
                found = self.trainer.rank_parameters.unshard(name, full_tensor(tensor))
                wanted = expected.get_tensor(name) if name in recorded else torch.zeros(found.shape)
                yield name, compare_tensors(found, wanted)

    def _compare_updates(self, step: int, result: StepResult) -> Iterator[tuple[str, UpdateDifference]]:
        """Compare updates, on all ranks in the same order: gathers are collectives."""
        trainer, record = self.trainer, self._record
        train, state = trainer.job.train, trainer.rank_parameters
        after = list_local_state(trainer)
        clipping = 1.0
        if train.clip:
            clipping = min(1.0, train.clip / (result.grad_norm + CLIPPING_EPS))
        factor = clipping / self._loss_scale
        has_gradient = [n in after and self._before[n].gradient is not None for n in self._names]
        present, holders = self._count(has_gradient), self._count([name in after for name in self._names])
        for name in self._names:
            before = self._before.get(name)
            if before is None or before.gradient is None or present[name] != holders[name]:
                continue
            gradient = state.unshard(name, full_tensor(before.gradient)).cpu()
            if train.grad_noise:
                gradient += draw_noise(name, gradient.shape, train, step - 1) / factor
            decay = setting(train, "weight_decay") if name in record.decayed else 0.0
            rule = UpdateRule(train, record.rules[name], record.lrs[step - 1], decay, factor, self._updates)
            yield (
                name,
                compare_update(before.full(state, name), gradient, after[name].full(state, name), rule),
            )

    def _count(self, flags: list[bool]) -> dict[str, float]:
        """The number of ranks on which a flag is set, for each parameter of the reference."""
        sums = self.trainer.mesh.all_reduce_scalars([float(flag) for flag in flags])
        return dict(zip(self._names, sums, strict=True))


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
