"""The model: what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from meshwright.spec.fields import SECTION_CONFIG, Count, Flag, Positive


@dataclass(frozen=True)
class Model:
    """A Llama-shaped decoder: grouped-query attention, RoPE, RMSNorm, SwiGLU."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    num_layers: Count
    """Decoder blocks."""
    hidden_size: Count
    """Width of the residual stream."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads; divides num_heads."""
    ffn_size: Count
    """Inner width of the SwiGLU feed-forward."""
    vocab_size: Count
    """Rows of the embedding; at least the tokenizer's."""
    preset: str | None = None
    """The preset that the other fields came from, if any."""
    architecture: Literal["llama"] = "llama"
    """Shape of a block."""
    head_dim: Count | None = None
    """Width of one head; hidden_size / num_heads if left out."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: Flag = False
    """The head uses the embedding's weight."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights (norms start at one)."""
    hf: str | None = None
    """Folder with a Hugging Face config.json (not built yet)."""

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_size
