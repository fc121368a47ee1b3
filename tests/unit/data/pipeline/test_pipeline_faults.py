"""Faults of a preparation on an engine: files that change, kills at bad moments, errors of the system."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.data.corpus_spec import CorpusSpec

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from meshwright.data.engines import work_folder
from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.engines.work_folder import WorkFolder
from meshwright.data.pipeline import run, scan
from meshwright.data.pipeline.run import prepare_on_engine
from meshwright.data.pipeline.splits import plan_splits


class Meddler(EmbeddedEngine):
    """Calls a function once, before a stage."""

    def __init__(self, stage: str, action) -> None:
        super().__init__(1)
        self.stage, self.action = stage, action

    def run_map(self, stage, folder, tasks):
        if stage.name == self.stage and self.action is not None:
            action, self.action = self.action, None
            action()
        super().run_map(stage, folder, tasks)


@pytest.fixture
def texts(tmp_path) -> Path:
    """Twenty texts, in a folder of their own."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(f"text {number} " * (number + 1))
    return tmp_path


SPEC = CorpusSpec(("text",), "out", eval_fraction=0.2)


def _replace_content(path: Path) -> None:
    """Another content of the same time."""
    facts = path.stat()
    path.write_text("x")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("stage", ["scan", "tokenize"])
@pytest.mark.parametrize("change", [Path.unlink, _replace_content])
def test_a_file_that_is_deleted_or_rewritten_is_a_change(texts, stage, change):
    """Its document would be missing, or would be another one than was counted."""
    engine = Meddler(stage, lambda: change(texts / "text" / "07.txt"))
    with pytest.raises(UserError, match=r"text/07\.txt.*data-changed"):
        prepare_on_engine(SPEC, texts, engine)
    assert not (texts / "out").exists()


def _rewrite(path: Path, data: bytes) -> None:
    """Other bytes of the same number and time: only the records tell."""
    facts = path.stat()
    path.write_bytes(data.ljust(facts.st_size))
    assert path.stat().st_size == facts.st_size
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize(
    "lines",
    [
        ['{"text": "one"}', '{"text": broken', '{"text": "three"}'],
        ['{"text": "one"}', '{"text": "two"}'],
        ['{"text": "one"}', '{"text": "two"}', '{"text": "three"}', "1"],
    ],
)
def test_records_that_differ_from_the_scan_are_a_change(tmp_path, lines):
    """A kept record that is broken now; fewer records; more records."""
    path = tmp_path / "a.jsonl"
    records = [json.dumps({"text": word}) for word in ("one", "two", "three")]
    path.write_bytes("\n".join(records).encode() + b"   ")
    engine = Meddler("tokenize", lambda: _rewrite(path, "\n".join(lines).encode()))
    with pytest.raises(UserError, match=r"a\.jsonl.*data-changed"):
        prepare_on_engine(CorpusSpec(("a.jsonl",), "out"), tmp_path, engine)


def test_documents_that_get_lost_are_an_error(texts, monkeypatch):
    """The last check: the index has as many documents as the scan counted."""
    bound = run.bound_shards
    monkeypatch.setattr(run, "bound_shards", lambda *given: list(bound(*given))[:-1])
    with pytest.raises(UserError, match=r"counted 20.*data-changed"):
        prepare_on_engine(SPEC, texts, EmbeddedEngine(1))
    assert not (texts / "out").exists()


class KilledError(BaseException):
    """Stands for kill -9: no handler of the preparation catches it."""


def kill(*_: object, **__: object) -> None:
    raise KilledError


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_a_kill_right_after_publishing_does_not_block_the_corpus(texts, monkeypatch):
    """The work folder says that shards are written, and they are not in it any more."""
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", kill)
        with pytest.raises(KilledError):
            prepare_on_engine(SPEC, texts, EmbeddedEngine(1))
    published = {path.name: path.read_bytes() for path in (texts / "out").iterdir()}
    report = prepare_on_engine(SPEC, texts, EmbeddedEngine(1))
    assert report.documents_out == report.train_documents + report.eval_documents == 20
    assert {path.name: path.read_bytes() for path in (texts / "out").iterdir()} == published
    assert leftovers(texts) == []


def test_a_kill_while_the_work_folder_is_removed_loses_nothing(texts, monkeypatch):
    """Some results are gone: the next run does not take the rest for complete."""
    first = prepare_on_engine(SPEC, texts, EmbeddedEngine(1), split_bytes=200)

    def remove_half(path, **_: object) -> None:
        if "work" in Path(path).name:  # not a folder within it
            for result in sorted(Path(path).glob("order/*.arrow"))[:2]:
                result.unlink()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(work_folder.shutil, "rmtree", remove_half)
        with pytest.raises(KilledError):
            prepare_on_engine(SPEC, texts, EmbeddedEngine(1), split_bytes=200)
    again = prepare_on_engine(SPEC, texts, EmbeddedEngine(1), split_bytes=200)
    assert again.sha256 == first.sha256
    assert again.train_documents + again.eval_documents == 20
    assert [name for name in leftovers(texts) if ".work" in name] == []


