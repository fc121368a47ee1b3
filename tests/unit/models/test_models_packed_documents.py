"""Packed documents train exactly as separate ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.data.dataset import TokenDataset
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.parallel.build import build_model
from meshwright.spec.load import load_job


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_packed_documents_equal_the_same_documents_alone(positions, tmp_path):
    """Loss and gradients of packed rows, against one document per row."""
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path, ByteTokenizer(), has_loss_mask=True) as writer:
        for size in (5, 3, 20, 1, 9, 12, 2):
            marks = (np.arange(size) >= size // 2).astype(np.uint8)
            writer.add("train", rng.integers(0, 256, size), marks)
        writer.finish()
    packed = TokenDataset.open(tmp_path, "train", 16, "document", prompt_masking=True).read([0, 1, 2, 3])
    assert packed.segments.max() >= 2, "several documents share a row"
    learned = ["model.positions=learned", "model.max_positions=16"] if positions == "learned" else []
    job = load_job("tiny", ["data.seq_len=16", *learned])
    losses, gradients = [], []
    for alone in (False, True):
        net = build_model(job, torch.device("cpu"))
        rows = [(packed.tokens, packed.targets, packed.segments)]
        if alone:
            pieces = [
                (row, packed.segments[row] == number)
                for row in range(len(packed.tokens))
                for number in range(packed.segments[row].max() + 1)
            ]
            rows = [(packed.tokens[r][None, at], packed.targets[r][None, at]) for r, at in pieces]
        loss = sum(net(*map(torch.from_numpy, arrays)) for arrays in rows)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5, msg=name)
