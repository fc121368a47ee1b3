"""Names the first module and rank whose output or gradient is not finite: recomputes a step with checks.

The weights are still those before the step: an update with a gradient norm that is not finite is skipped
(``amp``). Hooks check the input and output of every module, their gradients and those of the parameters. A
finding has an order that is comparable across ranks, so that the first one is the cause:

========  ==========================================================
forward   micro-batch, layer, number of the check in the forward pass
backward  micro-batch, layer from last to first, number of the check
update    gradients after the reduction, which no backward hook saw
========  ==========================================================

Activation checkpointing runs a forward pass again in the backward pass; its values are not checked twice.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.checkpoint.divergence import DivergedError
from meshwright.models.decoder import Decoder
from meshwright.models.triton_block import TritonBlock
from meshwright.parallel.full_tensors import canonical_name, is_dtensor
from meshwright.parallel.json_gather import all_gather_json
from meshwright.spec.execution import uses_torch_compile
from meshwright.train.batches import Samples, split_into_micro_batches
from meshwright.train.trainer import Trainer

CHECK_PHASE = "check"
"""Phase of the collectives of a recomputed step."""
FORWARD, BACKWARD, UPDATE = range(3)
BEFORE_BLOCKS, LAST_LAYER = -2, 2**31
"""The order of the embedding; of the final norm, the head and the loss."""
MOST_SAMPLES = 8
"""Samples that an error names."""


@dataclass(frozen=True)
class Finding:
    """The first value of a rank that is not finite."""

    order: tuple[int, ...]
    module: str
    """Its name in the one-process model; ``data`` for the batch."""
    what: str
    """``input``, ``output``, ``output gradient``, ``input gradient`` or ``weight gradient``."""
    value: str
    """``NaN`` or ``Inf``."""
    micro_batch: int
    weights: tuple[str, ...] = ()
    """Parameters of the module that are not finite themselves."""
    near: str = ""
    """The submodule before or after which it happened, or the parameter."""
    samples: tuple[int, ...] = ()
    """The first samples of the micro-batch."""

    @property
    def rank_order(self) -> tuple[int, ...]:
        """``order``, extended: among ranks that share an output, the one with the bad weight is first."""
        return (*self.order, not self.weights)


RankFinding = tuple[Finding | None, int, str]
"""The finding of a rank, the index of its data-parallel replica, and its hostname."""
_RANK_FINDING: TypeAdapter[RankFinding] = TypeAdapter(RankFinding)


class FiniteChecks:
    """Hooks of all modules of a rank; observes the step that is recomputed."""

    def __init__(self, model: nn.Module) -> None:
        self.first: Finding | None = None
        self._phase: int | None = None
        self._micro_batch = self._number = 0
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._modules = dict[str, nn.Module]()
        root = model
        for name, module in model.named_modules():
            if not name:
                root = module  # of a pipeline: the stage of the modules that follow
            self._modules[canonical_name(name)] = module
            self._register(canonical_name(name), module, root)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self._begin(FORWARD, micro_batch)

    def after_forward(self, border_bytes: int = 0) -> None:
        """A forward pass ended; forward passes outside of a step are not checked."""
        self._phase = None

    def before_backward(self, micro_batch: int) -> None:
        """A backward pass begins."""
        self._begin(BACKWARD, micro_batch)

    def after_backward(self) -> None:
        """Nothing to do: the gradients are checked one by one."""

    def check_gradients(self, model: nn.Module) -> None:
        """Check the reduced gradients, if no backward pass had a value that is not finite."""
        self._phase, self._number = UPDATE, 0
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local() if is_dtensor(parameter.grad) else parameter.grad
                owner = canonical_name(name).rpartition(".")[0]
                self._check((local,), 0, owner, "weight gradient", canonical_name(name))

    def _begin(self, phase: int, micro_batch: int) -> None:
        self._phase, self._micro_batch, self._number = phase, micro_batch, 0

    def _register(self, name: str, module: nn.Module, root: nn.Module) -> None:
        enter, leave = _find_layers(name, root)
        parent, _, leaf = name.rpartition(".")

        def check_input(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._hook_parameters(module, enter)
            if self._phase == FORWARD:
                owner, near = (parent, f"before {leaf}") if name else _input_module(root)
                self._check(_tensors(inputs[0]) if inputs else (), enter, owner, "input", near)

        def split_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            """Give the module an alias of its input, whose gradient is that of this module alone."""
            if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].requires_grad:
                return inputs
            alias = inputs[0].view_as(inputs[0])
            self._hook(alias, enter, name, "input gradient")
            return (alias, *inputs[1:])

        def check_output(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._phase != FORWARD:
                return
            owner = _output_module(name, module)
            self._check(_tensors(output), leave, owner, "output")
            behind, near = (parent, f"after {leaf}") if name not in ("", "norm") else (owner, "")
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self._hook(tensor, leave, "head" if name == "norm" else behind, "output gradient", near)

        self._handles += [
            module.register_forward_pre_hook(check_input, prepend=True),
            module.register_forward_pre_hook(split_gradient),
            module.register_forward_hook(check_output),
        ]

    def _hook_parameters(self, module: nn.Module, layer: int) -> None:
        """Check the gradients of a module's own parameters; FSDP2 has gathered them when it is called."""
        for name, parameter in module.named_parameters(recurse=isinstance(module, TritonBlock)):
            if parameter.requires_grad and not is_dtensor(parameter) and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                owner = next((key for key, value in self._modules.items() if value is module), "")
                self._hook(parameter, layer, owner, "weight gradient", name)

    def _hook(self, tensor: Tensor, layer: int, module: str, what: str, near: str = "") -> None:
        def check(gradient: Tensor | None) -> None:
            if (
                self._phase == BACKWARD and gradient is not None
            ):  # None: a split backward pass computes it later
                self._check((gradient,), -layer, module, what, near)

        self._handles.append(tensor.register_hook(check))

    @torch.no_grad()
    def _check(
        self,
        tensors: Iterator[Tensor] | tuple[Tensor, ...],
        layer: int,
        module: str,
        what: str,
        near: str = "",
    ) -> None:
        """Keep the first finding: forward passes before backward passes, then micro-batch and layer."""
        assert self._phase is not None, "a check outside of a step"
        self._number += 1
        order = (self._phase, self._micro_batch, layer, self._number)
        if self.first is not None and self.first.order < order:
            return
        for tensor in tensors:
            if not is_finite(tensor):
                value = "NaN" if bool(tensor.isnan().any()) else "Inf"
                weights = self._bad_weights(module) if self._phase == FORWARD else ()
                self.first = Finding(order, module, what, value, self._micro_batch, weights, near)
                return

    def _bad_weights(self, module: str) -> tuple[str, ...]:
        found = self._modules.get(module)
        named = () if found is None else found.named_parameters(module)
        return tuple(canonical_name(name) for name, parameter in named if not is_finite(parameter))


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; of a sharded tensor, those of this rank."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local.detach()).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output."""
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    parts = value if isinstance(value, tuple | list) else (value,)
    return (part for part in parts if isinstance(part, Tensor) and part.is_floating_point())