def test_drafts_of_killed_workers_are_not_published(texts):
    """A worker dies while it writes a shard; its draft stays in the folder that is published."""

    def leave_drafts() -> None:
        (shards,) = texts.glob(".out.*.work/shards")
        (shards / ".train-00000.bin.123-0a1b2c3d.part").write_bytes(b"half")
        (shards / ".train-00000.no-mask").touch()

    prepare_on_engine(SPEC, texts, Meddler("write", leave_drafts))
    names = sorted(path.name for path in (texts / "out").iterdir())
    assert [name for name in names if name.startswith(".")] == []
    prepare_on_engine(SPEC, texts, EmbeddedEngine(1))  # a folder with other files would not be replaced


def test_drafts_are_cleared_when_the_folder_is_taken(tmp_path):
    work = WorkFolder(tmp_path / "work")
    draft = work.path / "scan" / ".00000.arrow.123-0a1b2c3d.part"
    draft.parent.mkdir(parents=True)
    draft.touch()
    with work.locked():
        assert not draft.exists()


def _fail(error: OSError):
    def action() -> None:
        raise error

    return action


def test_an_error_of_the_system_keeps_what_is_done(texts):
    """Too many open files is not a mistake of ``out``; the next run does not scan again."""
    error = OSError(errno.EMFILE, "Too many open files", "text/03.txt")
    with pytest.raises(UserError, match=r"Too many open files text/03\.txt.*data-engine-failed"):
        prepare_on_engine(SPEC, texts, Meddler("tokenize", _fail(error)))
    prepare_on_engine(SPEC, texts, Meddler("scan", lambda: pytest.fail("scanned again")))


def test_a_full_disk_removes_what_is_done(texts):
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match="data-disk-full"):
        prepare_on_engine(SPEC, texts, Meddler("tokenize", _fail(full)))
    assert leftovers(texts) == []


def test_a_file_of_the_output_that_cannot_be_written_is_named(texts):
    def forbid() -> None:
        (work,) = texts.glob(".out.*.work")
        raise PermissionError(errno.EACCES, "Permission denied", str(work / "tokens" / "x"))

    with pytest.raises(UserError, match=r"Permission denied.*data-not-writable"):
        prepare_on_engine(SPEC, texts, Meddler("tokenize", forbid))


def test_folders_of_other_corpora_and_of_running_ones_stay(texts):
    """``out.v2`` is another corpus; another preparation into ``out`` runs."""
    name = "0123456789abcdef"
    other, running, stale = (
        texts / f".{out}.work" for out in (f"out.v2.{name}", f"out.{name}", f"out.{name[::-1]}")
    )
    trash = texts / f".out.{name}.work.0a1b2c3d.trash"
    for folder in (other, stale, trash):
        folder.mkdir()
    with WorkFolder(running).locked():
        prepare_on_engine(SPEC, texts, EmbeddedEngine(1))
    assert leftovers(texts) == sorted([other.name, running.name])


def test_the_work_folder_depends_on_all_that_the_result_depends_on(texts, monkeypatch):
    """The content of the template, how files are grouped into splits, and versions."""
    (texts / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    spec = CorpusSpec(("text",), "out", template="chat.jinja")

    def name(split_bytes: int = 2**20) -> str:
        return run._fingerprint(spec, texts, plan_splits(spec.sources, texts, (), split_bytes=split_bytes))

    names = [name(), name(split_bytes=60)]
    assert names[0] == name()
    (texts / "chat.jinja").write_text("{{ messages[1]['content'] }}")
    names.append(name())
    monkeypatch.setattr(run, "__version__", "9.9")
    names.append(name())
    monkeypatch.setattr(run, "version", lambda package: "9.9")
    names.append(name())
    assert len(set(names)) == 5


def test_lines_of_bad_records_are_counted_once_per_part(tmp_path, monkeypatch):
    """Half of the records are broken: the file is not read again for each, and not in the second pass."""
    lines = [json.dumps({"text": f"text {n}"}) if n % 2 else "{broken" for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    count, counted = scan._lines_before, []
    monkeypatch.setattr(scan, "_lines_before", lambda path, at: counted.append(at) or count(path, at))
    spec = CorpusSpec(("a.jsonl",), "out", tokenizer="byte")
    report = prepare_on_engine(spec, tmp_path, EmbeddedEngine(1), split_bytes=100)
    assert report.quarantined == 20
    names = [name.split(": ")[0] for name in report.quarantined_names]
    assert names == [f"a.jsonl:{2 * n + 1}" for n in range(len(names))]
    assert len(counted) > 3
    assert len(counted) == len(set(counted))
