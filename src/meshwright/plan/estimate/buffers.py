"""Buffers that live through the whole step: of collectives and pipelines, scratch tensors, tables."""

from __future__ import annotations

import numpy as np

from meshwright.layout.parameters import INT64_BYTES
from meshwright.plan.estimate.grid import Floats
from meshwright.plan.estimate.memory_snapshots import EstimateInputs
from meshwright.plan.estimate.stages import Stage
from meshwright.plan.estimate.state import FLOAT32
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.weights import LocalWeightCounts
from meshwright.plan.memory.ledger import GPU_WORKSPACE_BYTES


def sum_buffers(inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts) -> Sum:
    """The buffers of a class of ranks."""
    workload, grid, tokens, element_bytes = (
        inputs.workload,
        inputs.grid,
        inputs.tokens,
        inputs.activation_element_bytes,
    )
    model, rules = workload.model, workload.profile.memory
    terms = []
    if workload.cluster.device == "cuda":
        terms.append(Term("cuBLAS workspace", (float(GPU_WORKSPACE_BYTES),)))
    if rules.scratch_gradients:
        terms.append(
            Term("scratch of each weight's shape", (element_bytes, _scratch_elements(inputs, stage)))
        )
    if rules.bucket_bytes:
        buckets = np.minimum(rules.bucket_bytes, 2 * element_bytes * local.dense)
        terms.append(Term("ZeRO buckets", (grid.world_size > 1, buckets)))
    edges = 2.0 + rules.boundary_tensors_per_micro_batch * (stage.in_flight + 1)
    terms.append(
        Term(
            "stage boundaries", (grid.pp > 1, edges, tokens.residual, float(model.hidden_size), element_bytes)
        )
    )
    ring = (grid.cp > 1) & (grid.context == 0)
    if ring.any():
        terms.append(Term("ring keys and values", (ring, tokens.split, 4.0 * model.kv_size, element_bytes)))
    if rules.blocks == "eager":
        terms += _list_tables(inputs)
    if workload.copy_bytes:
        kept = (grid.zero < 2) & (grid.pp == 1)
        terms.append(Term("bf16 weight copies", (kept, workload.copy_bytes), grid.tp))
    return Sum.of(*terms)


def _list_tables(inputs: EstimateInputs) -> list[Term]:
    """Meshwright's RoPE tables, batch and mask."""
    workload, model = inputs.workload, inputs.workload.model
    terms, masked = [], workload.document_mask
    if model.positions == "rope":
        terms.append(Term("RoPE tables", (2.0, float(workload.seq_len), float(model.head_size), FLOAT32)))
    tensors = (3.0 if masked else 2.0) + (1.0 if masked and model.positions == "learned" else 0.0)
    terms.append(Term("batch", (tensors, inputs.tokens.count, float(INT64_BYTES))))
    if masked:
        terms.append(
            Term(
                "document mask",
                (inputs.grid.micro_batch, float(workload.seq_len) ** 2, inputs.activation_element_bytes),
            )
        )
    return terms


def _scratch_elements(inputs: EstimateInputs, stage: Stage) -> Floats:
    """Distinct weight shapes of a stage, once each: attention, feed-forward, shared and one routed expert."""
    model, weights, tp = inputs.workload.model, inputs.weights, inputs.grid.tp
    elements = weights.attention / tp + weights.latents
    elements = elements + np.where(stage.dense_layers > 0, weights.ffn / tp, 0.0)
    if model.num_experts:  # one shared expert has the shapes of a routed one
        shared = 0.0 if model.shared_experts == 1 else weights.shared / tp
        elements = elements + np.where(
            stage.expert_layers > 0, shared + weights.expert / inputs.grid.etp, 0.0
        )
    return elements
