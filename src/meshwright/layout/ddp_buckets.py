"""DDP's gradient buckets, fixed before the first step.

Left alone, torch's DDP guesses one bucket, then rebuilds after the first step in the order in which
gradients arrived. A resumed run repeats that first step, so its sums are cut differently and it differs in
the last bits. We fix the boundaries here, from the model alone: parameters in reverse registration order
(close to the order in which the backward pass finishes them), filled greedily; a bucket closes with the
parameter that reaches the cap.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.units import MIB
from meshwright.layout.parameters import FLOAT32_BYTES, Parameter


def bucket_parameters(parameters: Sequence[Parameter], bucket_mb: float) -> list[list[str]]:
    """Names in each bucket, in the order in which the buckets are reduced."""
    cap_bytes = int(bucket_mb * MIB)
    buckets: list[list[str]] = []
    filling: list[str] = []
    filled_bytes = 0
    for parameter in reversed(parameters):
        filling.append(parameter.name)
        filled_bytes += parameter.count * FLOAT32_BYTES
        if filled_bytes >= cap_bytes:
            buckets.append(filling)
            filling, filled_bytes = [], 0
    return [*buckets, filling] if filling else buckets
