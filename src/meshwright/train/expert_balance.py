"""How evenly experts are used: counted in every step, told to people, and, if the job wants it, corrected.

Every rank counts the tokens that it routes itself. At the end of a step the counts of all layers and ranks
are added up in one call, so that every rank knows the same: what the event says, and how the biases move by
which experts are chosen (Wang et al. 2024, "Auxiliary-loss-free load balancing"): a step lifts the bias of
an expert that got fewer tokens than the mean by ``train.balance_rate``, and lowers the others' by as much.

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
"""Steps between two events with the load of every expert; the first and the last step have one, too."""
_ROUTER = re.compile(r"blocks\.(\d+)\.ffn\.router")


def is_load_report_due(step: int, steps: int) -> bool:
    """Whether the load of every expert is told after a step."""
    return step in (1, steps) or step % LOAD_REPORT_INTERVAL == 0


@dataclass(frozen=True)
class ExpertLoad:
    """What the experts of all layers had to do in one step, over all ranks."""

    first_layer: int
    """The first layer with experts."""
    counts: list[list[float]]
    """Tokens that chose each expert, of each layer."""
    dropped: list[float]
    """Choices without a place, of each layer."""
    balance_loss: float
    """Mean over layers, without its coefficient; 0 where it is off."""
    z_loss: float
    """The same."""

    def step_fields(self) -> dict[str, float]:
        """One number each, for the step's event."""
        chosen = sum(map(sum, self.counts))
        return {
            "expert_imbalance": max(map(_imbalance, self.counts)),
            "expert_dropped": sum(self.dropped) / chosen if chosen else 0.0,
            "balance_loss": self.balance_loss,
            "z_loss": self.z_loss,
        }

    def layer_rows(self) -> list[dict[str, Any]]:
        """Of each layer: how many tokens each expert got and how many found no place."""
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
    """The busiest expert's tokens over the mean; 1 is even, and so are none at all."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def list_routers(network: nn.Module) -> Iterator[tuple[int, Router]]:
    """The routers of a network, or of a rank's stages of it, with their layers."""
    for name, module in network.named_modules():
        if isinstance(module, Router):
            match = _ROUTER.fullmatch(canonical_name(name))
            assert match is not None, f"a router that is no block's: {name}"
            yield int(match[1]), module


def set_biases(network: nn.Module, bias_LE: Tensor, first_layer: int) -> None:
    """Give each router of a network its biases: rows from the first layer with experts on."""
    for layer, router in list_routers(network):
        router.selection_bias = bias_LE[layer - first_layer]


class ExpertBalancer:
    """The sums of a step and the biases of all layers; a rank counts the layers and tokens that it has."""

    def __init__(self, model: DecoderModel, rate: float, device: torch.device) -> None:
        """Nothing is counted yet, and nobody is favoured.

        Args:
            model: Which has experts.
            rate: Of the biases; 0 for none.
            device: Where routers count.
        """
        assert model.num_experts is not None, "there are experts to balance"
        self._first, self._experts, self._rate = model.dense_layers, model.num_experts, rate
        layers = model.expert_layers
        self.sums = torch.zeros((layers, model.load_size // layers), dtype=torch.float64, device=device)
        self.bias_LE = torch.zeros((layers, model.num_experts), device=device) if rate else None

    def attach(self, network: nn.Module, auxiliary: AuxiliaryLosses) -> None:
        """Give each router of a network its row."""
        for layer, router in list_routers(network):
            router.load, router.auxiliary = self.sums[layer - self._first], auxiliary
        if self.bias_LE is not None:
            self.use_biases(network, self.bias_LE)

    def use_biases(self, network: nn.Module, bias_LE: Tensor) -> None:
        """Choose by these biases from now on; without a rate they stay as they are."""
        self.bias_LE = bias_LE.to(self.sums.device)
        set_biases(network, self.bias_LE, self._first)

    @torch.no_grad()
    def end_step(self, mesh: Mesh) -> ExpertLoad:
        """Add up what all ranks have counted, move the biases, and begin again.

        Every rank sends its sums, most of them zero in a pipeline, and gets those of all.
        """
        if mesh.control is not None:
            dist.all_reduce(self.sums, group=mesh.control)
        counts_LE = self.sums[:, : self._experts]
        if self.bias_LE is not None:
            missing_LE = counts_LE.mean(1, keepdim=True) - counts_LE
            self.bias_LE += self._rate * missing_LE.sign()
        rows = self.sums.tolist()
        self.sums.zero_()
        balance, z = (sum(row[self._experts + place] for row in rows) / len(rows) for place in (1, 2))
        counts, dropped = [row[: self._experts] for row in rows], [row[self._experts] for row in rows]
        return ExpertLoad(self._first, counts, dropped, balance, z)


def build_expert_balancer(
    network: nn.Module, job: Job, device: torch.device, amp: MixedPrecision
) -> ExpertBalancer | None:
    """The balancer of a network's routers; None for a model without."""
    model, train = job.model, job.train
    if not isinstance(model, DecoderModel) or not model.num_experts:
        return None
    balancer = ExpertBalancer(model, train.balance_rate, device)
    losses = AuxiliaryLosses(balance_coefficient(train), train.z_loss, amp.loss_scale_tensor)
    balancer.attach(network, losses)
    return balancer
