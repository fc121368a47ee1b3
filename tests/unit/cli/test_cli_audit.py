"""``audit`` on kept, doctored and broken folders; ``prepare``; what ``train`` and ``generate`` refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1"


@pytest.fixture
def run_dir(tmp_path):
    """A copy of the golden run, to be doctored."""
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN, folder)
    return folder


def doctor(folder: Path, name: str, rank: int, change) -> None:
    """Change one event of the run."""
    log = folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == name and event["rank"] == rank:
            change(event)
    log.write_text("".join(json.dumps(event) + "\n" for event in events))


def add_call(event):
    event["rows"].append(
        {"axis": "tp", "op": "all_gather", "phase": "step", "ranks": 2, "calls": 1, "bytes": 8}
    )


def more_bytes(event):
    event["rows"][2]["bytes"] += 1


def test_a_run_that_kept_its_plan_exits_0_and_says_so(cli, run_dir):
    ran = cli("audit", run_dir)
    assert ran.status == 0
    assert "Audit: ok." in ran.out
    assert "DIFFERS" not in ran.out
    assert "not audited" in ran.out


def test_audit_json_is_one_object(cli, run_dir):
    found = cli("audit", run_dir, "--json").json
    assert found["audit_ok"] is True
    assert found["differences"] == []
    assert (found["status"], found["run_dir"]) == ("complete", str(run_dir))
    assert len(found["state"]) == 10
    assert len(found["collectives"]) == 4


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "collectives",
            add_call,
            "axis tp, all_gather in phase step: 1 calls and 8 bytes, predicted 0 and 0",
        ),
        ("collectives", more_bytes, "axis dp_replicate, all_reduce in phase step"),
        ("state", lambda e: e["state_bytes"].update(optimizer=1), "rank 1: optimizer is 1 bytes"),
        ("state", lambda e: e.update(peak_bytes=2 * e["peak_bytes"]), "rank 1: peak is 4745928 bytes"),
        ("state", lambda e: e.update(event="other"), "rank 1: parameters was not measured"),
        ("collectives", lambda e: e.update(event="other"), "rank 1 did not report its collectives"),
    ],
)
def test_a_doctored_run_exits_3_and_names_what_differs(cli, run_dir, name, change, says):
    doctor(run_dir, name, 1, change)
    ran = cli("audit", run_dir)
    assert ran.status == 3
    (line,) = [text for text in ran.out.splitlines() if says in text and text.startswith("Audit: ")]
    assert line.endswith("[audit-differs]")
    assert "Audit: ok" not in ran.out


def test_a_doctored_run_with_json_exits_3_with_the_difference(cli, run_dir):
    doctor(run_dir, "collectives", 0, more_bytes)
    ran = cli("audit", run_dir, "--json")
    assert ran.status == 3
    assert ran.json["audit_ok"] is False
    assert len(ran.json["differences"]) == 1


def test_a_doctored_plan_exits_3_too(cli, run_dir):
    plan = run_dir / "plan.toml"
    plan.write_text(plan.read_text().replace("optimizer = 756304", "optimizer = 756300", 1))
    ran = cli("audit", run_dir)
    assert ran.status == 3
    assert "rank 0: optimizer is 756304 bytes, predicted 756300" in ran.out


def test_a_log_with_a_torn_last_line_is_audited_and_noted(cli, run_dir):
    with (run_dir / "events.jsonl").open("a") as log:
        log.write('{"event":"fini')
    ran = cli("audit", run_dir)
    assert ran.status == 0
    assert "1 lines of events.jsonl are truncated" in ran.out


def test_a_damaged_event_is_a_verdict_and_not_a_traceback(cli, run_dir):
    doctor(run_dir, "state", 1, lambda event: event.pop("state_bytes"))
    assert cli("audit", run_dir).status == 3


@pytest.mark.parametrize(
    ("status", "says", "word"),
    [
        (None, "the run did not finish: not measured on every rank: memory and collectives", "-"),
        ("interrupted", "stopped before the audited step: nothing was measured", "not measured"),
    ],
)
def test_a_run_that_measured_nothing_gets_one_sentence(cli, run_dir, status, says, word):
    """Status 3 all the same, but no line for each promise; ``runs`` does not call it a difference."""
    log = run_dir / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kept = [
        e for e in events if e["event"] not in ("state", "collectives", *(() if status else ("finished",)))
    ]
    log.write_text("".join(json.dumps({**e, "status": status} if "status" in e else e) + "\n" for e in kept))
    ran = cli("audit", run_dir)
    assert ran.status == 3
    assert [t for t in ran.out.splitlines() if t.startswith("Audit: ")] == [f"Audit: {says} [audit-differs]"]
    assert "DIFFERS" not in ran.out
    assert f"  {word}  " in cli("runs", run_dir).out


def test_the_audit_of_a_run_that_failed_says_failed(cli, run_dir):
    log = run_dir / "events.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"finished"' not in line]
    error = {"v": 1, "event": "error", "time": 0.0, "rank": 1, "generation": 0, "message": "out of paper"}
    log.write_text("\n".join([*lines, json.dumps(error)]) + "\n")
    ran = cli("audit", run_dir, "--json")
    assert (ran.status, ran.json["status"], ran.json["audit_ok"]) == (3, "failed", False)


@pytest.mark.parametrize(("remove", "code"), [("events.jsonl", "run-missing"), ("plan.toml", "plan-missing")])
def test_half_a_run_exits_2(cli, run_dir, remove, code):
    (run_dir / remove).unlink()
    ran = cli("audit", run_dir, "--json")
    assert ran.status == 2
    assert ran.codes == [code]
    assert ran.json["errors"][0]["code"] == code


def test_a_folder_that_is_not_there_exits_2(cli):
    ran = cli("audit", "gone")
    assert (ran.status, ran.codes) == (2, ["run-missing"])


def test_a_plan_of_another_version_exits_2(cli, run_dir):
    plan = run_dir / "plan.toml"
    plan.write_text(plan.read_text().replace("meshwright_plan = 1", "meshwright_plan = 9"))
    ran = cli("audit", run_dir)
    assert (ran.status, ran.codes) == (2, ["plan-version"])


# prepare


def test_prepare_writes_shards_and_one_object(cli, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(f"document {number}\n" * 9)
    (tmp_path / "corpus.toml").write_text('sources = ["text"]\nout = "shards"\neval_fraction = 0.2\n')
    ran = cli("prepare", "corpus.toml", "--json")
    assert ran.status == 0
    keys = "engine documents_in documents_out duplicates quarantined tokens shards sha256 seconds bytes_per_s"
    assert set(keys.split()) <= set(ran.json)
    assert (tmp_path / "shards").is_dir()


def test_prepare_names_the_first_documents_left_out_and_counts_the_others(cli, tmp_path):
    (tmp_path / "text").mkdir()
    lines = [f'{{"text": "document {number} of a corpus"}}' for number in range(20)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join([*lines, *["{torn"] * 8]))
    (tmp_path / "corpus.toml").write_text('sources = ["text"]\nout = "shards"\n')
    shown = cli("prepare", "corpus.toml").out.splitlines()
    named = [line for line in shown if line.startswith("  left out: text/a.jsonl:")]
    assert [line.split(":")[2] for line in named] == ["21", "22", "23", "24", "25"]
    assert shown[-1] == "  and 3 more"


def test_prepare_refuses_a_corpus_file_with_all_its_mistakes(cli, tmp_path):
    (tmp_path / "corpus.toml").write_text('source = ["text"]\nout = 5\n')
    ran = cli("prepare", "corpus.toml", "--json")
    assert ran.status == 2
    assert sorted(ran.codes) == ["corpus-bad-value", "corpus-missing-key", "corpus-unknown-key"]
    assert len(ran.json["errors"]) == 3


# What train and generate refuse before any process starts


@pytest.fixture
def text_job(good, tmp_path):
    """The good job with some text to read."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(f"document {number}\n" * 30)
    job = Path(good).read_text().replace('preset = "h100-sxm"', 'preset = "local"\ndevice = "cpu"')
    Path(good).write_text(job)
    return good


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["model.window=8"], "model-window-not-built"),
        (["train.stepps=1"], "job-unknown-key"),
        (["data.path=gone"], None),
        (["model.vocab_size=64"], "model-vocab-small"),
        (["data.tokenizer=nonsense"], None),
        (["cluster.device=cuda", "cluster.nodes=2"], "cluster-not-here"),
        (["cluster.preset=h100-sxm", "cluster.device=cuda"], "cluster-not-here"),
        (["--resume"], "resume-nothing"),
        (["--resume", "run_dir=gone"], "resume-nothing"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_train_refuses_with_a_code_and_makes_no_run_folder(cli, text_job, tmp_path, overrides, code):
    ran = cli("train", text_job, *overrides, "--json")
    assert ran.status == 2, ran.err
    assert ran.json["status"] == "error"
    assert len(ran.codes) >= 1
    if code is not None:
        assert code in ran.codes
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "gone").exists()


def test_train_does_not_write_over_a_run(cli, text_job, run_dir):
    before = (run_dir / "events.jsonl").read_bytes()
    ran = cli("train", text_job, f"run_dir={run_dir}")
    assert (ran.status, ran.codes) == (2, ["run-exists"])
    assert (run_dir / "events.jsonl").read_bytes() == before


def test_train_of_a_model_that_does_not_fit_makes_no_run_folder(cli, text_job, tmp_path):
    ran = cli("train", text_job, "cluster.memory_bytes=1000")
    assert (ran.status, ran.codes) == (2, ["plan-nothing-fits"])
    assert not (tmp_path / "runs").exists()


def test_generate_without_a_checkpoint_exits_2(cli, run_dir):
    ran = cli("generate", run_dir, "--json")
    assert (ran.status, ran.codes) == (2, ["checkpoint-missing"])
    assert ran.json["status"] == "error"
