"""Model FLOPs per token or image, and the reference rates of MFU."""

from __future__ import annotations

from meshwright.layout.parameters import count_active_matmul_parameters
from meshwright.layout.resnet_shapes import image_flops
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model, ResNetModel


def flops_per_token(model: Model, seq_len: int) -> float:
    """Forward and backward FLOPs per token, or per image.

    Per token: 6 per parameter of a linear (head and active experts included, input embedding not), plus
    attention over the positions that a token sees on average (half of the sequence; less with a sliding
    window): 2 FLOPs for the scores and 2 for the weighted sum, times 3 for forward and backward.
    Per image: see ``image_flops``.
    """
    if isinstance(model, ResNetModel):
        return float(image_flops(model))
    window, windowed = min(model.window or seq_len, seq_len), model.windowed_layers
    seen = (model.num_layers - windowed) * seq_len / 2 + windowed * (window - window**2 / (2 * seq_len))
    queries = model.query_size + (
        model.num_heads * (model.rope_head_dim or 0) if model.attention == "latent" else 0
    )
    return 6.0 * count_active_matmul_parameters(model) + 6.0 * seen * (queries + model.value_size)


def matmul_rate(cluster: Cluster, precision: str) -> float:
    """The rate of a large GEMM in a precision."""
    return cluster.fp32_flops_per_s if precision == "fp32" else cluster.bf16_flops_per_s


def peak_rate(cluster: Cluster, precision: str) -> tuple[float, str]:
    """The reference rate of MFU before a run, and its name."""
    if cluster.matmul_flops_per_s is not None:
        return cluster.matmul_flops_per_s, "cluster.matmul_flops_per_s"
    peaks = {"fp8": cluster.peak_fp8_flops_per_s, "fp4": cluster.peak_fp4_flops_per_s}
    low_precision = peaks.get(precision)
    if low_precision is not None:
        return low_precision, f"the data sheet's dense {precision} peak"
    if precision != "fp32" and cluster.peak_bf16_flops_per_s is not None:
        return cluster.peak_bf16_flops_per_s, "the data sheet's dense 16-bit peak"
    whose = "the cluster's" if cluster.probed is None else "the probed"
    return matmul_rate(cluster, precision), f"{whose} large-GEMM rate"
