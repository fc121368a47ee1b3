"""Every Hugging Face family trains from its weights in each kind of layout, with a clean audit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwright.checkpoint.hf.names import list_hf_shapes
from meshwright.data.hf_tokenizer import hf_tokenizer_text
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.spec.hf_config import read_config
from meshwright.spec.model import DecoderModel
from model_shapes import HF_FAMILIES

LAYOUTS = {
    "one process": "layout.dp_replicate=1",
    "DDP": "layout.dp_replicate=2",
    "ZeRO-3": "layout.dp_shard=2",
    "tp=2": "layout.tp=2",
}
# GPT-2 shares tensors between parameters; the other families load each parameter from its own tensor.
FAST = {("gpt2", "ZeRO-3"), ("gpt2", "tp=2"), *((family, "one process") for family in HF_FAMILIES)}
CELLS = [
    pytest.param(family, layout, marks=() if (family, layout) in FAST else pytest.mark.slow)
    for family in HF_FAMILIES
    for layout in LAYOUTS
]


def write_family(family: str, folder: Path) -> DecoderModel:
    """A random model of a family in the Hugging Face format, with a byte tokenizer."""
    folder.mkdir()
    name, settings = HF_FAMILIES[family]
    config = {"model_type": family, "architectures": [name], "vocab_size": 320, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    model = DecoderModel(**read_config(folder).fields)
    random = np.random.default_rng(3)
    tensors = {
        name: random.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in list_hf_shapes(model).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()))
    return model


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_family_trains_from_its_weights_with_a_clean_audit(train, use_hf_folder, tmp_path, family, layout):
    """State bytes per rank and all collectives equal the plan; the weights are those of the folder."""
    write_family(family, tmp_path / "base")
    use_hf_folder(tmp_path / "base")
    run = train(LAYOUTS[layout], "train.steps=2")
    assert run.result["audit_ok"], run.result["differences"]
    assert run.result["state_bytes"] == run.result["predicted_state_bytes"]
    assert "weights: 1 file of" in run.messages
