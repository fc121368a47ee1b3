"""A probe of small shapes that takes a short time. Its figures mean nothing for this machine."""

from __future__ import annotations

import dataclasses

from meshwright.plan.probe_runs import PROBE_SUITES, AttentionShape, GemmShape

TINY = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 64, "vocab_size": 64}
QUICK_PROBE = dataclasses.replace(
    PROBE_SUITES["cpu"],
    gemms=(GemmShape(32, 64, 32),),
    attention=(AttentionShape(1, 4, 2, 8, 32),),
    large_gemm_size=128,
    copy_elements=2**16,
    optimizer_elements=2**14,
    seconds=1e-4,
    steps=5,
    models=tuple(
        {"model": TINY | {"num_layers": layers}, "seq_len": 16, "batch": batch}
        for layers, batch in ((1, 2), (2, 2), (2, 4))
    ),
    collective_sizes=(),
)
