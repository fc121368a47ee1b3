"""The stages on the embedded engine: the bytes of the reference, whatever is killed in between."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from golden_corpus import CORPUS, SHA256, SPLIT_BYTES, write_corpus
from meshwright.core.errors import UserError
from meshwright.data.corpus_spec import CorpusSpec, parse_corpus_spec
from meshwright.data.prepare import prepare_corpus

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.pipeline.run import prepare_on_engine

OF_THE_RUN = ("engine", "seconds", "bytes_per_s", "warnings")
"""What differs from run to run; a warning is about the folder that is replaced."""


def facts(report) -> dict:
    """What every engine must report alike."""
    return {key: value for key, value in report.as_dict().items() if key not in OF_THE_RUN}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    write_corpus(folder)
    return folder


def on_embedded(spec, folder, split_bytes=SPLIT_BYTES):
    return prepare_on_engine(spec, folder, EmbeddedEngine(1), split_bytes=split_bytes)


def test_the_golden_checksum(corpus):
    """The reference gives the frozen checksum; the embedded engine the same report to the last name."""
    spec = parse_corpus_spec(CORPUS)
    reference = prepare_corpus(spec, corpus)
    assert reference.sha256 == SHA256
    assert reference.near_duplicates > 10
    assert reference.duplicates == 3
    assert facts(on_embedded(spec, corpus)) == facts(reference)
    assert facts(on_embedded(spec, corpus, split_bytes=2**30)) == facts(reference)
    assert sorted(path.name for path in corpus.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokenizer": "bpe:300", "near_duplicates": True},
        {"eval_fraction": 1.0},
        {"eval_fraction": 1e-9, "shuffle": True},
        {"sources": ("text/long.txt",)},
        {"sources": ("text/000.txt",), "shuffle": True},
    ],
)
def test_the_embedded_engine_equals_the_reference(corpus, changes):
    """Order as read, trained BPE, an evaluation set, no document held out, one document that is split."""
    if "tokenizer" in changes:
        pytest.importorskip("tokenizers")
    plain = {key: CORPUS[key] for key in ("sources", "out", "eval_fraction", "shard_tokens")}
    spec = CorpusSpec(**{**plain, **changes})
    reference = prepare_corpus(spec, corpus)
    assert facts(on_embedded(spec, corpus)) == facts(reference)


def test_conversations_keep_their_loss_masks(tmp_path):
    records = [{"prompt": f"What is {n}?", "answer": f"It is {n * n}. " * (n % 5 + 1)} for n in range(60)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, records)))
    spec = CorpusSpec(("qa.jsonl",), "out", template="chatml", eval_fraction=0.2, shard_tokens=900)
    reference = prepare_corpus(spec, tmp_path)
    masks = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.u8")}
    assert facts(on_embedded(spec, tmp_path, split_bytes=500)) == facts(reference)
    assert len(masks) > 3
    assert masks == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.u8")}


def test_a_bad_record_stops_the_job_only_if_it_says_so(corpus):
    """The same error as the reference, with the line in the whole file."""
    spec = CorpusSpec(("a.jsonl",), "strict", on_bad_records="error")
    errors = []
    for prepare in (prepare_corpus, on_embedded):
        with pytest.raises(UserError) as error:
            prepare(spec, corpus)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "a.jsonl:1 " in errors[0]
    assert not (corpus / "strict").exists()


def test_an_empty_result_stops(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    spec = parse_corpus_spec({"sources": ["a.txt"], "out": "out", "filter": {"min_characters": 10}})
    with pytest.raises(
        UserError, match=r"of 1 document, .* 1 \(min_characters=10\)\..*\[data-corpus-empty\]"
    ):
        on_embedded(spec, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_two_preparations_into_one_folder_are_refused(tmp_path):
    """The second one is told, and does not disturb the first."""
    (tmp_path / "a.txt").write_text("one two three")
    spec, second = CorpusSpec(("a.txt",), "out"), []

    class Meddler(EmbeddedEngine):
        def run_map(self, stage, folder, tasks):
            if not second:
                with pytest.raises(UserError, match="data-prepare-running") as error:
                    on_embedded(spec, tmp_path)
                second.append(error)
            super().run_map(stage, folder, tasks)

    prepare_on_engine(spec, tmp_path, Meddler(1), split_bytes=SPLIT_BYTES)
    assert len(second) == 1


class StopAfterError(Exception):
    """Ends a run between two tasks."""


class StopAfter(EmbeddedEngine):
    """Stops after a number of tasks, as a kill between two tasks would."""

    def __init__(self, tasks: int) -> None:
        super().__init__(1)
        self.left = tasks
        self.ran: list[tuple[str, int]] = []

    def run_map(self, stage, folder, tasks):
        for task in tasks:
            if self.left == 0:
                raise StopAfterError
            self.left -= 1
            self.ran.append((stage.name, task[0]))
            super().run_map(stage, folder, [task])


def test_a_stopped_run_goes_on_task_by_task(corpus):
    """Stopped after every few tasks, no task runs twice, and the checksum is the same."""
    spec = parse_corpus_spec({**CORPUS, "out": "stopped"})
    ran: list[tuple[str, int]] = []
    for _ in range(50):
        engine = StopAfter(5)
        try:
            report = prepare_on_engine(spec, corpus, engine, split_bytes=SPLIT_BYTES)
        except StopAfterError:
            continue
        finally:
            ran += engine.ran
        break
    assert report.sha256 == SHA256
    assert len(ran) == len(set(ran)) > 25
    assert len([task for task in ran if task[0] == "write"]) == report.shards


CHILD = """
import json, sys
from pathlib import Path
from meshwright.data.corpus_spec import parse_corpus_spec
from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.pipeline.run import prepare_on_engine
corpus, folder, split_bytes = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if __name__ == "__main__":
    engine = EmbeddedEngine(2)
    stage = lambda name, share, documents: print(name, flush=True)
    print("done", prepare_on_engine(parse_corpus_spec(corpus), folder, engine, stage, split_bytes).sha256)
