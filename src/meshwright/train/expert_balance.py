"""Expert load: counted in every step and reported; balanced by biases with ``train.balance_rate`` > 0.

Each rank counts the tokens that it routes. At the end of a step one all-reduce sums the counts of all layers
over all ranks. The ``step`` event reports them. They also update the biases of expert selection (Wang et al.
2024, "Auxiliary-loss-free load balancing"): a step raises the bias of an expert that got fewer tokens than
the mean by ``train.balance_rate``, and lowers the bias of an expert that got more by as much.

Shape suffixes: L layers with experts, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.routing import AuxiliaryLosses, Router
from meshwright.parallel.full_tensors import canonical_name
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import balance_coefficient
from meshwright.train.amp import MixedPrecision

LOAD_REPORT_INTERVAL = 10
"""Steps between two ``experts`` events; the first and the last step have one, too."""
_ROUTER = re.compile(r"blocks\.(\d+)\.ffn\.router")


def is_load_report_due(step: int, steps: int) -> bool:
    """Whether an ``experts`` event follows a step."""
    return step in (1, steps) or step % LOAD_REPORT_INTERVAL == 0


@dataclass(frozen=True)
class ExpertLoad:
    """Load of all experts in one step, summed over all ranks."""

    first_layer: int
    """The first layer with experts."""
    counts: list[list[float]]
    """Tokens routed to each expert, by layer."""
    dropped: list[float]
    """Assignments dropped for lack of capacity, by layer."""
    balance_loss: float
    """Auxiliary balance loss: mean over layers, without its coefficient; 0 if off."""
    z_loss: float
    """Router z-loss, likewise."""

    def step_fields(self) -> dict[str, float]:
        """The fields of the ``step`` event."""
        chosen = sum(map(sum, self.counts))
        return {
            "expert_imbalance": max(map(_imbalance, self.counts)),
            "expert_dropped": sum(self.dropped) / chosen if chosen else 0.0,
            "balance_loss": self.balance_loss,
            "z_loss": self.z_loss,
        }

    def layer_rows(self) -> list[dict[str, Any]]:
        """The rows of the ``experts`` event, one per layer."""
        return [
            {
                "layer": self.first_layer + index,
                "load": [round(count) for count in counts],
                "dropped": round(self.dropped[index]),
                "imbalance": _imbalance(counts),
            }
            for index, counts in enumerate(self.counts)
        ]


def _imbalance(counts: list[float]) -> float:
    """Tokens of the busiest expert over the mean; 1 if even, or without tokens."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def list_routers(network: nn.Module) -> Iterator[tuple[int, Router]]:
    """The routers of a network, or of the stages of a rank, with their layer index."""
    for name, module in network.named_modules():
        if isinstance(module, Router):
            match = _ROUTER.fullmatch(canonical_name(name))
            assert match is not None, f"a router outside of a block: {name}"
            yield int(match[1]), module


def set_biases(network: nn.Module, bias_LE: Tensor, first_layer: int) -> None:
    """Set the selection biases of each router; row 0 is the first layer with experts."""
    for layer, router in list_routers(network):
        router.selection_bias = bias_LE[layer - first_layer]


class ExpertBalancer:
    """Token counts of a step and selection biases of all layers; a rank counts what it routes itself."""

    def __init__(self, model: DecoderModel, rate: float, device: torch.device) -> None:
        """Start with zero counts and zero biases.

        Args:
            model: A model with experts.
            rate: Update rate of the biases; 0 for no biases.
            device: Device of the counts.
        """
        assert model.num_experts is not None, "there are experts to balance"
        self._first, self._experts, self._rate = model.dense_layers, model.num_experts, rate
        layers = model.expert_layers
        self.sums = torch.zeros((layers, model.load_size // layers), dtype=torch.float64, device=device)
        self.bias_LE = torch.zeros((layers, model.num_experts), device=device) if rate else None

    def attach(self, network: nn.Module, auxiliary: AuxiliaryLosses) -> None:
        """Give each router of a network its row of the counts and its biases."""
        for layer, router in list_routers(network):
            router.load, router.auxiliary = self.sums[layer - self._first], auxiliary
        if self.bias_LE is not None:
            self.use_biases(network, self.bias_LE)

    def use_biases(self, network: nn.Module, bias_LE: Tensor) -> None:
        """Select experts with these biases; with rate 0 they stay fixed."""
        self.bias_LE = bias_LE.to(self.sums.device)
        set_biases(network, self.bias_LE, self._first)

    @torch.no_grad()
    def end_step(self, mesh: Mesh, update_biases: bool = True) -> ExpertLoad:
        """All-reduce the counts over all ranks, update the biases, reset the counts.

        A bad step does not update the biases. With a pipeline most counts of a rank are zero: it has few of
        the layers.
        """
        if mesh.control is not None:
            dist.all_reduce(self.sums, group=mesh.control)
        counts_LE = self.sums[:, : self._experts]
        if self.bias_LE is not None and update_biases:
            missing_LE = counts_LE.mean(1, keepdim=True) - counts_LE
            self.bias_LE += self._rate * missing_LE.sign()
        rows = self.sums.tolist()
        self.sums.zero_()
        balance, z = (sum(row[self._experts + column] for row in rows) / len(rows) for column in (1, 2))
        counts, dropped = [row[: self._experts] for row in rows], [row[self._experts] for row in rows]
        return ExpertLoad(self._first, counts, dropped, balance, z)


def build_expert_balancer(
    network: nn.Module, job: Job, device: torch.device, amp: MixedPrecision
) -> ExpertBalancer | None:
    """The balancer of a network with experts; None for other models."""
    model, train = job.model, job.train
    if not isinstance(model, DecoderModel) or not model.num_experts:
        return None
    balancer = ExpertBalancer(model, train.balance_rate, device)
    losses = AuxiliaryLosses(balance_coefficient(train), train.z_loss, amp.loss_scale_tensor)
    balancer.attach(network, losses)
    return balancer
