"""``meshwright checkpoint``: export, list, verify and prune; jobs that start from a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.hf_tokenizer import hf_tokenizer_text
from meshwright.data.tokenizer import BpeTokenizer, ByteTokenizer
from meshwright.launch.lock import RunLock
from meshwright.runs.data import prepare_data
from meshwright.runs.reporter import SILENT
from meshwright.spec.load import build_job

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_export_reports_the_written_files(cli):
    ran = cli("checkpoint", "export", GOLDEN, "deep/out", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["files"] == FILES == sorted(p.name for p in Path("deep/out").iterdir())
    assert (ran.json["architecture"], ran.json["dtype"]) == ("LlamaForCausalLM", "float32")
    assert ran.json["bytes"] > 0
    tokenizer = json.loads(Path("deep/out/tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|endoftext|>"
    assert [p.name for p in Path("deep").iterdir()] == ["out"], "no temporary folder is left"


def test_an_exported_folder_can_be_planned_and_used_for_generation(cli):
    assert cli("checkpoint", "export", GOLDEN, "out").status == 0
    Path("job.toml").write_text(
        '[model]\nhf = "out"\n[data]\npath = "text"\nseq_len = 32\n[train]\nsteps = 4\nglobal_batch = 8\n'
    )
    planned = cli("plan", "job.toml")
    assert planned.status == 0, planned.err
    assert "LlamaForCausalLM of " in planned.out
    from_checkpoint, from_export = (
        cli("generate", path, "--tokens", 3, "--json").json["text"] for path in (GOLDEN, "out")
    )
    assert from_checkpoint == from_export


def test_export_writes_bf16_and_shards_if_asked(cli):
    ran = cli(
        "checkpoint", "export", GOLDEN, "out", "--dtype", "bfloat16", "--shard-gb", "0.000001", "--json"
    )
    assert ran.status == 0, ran.err
    assert "model.safetensors.index.json" in ran.json["files"]
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"


def test_export_does_not_overwrite_existing_files(cli):
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("file").write_text("mine")
    for out in ("full", "file"):
        assert cli("checkpoint", "export", GOLDEN, out).codes == ["export-out-exists"]
    assert Path("full/mine.txt").read_text() == "mine"
    Path("empty").mkdir()
    assert cli("checkpoint", "export", GOLDEN, "empty").status == 0


def test_export_refuses_bad_arguments_with_codes(cli):
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


def test_the_tokenizer_of_the_hf_folder_is_the_default(tmp_path, corpus):
    """Without one in the folder the default is bytes. data.tokenizer in the job has priority."""
    folder = tmp_path / "hf"
    job = hf_job(folder, corpus)
    named = {TokenDataset.open(prepare_data(job, SILENT), "train", 32).load_tokenizer().name}
    (folder / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()), encoding="utf-8")
    prepared = TokenDataset.open(prepare_data(job, SILENT), "train", 32).load_tokenizer()
    assert (named, prepared.name, prepared.vocab_size) == ({"byte"}, "bpe", 257)
    chosen = prepare_data(hf_job(folder, corpus, tokenizer="byte"), SILENT)
    assert TokenDataset.open(chosen, "train", 32).load_tokenizer().name == "byte"


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path, corpus):
    folder = tmp_path / "hf"
    job = hf_job(folder, corpus)
    BpeTokenizer.train((p.read_text() for p in sorted(corpus.iterdir())), 320).save(folder)
    with pytest.raises(UserError) as caught:
        prepare_data(job, SILENT)
    problem = caught.value.problems[0]
    assert (problem.code, problem.value) == ("model-vocab-small", 300)
    assert "data.tokenizer" in problem.fix


@pytest.fixture
def run_with_checkpoints(tmp_path) -> Path:
    """A run's folder with checkpoints of steps 2, 4 and 6."""
    for step in (2, 4, 6):
        shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "run" / "events.jsonl").touch()
    return tmp_path / "run"


def damage(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def test_list_shows_each_checkpoint_with_its_state(cli, run_with_checkpoints):
    (run_with_checkpoints / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    ran = cli("checkpoint", "list", run_with_checkpoints)
    assert ran.status == 0
    assert [line.split()[0] for line in ran.out.splitlines()[2:] if line[:4].strip()] == ["2", "4", "6"]
    assert ran.out.count("complete") == 2
    found = cli("checkpoint", "list", run_with_checkpoints, "--json").json["checkpoints"]
    assert [(c["step"], c["complete"], c["bytes"] > 0) for c in found] == [
        (2, True, True),
        (4, False, True),
        (6, True, True),
    ]


def test_verify_exits_3_and_names_the_damaged_file(cli, run_with_checkpoints):
    assert cli("checkpoint", "verify", run_with_checkpoints).status == 0
    damage(run_with_checkpoints / "checkpoints" / "step-00000004")
    ran = cli("checkpoint", "verify", run_with_checkpoints)
    assert ran.status == 3
    (line,) = [line for line in ran.out.splitlines() if line.endswith("[checkpoint-broken]")]
    assert "step-00000004 is damaged: the checksum of model.safetensors" in line
    found = cli("checkpoint", "verify", run_with_checkpoints / "checkpoints", "--json")
    assert (found.status, found.json["ok"]) == (3, False)
    assert [c["complete"] for c in found.json["checkpoints"]] == [True, False, True]
    assert cli("checkpoint", "verify", run_with_checkpoints / "checkpoints" / "step-00000006").status == 0


def test_prune_removes_older_checkpoints_and_lists_the_rest(cli, run_with_checkpoints):
    damage(run_with_checkpoints / "checkpoints" / "step-00000006")
    ran = cli("checkpoint", "prune", run_with_checkpoints, "--keep", 1, "--json")
    assert ran.status == 0, ran.err
    sets = ("kept", "removed", "broken")
    assert [[c["step"] for c in ran.json[name]] for name in sets] == [[4], [2], [6]]
    assert "kept: " in ran.err
    assert "1 checkpoint kept, 1 removed" in ran.err
    left = sorted(p.name for p in (run_with_checkpoints / "checkpoints").glob("step-*"))
    assert left == ["step-00000004", "step-00000006"]


def test_prune_keeps_multiples_of_steps_too(cli, run_with_checkpoints):
    ran = cli("checkpoint", "prune", run_with_checkpoints, "--keep", 1, "--keep-every", 4, "--json")
    assert (ran.status, [c["step"] for c in ran.json["kept"]]) == (0, [4, 6])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("list", "gone"), "checkpoint-missing"),
        (("verify", "gone"), "checkpoint-missing"),
        (("prune", "gone", "--keep", 1), "checkpoint-missing"),
        (("prune", "run"), "cli-usage"),
        (("prune", "run", "--keep", 0), "cli-usage"),
    ],
)
def test_bad_arguments_of_list_verify_and_prune_exit_2(cli, run_with_checkpoints, arguments, code):
    ran = cli("checkpoint", *arguments)
    assert (ran.status, ran.codes) == (2, [code])
    assert len(list((run_with_checkpoints / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize("which", [".", "checkpoints"])
def test_a_running_job_is_not_pruned(cli, run_with_checkpoints, which):
    with RunLock.take(run_with_checkpoints):
        ran = cli("checkpoint", "prune", run_with_checkpoints / which, "--keep", 1)
    assert (ran.status, ran.codes) == (2, ["run-busy"])
    assert len(list((run_with_checkpoints / "checkpoints").iterdir())) == 3
