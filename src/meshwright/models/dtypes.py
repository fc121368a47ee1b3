"""The torch dtypes of mixed precision: ``train.precision`` and ``train.residual_dtype``."""

from __future__ import annotations

import torch

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Dtype of GEMMs under autocast; with fp8, of the GEMMs that stay in 16 bits."""


RESIDUAL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of the residual stream."""