def _find_layers(name: str, root: nn.Module) -> tuple[int, int]:
    """The order of a module's input and output in the model: twice the layer, the stage's own in between."""
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 1:
        return 2 * int(parts[1]), 2 * int(parts[1])
    if name:
        where = LAST_LAYER if parts[0] in ("norm", "head") else BEFORE_BLOCKS
        return where, where
    if not isinstance(root, Decoder):
        return BEFORE_BLOCKS, LAST_LAYER
    layers = [int(layer) for layer in root.blocks]
    enter = BEFORE_BLOCKS if root.first else 2 * min(layers, default=0) - 1
    return enter, LAST_LAYER if root.last else 2 * max(layers, default=0) + 1


def _input_module(stage: nn.Module) -> tuple[str, str]:
    """The module that produces the input of the whole model, or of a pipeline stage."""
    if isinstance(stage, Decoder) and not stage.first:
        return f"blocks.{next(iter(stage.blocks), '')}", "as received from the previous stage"
    return "data", ""


def _output_module(name: str, module: nn.Module) -> str:
    """The module that computes an output; the decoder's own output is the loss, by its head."""
    return "head" if not name and isinstance(module, Decoder) and module.last else name


def name_cause(trainer: Trainer, error: DivergedError, action: str) -> DivergedError:
    """Recompute the last step with checks. Returns the error with the module, the rank and a fitting advice.

    All ranks call it together: all of them found the step bad. Writes the event
    ``not_finite``.

    Args:
        trainer: After the step, with the weights before it.
        error: Error of the step.
        action: What happens next, for the event.
    """
    try:
        finding = _recompute(trainer)
        own: RankFinding = (finding, trainer.data.train.rank, socket.gethostname())
        with trainer.counter.during(CHECK_PHASE):
            gathered = all_gather_json(_RANK_FINDING.dump_python(own), trainer.mesh)
        findings = [_RANK_FINDING.validate_python(one) for one in gathered]
    except Exception as failure:  # such as out of memory: the error itself must reach the user
        return error.with_cause(f"recomputing the step with checks failed: {failure}")
    found = [(one.rank_order, rank, one) for rank, (one, _, _) in enumerate(findings) if one is not None]
    order, _, first = min(found, key=lambda item: item[:2], default=((), -1, None))
    ranks = [rank for other, rank, _ in found if other == order]
    names = [field.name for field in dataclasses.fields(Finding) if field.name != "order"]
    facts = {name: first and getattr(first, name) for name in names}
    if trainer.mesh.rank == 0:
        trainer.events.write("not_finite", step=trainer.step, ranks=ranks, action=action, **facts)
    wait_for_event(trainer)
    if first is None:
        return error.with_cause("not found when the step is recomputed", _advise_unrepeated(trainer))
    device = ""
    if _is_one_replica(trainer, findings):
        device = f"the device of rank {', '.join(map(str, ranks))} ({findings[ranks[0]][2]})"
    return error.with_cause(_describe(first, ranks), _advise(trainer, first, device))


