"""The model: what is trained. A decoder of language, or a ResNet for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from meshwright.spec.fields import SECTION_CONFIG, Count, Flag, Location, Natural, Positive


@dataclass(frozen=True)
class DecoderModel:
    """A decoder: Llama-shaped as it stands (RoPE, RMSNorm, SwiGLU, no biases), GPT-shaped by its options."""

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
    """Inner width of the feed-forward."""
    vocab_size: Count
    """Rows of the embedding; at least the tokenizer's."""
    preset: str | None = None
    """The preset that the other fields came from, if any."""
    architecture: Literal["llama"] = "llama"
    """`llama`: a decoder, with the parts that the keys below choose; `resnet`: see there."""
    head_dim: Count | None = None
    """Width of one head; hidden_size / num_heads if left out."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a learned table of max_positions rows."""
    max_positions: Count | None = None
    """Longest sequence that the model knows; `learned` needs it, for `rope` it is only written down."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding."""
    rope_factor: Positive | None = None
    """Stretch of the slow rotations (Llama 3.1's rule); none if left out."""
    rope_low_freq_factor: Positive = 1.0
    """Rotations that turn less than this often in rope_original_positions are stretched wholly."""
    rope_high_freq_factor: Positive = 4.0
    """Rotations that turn more often than this are left alone."""
    rope_original_positions: Count = 8192
    """Sequence length before the stretch."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with bias."""
    norm_eps: Positive = 1e-5
    """Added to the mean square (or variance) in a norm."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """Feed-forward: gated by SiLU, or two matrices around GELU (exact, or GPT-2's tanh form)."""
    attention_bias: Flag = False
    """Biases on the four projections of attention."""
    ffn_bias: Flag = False
    """Biases on the matrices of the feed-forward."""
    tied_embeddings: Flag = False
    """The head uses the embedding's weight."""
    attention: Literal["heads", "latent"] = "heads"
    """Keys and values for each head, or one latent vector that all heads are made from (DeepSeek's)."""
    latent_size: Count | None = None
    """Width of the latent vector of keys and values (`latent` needs it)."""
    query_latent_size: Count | None = None
    """Width of the latent vector of queries; none if left out."""
    rope_head_dim: Count | None = None
    """Width that each head adds for its rotated part (`latent` needs it)."""
    value_head_dim: Count | None = None
    """Width of a value head where it differs; head_dim if left out."""
    window: Count | None = None
    """Positions that a token of a windowed layer looks back at; all of them if left out."""
    window_every: Count = 1
    """Every which layer is windowed: 1 all of them, 2 every second."""
    num_experts: Count | None = None
    """Routed experts of a layer; a dense feed-forward if left out."""
    experts_per_token: Count | None = None
    """Experts that a token is sent to."""
    expert_ffn_size: Count | None = None
    """Inner width of one expert; ffn_size if left out."""
    shared_experts: Natural = 0
    """Experts, each expert_ffn_size wide, that every token visits."""
    dense_layers: Natural = 0
    """First layers that have a dense feed-forward and no experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How experts are scored: against each other, or each on its own. Weights of the chosen add up to 1."""
    capacity_factor: Positive | None = None
    """Places of an expert in a sequence over its even share; later tokens are dropped. None if left out."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights (norms start at one, biases at zero)."""
    hf: Location | None = None
    """Folder with a Hugging Face config.json, in place of the fields; its weights, if any, are the first."""

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def value_size(self) -> int:
        """Width of all heads' results together."""
        return self.num_heads * (self.value_head_dim or self.head_size)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - min(self.dense_layers, self.num_layers) if self.num_experts else 0

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def local_experts(self) -> int:
        """Routed experts of a layer that are held here; a rank's part of the model may hold fewer."""
        return self.num_experts or 0

    @property
    def local_expert_width(self) -> int:
        """Inner width of a routed expert as it is held here."""
        return self.expert_width

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together, which are one feed-forward."""
        return self.shared_experts * self.expert_width

    @property
    def load_size(self) -> int:
        """Numbers about experts that a step adds up over all ranks.

        For each layer with experts the tokens of each of them, the dropped ones, and two losses.
        """
        return self.expert_layers * ((self.num_experts or 0) + 3)

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention looks back only so far."""
        return self.num_layers // self.window_every if self.window else 0

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class ResNetModel:
    """A residual network for images (He et al. 2015), with GroupNorm so that no sample sees another."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    architecture: Literal["resnet"]
    """`resnet`."""
    blocks: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)]
    """Residual blocks of each stage; each stage after the first halves the image and doubles the width."""
    num_classes: Count
    """Rows of the classifier; at least the labels' number."""
    image_size: Count
    """Height and width of an image, in pixels."""
    preset: str | None = None
    """The preset that the other fields came from, if any."""
    channels: Count = 3
    """Colours of a pixel."""
    width: Count = 64
    """Channels of the first stage."""
    bottleneck: Flag = False
    """Blocks of 1x1, 3x3, 1x1 convolutions with four times the width (ResNet-50), not two 3x3 (ResNet-18)."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """First layers: 7x7 stride 2 and a max-pool, or one 3x3 for small images."""
    norm: Literal["group", "batch"] = "group"
    """`batch` mixes the samples of a micro-batch: the loss then depends on the layout."""
    norm_groups: Count | None = None
    """Groups of a GroupNorm, 32 if left out; divides width. A batch norm has none."""
    norm_eps: Positive = 1e-5
    """Added to the variance in a norm."""
    init_std: Positive = 0.01
    """Standard deviation of the classifier's initial weights; convolutions start as He et al. say."""

    @property
    def groups(self) -> int:
        """Groups of a GroupNorm."""
        return self.norm_groups or DEFAULT_NORM_GROUPS

    @property
    def first_side(self) -> int:
        """Height and width that the first stage sees."""
        return -(-self.image_size // (4 if self.stem == "imagenet" else 1))

    @property
    def last_side(self) -> int:
        """Height and width that the last stage is left with: every halving rounds up."""
        halvings = len(self.blocks) - 1 + (2 if self.stem == "imagenet" else 0)
        return -(-self.image_size >> halvings)

    @property
    def least_micro_batch(self) -> int:
        """Samples that a micro-batch needs: a batch norm over a single value has no variance."""
        return 2 if self.norm == "batch" and self.last_side == 1 else 1


BATCH_NORM_NOTE = (
    "model.norm=batch mixes the samples of a micro-batch: the loss depends on layout and micro-batch, "
    "and the promise of equal losses does not hold"
)
"""What is said wherever a batch norm is planned, run or audited."""
BOTTLENECK_GROWTH = 4
"""How many times wider than its inner convolutions a bottleneck block ends."""
DEFAULT_NORM_GROUPS = 32

READ_WITH = {
    "latent_size": ("attention", "latent"),
    "norm_groups": ("norm", "group"),
    "query_latent_size": ("attention", "latent"),
    "rope_factor": ("positions", "rope"),
    "rope_head_dim": ("attention", "latent"),
    "rope_theta": ("positions", "rope"),
    "value_head_dim": ("attention", "latent"),
}
"""Keys that are read only where another one has this value.

Where a job chooses another value, those of its preset step back; its own are refused by the legality table.
"""


def _kind(value: Any) -> str:
    if isinstance(value, ResNetModel):
        return "resnet"
    return "resnet" if isinstance(value, dict) and value.get("architecture") == "resnet" else "decoder"


Model = DecoderModel | ResNetModel
TaggedModel = Annotated[
    Annotated[DecoderModel, Tag("decoder")] | Annotated[ResNetModel, Tag("resnet")], Discriminator(_kind)
]
"""How a model is read: `architecture` says which."""
MODEL_TAGS = ("decoder", "resnet")
