"""The model: a transformer decoder, or a ResNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from meshwright.spec.fields import SECTION_CONFIG, Count, Flag, Location, Natural, Positive


@dataclass(frozen=True)
class DecoderModel:
    """A transformer decoder: Llama by default (RoPE, RMSNorm, SwiGLU, no biases), or a GPT by its options."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    num_layers: Count
    """Number of transformer blocks."""
    hidden_size: Count
    """Hidden size: width of the residual stream."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads (grouped-query attention); divides num_heads."""
    ffn_size: Count
    """Intermediate size of the feed-forward."""
    vocab_size: Count
    """Vocabulary size of the embedding; at least that of the tokenizer."""
    preset: str | None = None
    """Name of a model preset; it sets the other fields."""
    architecture: Literal["llama"] = "llama"
    """`llama`: a decoder with the options below; `resnet`: a ResNet, with its own keys."""
    head_dim: Count | None = None
    """Size of a head; hidden_size / num_heads if left out."""
    positions: Literal["rope", "learned"] = "rope"
    """RoPE, or a learned position embedding with max_positions rows."""
    max_positions: Count | None = None
    """Maximum sequence length; required by `learned`, informative for `rope`."""
    rope_theta: Positive = 10000.0
    """RoPE base frequency."""
    rope_factor: Positive | None = None
    """RoPE scaling factor (Llama 3.1); no scaling if left out."""
    rope_low_freq_factor: Positive = 1.0
    """RoPE scaling: frequencies with fewer periods in rope_original_positions are fully scaled."""
    rope_high_freq_factor: Positive = 4.0
    """RoPE scaling: frequencies with more periods are not scaled."""
    rope_original_positions: Count = 8192
    """RoPE scaling: maximum sequence length before scaling."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with bias."""
    norm_eps: Positive = 1e-5
    """Epsilon of the norms."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """Feed-forward: SwiGLU, or an MLP with GELU (exact, or GPT-2's tanh approximation)."""
    attention_bias: Flag = False
    """Biases of the q, k, v and output projections."""
    ffn_bias: Flag = False
    """Biases of the feed-forward."""
    tied_embeddings: Flag = False
    """Tie the output head to the token embedding."""
    attention: Literal["heads", "latent"] = "heads"
    """Multi-head or grouped-query attention (`heads`), or multi-head latent attention (`latent`)."""
    latent_size: Count | None = None
    """MLA: rank of the key-value projection; required by `latent`."""
    query_latent_size: Count | None = None
    """MLA: rank of the query projection; full rank if left out."""
    rope_head_dim: Count | None = None
    """MLA: size of the RoPE part of each head; required by `latent`."""
    value_head_dim: Count | None = None
    """MLA: size of a value head; head_dim if left out."""
    window: Count | None = None
    """Sliding window of attention, in tokens; none if left out."""
    window_every: Count = 1
    """Which layers have the sliding window: 1 for all, 2 for every second."""
    num_experts: Count | None = None
    """Routed experts per layer (mixture of experts); a dense feed-forward if left out."""
    experts_per_token: Count | None = None
    """Experts per token (top-k)."""
    expert_ffn_size: Count | None = None
    """Intermediate size of an expert; ffn_size if left out."""
    shared_experts: Natural = 0
    """Shared experts of size expert_ffn_size, which process every token."""
    dense_layers: Natural = 0
    """First layers that have a dense feed-forward instead of experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Router scores: softmax over the experts, or a sigmoid per expert. Weights of the top-k add up to 1."""
    capacity_factor: Positive | None = None
    """Capacity of an expert per sequence, relative to an even load; tokens beyond it are dropped. No limit if
    left out."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; norms start at 1, biases at 0."""
    hf: Location | None = None
    """Folder with a Hugging Face config.json, instead of the fields; its weights, if any, are loaded."""

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Size of all query heads."""
        return self.num_heads * self.head_size

    @property
    def value_size(self) -> int:
        """Size of all value heads after attention."""
        return self.num_heads * (self.value_head_dim or self.head_size)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - min(self.dense_layers, self.num_layers) if self.num_experts else 0

    @property
    def expert_width(self) -> int:
        """Intermediate size of an expert."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def local_experts(self) -> int:
        """Routed experts per layer on a rank; fewer in a sharded model."""
        return self.num_experts or 0

    @property
    def local_expert_width(self) -> int:
        """Intermediate size of a routed expert on a rank."""
        return self.expert_width

    @property
    def shared_width(self) -> int:
        """Intermediate size of all shared experts, which run as one feed-forward."""
        return self.shared_experts * self.expert_width

    @property
    def load_size(self) -> int:
        """Expert statistics that a step all-reduces.

        Per layer with experts: the tokens of each expert, the dropped tokens, and two losses.
        """
        return self.expert_layers * ((self.num_experts or 0) + 3)

    @property
    def windowed_layers(self) -> int:
        """Layers with a sliding window."""
        return self.num_layers // self.window_every if self.window else 0

    @property
    def kv_size(self) -> int:
        """Size of all key (or value) heads."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class ResNetModel:
    """A ResNet (He et al. 2015), with GroupNorm by default so that samples are independent."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    architecture: Literal["resnet"]
    """`resnet`."""
    blocks: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)]
    """Residual blocks per stage; each stage after the first halves the image and doubles the channels."""
    num_classes: Count
    """Classes of the classifier; at least the number of labels."""
    image_size: Count
    """Height and width of an image, in pixels."""
    preset: str | None = None
    """Name of a model preset; it sets the other fields."""
    channels: Count = 3
    """Input channels."""
    width: Count = 64
    """Channels of the first stage."""
    bottleneck: Flag = False
    """Bottleneck blocks (1x1, 3x3, 1x1, as in ResNet-50) instead of basic ones (two 3x3, as in ResNet-18)."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """First layers: 7x7 convolution with stride 2 and max-pool, or one 3x3 convolution for small images."""
    norm: Literal["group", "batch"] = "group"
    """GroupNorm or BatchNorm; with `batch` the loss depends on the layout."""
    norm_groups: Count | None = None
    """Groups of GroupNorm, 32 if left out; divides width."""
    norm_eps: Positive = 1e-5
    """Epsilon of the norms."""
    init_std: Positive = 0.01
    """Standard deviation of the classifier's initial weights; convolutions use He initialization."""

    @property
    def groups(self) -> int:
        """Groups of GroupNorm."""
        return self.norm_groups or DEFAULT_NORM_GROUPS

    @property
    def first_side(self) -> int:
        """Height and width of the first stage's input."""
        return -(-self.image_size // (4 if self.stem == "imagenet" else 1))

    @property
    def last_side(self) -> int:
        """Height and width of the last stage's output; each halving rounds up."""
        halvings = len(self.blocks) - 1 + (2 if self.stem == "imagenet" else 0)
        return -(-self.image_size >> halvings)

    @property
    def least_micro_batch(self) -> int:
        """Smallest micro-batch: batch norm over a single value has no variance."""
        return 2 if self.norm == "batch" and self.last_side == 1 else 1


BATCH_NORM_NOTE = (
    "model.norm=batch normalises over the samples of a micro-batch: the loss depends on layout and "
    "micro-batch, and the equal-loss contract does not hold"
)
"""The note on batch norm in plans, runs and audits."""
BOTTLENECK_GROWTH = 4
"""Output channels of a bottleneck block, relative to its inner convolutions."""
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
"""Keys that have an effect only where another key has this value.

Where a job sets another value, such keys of its preset are dropped. The legality table refuses its own.
"""


def _kind(value: Any) -> str:
    if isinstance(value, ResNetModel):
        return "resnet"
    return "resnet" if isinstance(value, dict) and value.get("architecture") == "resnet" else "decoder"


Model = DecoderModel | ResNetModel
TaggedModel = Annotated[
    Annotated[DecoderModel, Tag("decoder")] | Annotated[ResNetModel, Tag("resnet")], Discriminator(_kind)
]
"""The model as pydantic reads it; `architecture` selects the class."""
MODEL_TAGS = ("decoder", "resnet")
