"""What ``meshwright probe`` measured on one device: the table ``probed`` of a cluster file.

Times are those of single operations as a run calls them; ``plan.time.probed`` builds a step of them. Without
the table a step is predicted from the cluster's rates alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from meshwright.spec.fields import SECTION_CONFIG, Count, Natural, NonNegative, Positive

Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class GemmTime:
    """A linear layer's three matrix products: a weight (columns x depth) applied to rows."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    precision: Precision
    """Of what the products read; in fp8 with the casts of weight and gradient, as a step does them."""
    rows: Count
    """Tokens."""
    columns: Count
    """Width of the output."""
    depth: Count
    """Width of the input."""
    forward_s: Positive
    """Time of the product."""
    input_s: Positive
    """Time of the product that makes the gradient of the input."""
    weight_s: Positive
    """Time of the one that makes the gradient of the weight, in float32."""


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention of some sequences."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    precision: Literal["fp32", "bf16"]
    """Of queries, keys and values."""
    batch: Count
    """Sequences."""
    heads: Count
    """Query heads."""
    kv_heads: Count
    """Key heads."""
    head_size: Count
    """Width of a head."""
    seq_len: Count
    """Tokens of a sequence."""
    forward_s: Positive
    """Time of the forward pass."""
    backward_s: Positive
    """Time of the backward pass."""


@dataclass(frozen=True)
class Probed:
    """What single operations and a few real steps took on one device."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    device: Literal["cpu", "cuda"]
    """Kind of device; another one's steps are predicted from the cluster's rates."""
    gemms: tuple[GemmTime, ...]
    """Matrix products of several shapes."""
    attention: tuple[AttentionTime, ...]
    """Attention of several lengths and head sizes."""
    copy_bytes_per_s: Positive
    """Bandwidth of a large copy, read and written bytes together."""
    optimizer_bytes_per_s: Positive
    """Bandwidth of an AdamW step as a run takes it, read and written bytes together."""
    launch_s: Positive
    """Time of an operation on almost nothing."""
    elementwise: Positive = 1.0
    """Time of what is neither product nor attention, over its bytes at a copy's rate; of real steps."""
    triton_elementwise: Positive = 1.08
    """The same of our own kernels, timed alone; left out, what it is on an H200 (November 2026)."""
    block_s: NonNegative = 0.0
    """Time that the host takes for both passes of a block; beside a GPU's own time it is hidden."""
    step_s: NonNegative = 0.0
    """Time of a step that is in no block and no byte."""
    compiled: bool = False
    """Whether the real steps were compiled; other steps are predicted from the cluster's rates."""
    multiprocessors: Natural = 0
    """Of a GPU; 0 where products are not dealt to some."""
