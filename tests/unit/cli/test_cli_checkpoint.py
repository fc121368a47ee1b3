"""``meshwright checkpoint export``, and what the command line does with a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.data import settle_data
from meshwright.cli.output import Output
from meshwright.core.errors import UserError
from meshwright.prepare.dataset import TokenDataset
from meshwright.prepare.hf_tokenizer import hf_tokenizer_text
from meshwright.prepare.tokenizer import BpeTokenizer, ByteTokenizer
from meshwright.spec.load import build_job

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_export_tells_what_it_wrote(cli):
    ran = cli("checkpoint", "export", GOLDEN, "deep/out", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["files"] == FILES == sorted(p.name for p in Path("deep/out").iterdir())
    assert (ran.json["architecture"], ran.json["dtype"]) == ("LlamaForCausalLM", "float32")
    assert ran.json["bytes"] > 0
    tokenizer = json.loads(Path("deep/out/tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|endoftext|>"
    assert [p.name for p in Path("deep").iterdir()] == ["out"], "no draft is left"


def test_what_was_exported_can_be_planned_and_written_with(cli):
    assert cli("checkpoint", "export", GOLDEN, "out").status == 0
    Path("job.toml").write_text(
        '[model]\nhf = "out"\n[data]\npath = "text"\nseq_len = 32\n[train]\nsteps = 4\nglobal_batch = 8\n'
    )
    planned = cli("plan", "job.toml")
    assert planned.status == 0, planned.err
    assert "LlamaForCausalLM of " in planned.out
    ours, theirs = (cli("generate", path, "--tokens", 3, "--json").json["text"] for path in (GOLDEN, "out"))
    assert ours == theirs


def test_low_precision_and_shards_by_option(cli):
    ran = cli(
        "checkpoint", "export", GOLDEN, "out", "--dtype", "bfloat16", "--shard-gb", "0.000001", "--json"
    )
    assert ran.status == 0, ran.err
    assert "model.safetensors.index.json" in ran.json["files"]
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_there_is_not_replaced(cli):
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("file").write_text("mine")
    for out in ("full", "file"):
        assert cli("checkpoint", "export", GOLDEN, out).codes == ["export-out-exists"]
    assert Path("full/mine.txt").read_text() == "mine"
    Path("empty").mkdir()
    assert cli("checkpoint", "export", GOLDEN, "empty").status == 0


def test_bad_inputs_of_export(cli):
    Path("file").write_text("mine")
    assert cli("checkpoint", "export", "nix", "out").codes == ["checkpoint-missing"]
    assert cli("checkpoint", "export", GOLDEN, "file/out").codes == ["export-not-writable"]
    assert cli("checkpoint", "export", GOLDEN, "out", "--dtype", "int8").codes == ["cli-usage"]
    assert cli("checkpoint", "export", GOLDEN, "out", "--shard-gb", "0").codes == ["cli-usage"]
    assert cli("checkpoint").codes == ["cli-usage"]
    assert not Path("out").exists()


def hf_job(folder: Path, corpus: Path, **data):
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return build_job(
        {
            "model": {"hf": str(folder)},
            "cluster": {"preset": "h100-sxm"},
            "data": {"path": str(corpus), "seq_len": 32, "cache": str(folder / "cache"), **data},
            "train": {"steps": 4, "global_batch": 8},
        }
    )


def test_the_folders_tokenizer_is_the_default_one(tmp_path, corpus):
    """Left out, data.tokenizer is the folder's; a folder without one, or another choice, is respected."""
    folder = tmp_path / "hf"
    job = hf_job(folder, corpus)
    named = {TokenDataset.open(settle_data(Output(False), job), "train", 32).load_tokenizer().name}
    (folder / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()), encoding="utf-8")
    prepared = TokenDataset.open(settle_data(Output(False), job), "train", 32).load_tokenizer()
    assert (named, prepared.name, prepared.vocab_size) == ({"byte"}, "bpe", 257)
    chosen = settle_data(Output(False), hf_job(folder, corpus, tokenizer="byte"))
    assert TokenDataset.open(chosen, "train", 32).load_tokenizer().name == "byte"


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused(tmp_path, corpus):
    folder = tmp_path / "hf"
    job = hf_job(folder, corpus)
    BpeTokenizer.train((p.read_text() for p in sorted(corpus.iterdir())), 320).save(folder)
    with pytest.raises(UserError) as caught:
        settle_data(Output(False), job)
    problem = caught.value.problems[0]
    assert (problem.code, problem.value) == ("model-vocab-small", 300)
    assert "data.tokenizer" in problem.fix