"""


@pytest.mark.parametrize("kill_in", [pytest.param("scan", marks=pytest.mark.slow), "tokenize", "write"])
def test_kill_9_at_any_moment(corpus, tmp_path, kill_in):
    """The driver is killed with -9 while its workers run; the next run ends with the checksum."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    settings = json.dumps({**CORPUS, "out": str(tmp_path / "out")})
    command = [sys.executable, str(script), settings, str(corpus), str(SPLIT_BYTES)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.strip() == kill_in:
            break
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (work,) = tmp_path.glob(".out.*.work")
    assert not (tmp_path / "out").exists()
    time.sleep(1.0)  # the workers end by themselves
    before = set(work.rglob("*.arrow"))
    spec = parse_corpus_spec({**CORPUS, "out": str(tmp_path / "out")})
    report = prepare_on_engine(spec, corpus, EmbeddedEngine(1), split_bytes=SPLIT_BYTES)
    assert report.sha256 == SHA256
    assert before, "nothing was done before the kill"
    assert list(tmp_path.glob(".out.*")) == []


@pytest.mark.slow
def test_kill_9_again_and_again(corpus, tmp_path):
    """Killed after random times until one run reaches its end: no time is safe, and none does harm."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    settings = json.dumps({**CORPUS, "out": str(tmp_path / "out")})
    command = [sys.executable, str(script), settings, str(corpus), str(SPLIT_BYTES)]
    seed = random.SystemRandom().randrange(2**32)
    draw, kills = random.Random(seed), 0
    for attempt in range(60):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()  # it has begun
        timer = threading.Timer(draw.uniform(0, 0.3 * (attempt + 1)), child.kill)
        timer.start()
        output = child.stdout.read()
        timer.cancel()
        child.wait()
        child.stdout.close()
        if "done" in output:
            break
        kills += 1
    assert f"done {SHA256}" in output, f"seed {seed}"
    assert kills > 2, f"seed {seed}"
    assert list(tmp_path.glob(".out.*")) == []


@pytest.mark.parametrize("engine", [None, EmbeddedEngine(1)], ids=["reference", "embedded"])
def test_a_line_that_is_too_long_is_quarantined_with_its_place(tmp_path, monkeypatch, engine):
    """Also where the file is cut into splits, and the line is longer than a split."""
    monkeypatch.setattr("meshwright.data.records.MAX_LINE_BYTES", 5000)
    lines = [json.dumps({"text": f"text {number} " * 20}) for number in range(100)]
    lines[40] = json.dumps({"text": "long " * 3000})
    lines[70] = "x" * 100_000
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    spec = CorpusSpec(("a.jsonl",), "out")
    if engine is None:
        report = prepare_corpus(spec, tmp_path)
    else:
        report = prepare_on_engine(spec, tmp_path, engine, split_bytes=3000)
    assert (report.documents_in, report.documents_out, report.quarantined) == (100, 98, 2)
    places = [name.partition(": ")[0] for name in report.quarantined_names]
    assert [place.rpartition(":")[2] for place in places] == ["41", "71"]
    with pytest.raises(UserError, match="a line of more than") as error:
        prepare_corpus(replace(spec, out="strict", on_bad_records="error"), tmp_path)
    assert error.value.problems[0].code == "data-line-long"


def test_a_file_that_changes_in_between_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")

    class Meddler(EmbeddedEngine):
        def run_map(self, stage, folder, tasks):
            if stage.name == "tokenize":
                os.utime(tmp_path / "a.txt", (1, 1))
            super().run_map(stage, folder, tasks)

    with pytest.raises(UserError, match="data-changed"):
        prepare_on_engine(CorpusSpec(("a.txt",), "out"), tmp_path, Meddler(1))


def test_settings_of_the_filter_are_checked():
    with pytest.raises(UserError) as error:
        parse_corpus_spec(
            {
                "sources": ["a"],
                "out": "b",
                "filter": {"min_wrods": 3, "languages": ["xx"], "max_symbols": 2.0},
            }
        )
    codes = sorted(problem.code for problem in error.value.problems)
    assert codes == ["corpus-bad-value", "corpus-language", "corpus-unknown-key"]
    assert "filter.min_words" in str(error.value)
    assert (
        asdict(parse_corpus_spec({"sources": ["a"], "out": "b", "filter": {}}).filter)["min_characters"] == 0
    )
