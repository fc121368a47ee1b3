"""``examples/finetune-7b.toml`` with a small model: four ranks, Hugging Face weights in and out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from saved_checkpoints import load_weights

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests do not use the network

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: E402
from meshwright.checkpoint.hf.names import list_hf_locations  # noqa: E402
from meshwright.core.errors import UserError  # noqa: E402
from meshwright.core.events import read_events  # noqa: E402
from meshwright.data.hf_tokenizer import hf_tokenizer_text  # noqa: E402
from meshwright.data.tokenizer import ByteTokenizer  # noqa: E402
from meshwright.parallel.mesh import Mesh  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.train.generate import GenerateTask, load_model  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LR, WARMUP = 4e-3, 4
SMALL = (
    "cluster.preset=local",
    "cluster.device=cpu",
    "data.seq_len=256",
    "train.steps=16",
    "train.global_batch=8",
    f"train.lr={LR}",
    f"train.warmup={WARMUP}",
    "train.eval_every=8",
    "train.eval_samples=8",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=99",
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A random transformers model in several weight files, with a byte tokenizer."""
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    made.to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="100KB")
    (tmp_path / "base" / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()))
    return tmp_path / "base"


@pytest.fixture
def finetune(train, job_file, folder):
    """Train the job of the example with the small model."""
    shutil.copytree(EXAMPLES, job_file.parent, dirs_exist_ok=True)  # its paths start from the job's folder
    job_file.write_text((EXAMPLES / "finetune-7b.toml").read_text())
    return lambda *more: train(f"model.hf={folder}", *SMALL, *more)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.slow
def test_finetuning_starts_from_the_folder_and_exports_equal_logits(finetune, folder, job_file, tmp_path):
    """Training and held-out loss fall. The exported model has the same logits in transformers."""
    trained = finetune()
    result = trained.result
    assert (result["world_size"], result["layout"]["zero"]) == (4, 3)
    assert result["audit_ok"], result["differences"]
    assert f"files of {folder}" in trained.messages
    assert sum(trained.losses[-4:]) < 0.9 * sum(trained.losses[:4])
    events = read_events(trained.run_dir / "events.jsonl").events
    held_out = [e["loss"] for e in events if e["event"] == "eval" and e["rank"] == 0]
    assert len(held_out) == 2
    assert held_out[-1] < held_out[0]
    # The first AdamW step changes an element by at most the learning rate: each tensor began at the folder's.
    checkpoints = trained.run_dir / "checkpoints"
    before, first = tensors_of(folder), load_weights(checkpoints / "step-00000001")
    locations = list_hf_locations(load_job(str(job_file), [f"model.hf={folder}", *SMALL]).model)
    assert first.keys() == locations.keys()
    for name, tensor in first.items():
        moved = (tensor - before[locations[name].name].float()).abs().max()
        assert 0 < moved <= 1.01 * LR / WARMUP, name
    export_checkpoint(Path(result["checkpoint"]), tmp_path / "out", "float32", 100_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.randint(0, 256, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = load_model(GenerateTask(result["checkpoint"]), Mesh(0, 1, torch.device("cpu")))(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_missing_and_misshapen_tensors_are_refused_before_a_rank_starts(finetune, folder):
    """The errors name both tensors, and there is no run folder."""
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        held.pop("model.norm.weight", None)
        if "model.layers.1.mlp.up_proj.weight" in held:
            held["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 48, dtype=torch.bfloat16)
        save_file(held, path)
    with pytest.raises(UserError) as caught:
        finetune()
    problems = {problem.code: str(problem.rule) for problem in caught.value.problems}
    assert problems.keys() == {"model-hf-weights-missing", "model-hf-weights-shape"}
    assert "model.norm.weight" in problems["model-hf-weights-missing"]
    assert "model.layers.1.mlp.up_proj.weight is 95x48" in problems["model-hf-weights-shape"]
    assert not Path("runs").exists()
