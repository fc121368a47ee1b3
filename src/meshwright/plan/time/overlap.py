"""Communication inside a pass: what is exposed, and what compute hides.

``plan.time.engine`` fills these in; a timeline (``plan.time.stage_parts``) draws them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Flags, Floats
from meshwright.plan.time.block import Passes


@dataclass(frozen=True)
class Overlap:
    """Seconds of one axis' communication for a micro-batch in a block."""

    forward: Floats
    """Exposed in the forward pass."""
    backward: Floats
    """Exposed in the backward pass."""
    hidden_forward: Floats
    """Overlapped in the forward pass."""
    hidden_backward: Floats

    def repeated(self, full: Flags) -> Overlap:
        """With the forward pass again in the backward pass, where activation checkpointing is full."""
        return Overlap(
            self.forward,
            self.backward + np.where(full, self.forward, 0.0),
            self.hidden_forward,
            self.hidden_backward + np.where(full, self.hidden_forward, 0.0),
        )


@dataclass(frozen=True)
class PassParts:
    """What the passes of a block consist of besides compute, for one micro-batch."""

    exposed: Mapping[str, Passes]
    """By axis."""
    hidden: Mapping[str, Passes]
    recompute: Floats
    """Activation checkpointing, in the first half of the backward pass."""

    @classmethod
    def of(cls, axes: Mapping[str, Overlap], recompute: Floats) -> PassParts:
        """The parts of a block; weight gradients have no communication."""
        none = np.zeros_like(recompute)
        return cls(
            {name: Passes(axis.forward, axis.backward, none) for name, axis in axes.items()},
            {name: Passes(axis.hidden_forward, axis.hidden_backward, none) for name, axis in axes.items()},
            recompute,
        )

    def times(self, factor: Floats) -> PassParts:
        """Every time, multiplied."""
        return PassParts(
            {name: passes.times(factor) for name, passes in self.exposed.items()},
            {name: passes.times(factor) for name, passes in self.hidden.items()},
            self.recompute * factor,
        )


def overlap_with(
    communication_s: Floats,
    compute_s: Floats,
    window: Floats | float,
    least: Floats | float,
    contention: float,
) -> tuple[Floats, Floats]:
    """Exposed and hidden part of communication beside compute; the exposed one includes contention.

    Args:
        communication_s: Time of the communication.
        compute_s: Time of the compute.
        window: Share of the compute during which the communication can run.
        least: Share of the communication that is exposed however long the compute is.
        contention: Slow-down of compute during communication.
    """
    exposed = np.maximum(communication_s - window * compute_s, least * communication_s)
    return exposed + contention * np.minimum(communication_s, compute_s), communication_s - exposed