def _is_one_replica(trainer: Trainer, findings: list[RankFinding]) -> bool:
    """Whether one of several data-parallel replicas is not finite, before gradients are reduced over them.

    All replicas have the same weights; only their samples and devices differ. With ``ep`` their experts
    differ too.
    """
    replicas = {data_rank for one, data_rank, _ in findings if one is not None and one.order[0] != UPDATE}
    return len(replicas) == 1 and trainer.data.train.ranks > 1 and trainer.job.layout.ep == 1


def wait_for_event(trainer: Trainer) -> None:
    """Wait until rank 0 has written an event: an error of another rank would end its generation before."""
    with trainer.counter.during(CHECK_PHASE):
        trainer.mesh.all_reduce_scalars([0.0])


def _recompute(trainer: Trainer) -> Finding | None:
    """The first value of this rank that is not finite, in the step before the current position."""
    batches, checks = trainer.data.train, FiniteChecks(trainer.model)
    samples = recompute_step(trainer, checks)
    checks.check_gradients(trainer.model)
    if checks.first is None:
        return None
    parts = list(split_into_micro_batches(samples, batches.rank, batches.ranks, batches.micro_batch))
    own = parts[checks.first.micro_batch][:MOST_SAMPLES] if checks.first.order[0] != UPDATE else ()
    return dataclasses.replace(checks.first, samples=tuple(int(sample) for sample in own))


def recompute_step(trainer: Trainer, checks: FiniteChecks) -> Samples:
    """Compute the gradients of the step before the current position again, with checks; returns its samples.

    Its collectives have the phase ``check`` and are not audited.
    """
    batch = trainer.data.prefetcher.get(trainer.state.position - trainer.job.train.global_batch)
    trainer.rank_parameters.zero_grads()
    eager: AbstractContextManager[Any] = nullcontext()
    if uses_torch_compile(trainer.job):  # compiled code has no hooks
        eager = torch.compiler.set_stance("force_eager")
    try:
        with eager, trainer.counter.during(CHECK_PHASE):
            trainer.forward_backward(batch.micro_batches, max(batch.targets, 1), checks)
    finally:
        checks.remove()
    return batch.samples


def _describe(first: Finding, ranks: list[int]) -> str:
    """The finding as a clause."""
    where = "rank " + ", ".join(map(str, ranks))
    if first.samples:
        where += f", micro-batch {first.micro_batch}, samples {', '.join(map(str, first.samples))}"
    of = {"data": "the batch", "": "the model"}.get(first.module, first.module)
    near = f" ({first.near})" if first.near else ""
    place = f"{first.what} of {of}{near} is {first.value} on {where}"
    if first.weights:
        place += f"; its weight {first.weights[0]} is not finite"
        place += f", and {len(first.weights) - 1} more" if len(first.weights) > 1 else ""
    return f"first, the {place}"


def _advise(trainer: Trainer, first: Finding, device: str) -> str:
    """The advice, by the cause.

    Args:
        trainer: After the step.
        first: The first value that is not finite.
        device: The device to suspect, if only one data-parallel replica has such values; else empty.
    """
    train, untrained = trainer.job.train, trainer.step == trainer.state.first_step + 1
    slower = "Lower train.lr or lengthen train.warmup"
    if first.module == "data":
        return "Correct the data: the batch itself is not finite"
    if first.weights and device:
        return f"Check {device}: the same weight is finite on the other data-parallel replicas"
    if first.weights and not untrained:
        return f"{slower}: an earlier update made the weight not finite"
    if first.weights:
        return "Check the initial weights: no step has changed them yet"
    if train.precision == "fp16":
        return "Use train.precision=bf16: values above 65504 overflow in fp16"
    if device:
        finite = "the other data-parallel replicas are finite with the same weights"
        return f"Check these samples and {device}: {finite}. If other ranks fail too, lower train.lr"
    if untrained:
        return "Check the module and the samples: no update was made yet, so train.lr is not the cause"
    return f"{slower}; if it fails at the same samples with a lower one, check them"


def _advise_unrepeated(trainer: Trainer) -> str:
    """The advice if the recomputed step is finite."""
    if uses_torch_compile(trainer.job):
        return "Use train.block_backend=eager: the step was recomputed with eager blocks, and is finite"
    return (
        "Check the device: the same step was finite the second time. train.deterministic=true excludes races"
    )
