"""The documentation matches the code: keys, rules, error codes, events, modules, examples and links.

The tables of `job-file`, `legality`, `architecture` and `other-frameworks` are generated from the code. After
a change, regenerate them with ``python tests/unit/test_docs.py``.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.app import app
from meshwright.core.errors import CheckFailedError, InterruptedRunError, RunFailedError, UserError
from meshwright.data.corpus_spec import load_corpus_spec
from meshwright.plan.build import build_plan
from meshwright.spec.json_schema import job_schema
from meshwright.spec.key_hints import HINTS
from meshwright.spec.legality.table import RULES
from meshwright.spec.load import load_job
from meshwright.spec.paths import PATH_KEYS
from meshwright.spec.presets import preset_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "meshwright"
PAGES = sorted(DOCS.rglob("*.md"))
ALL_TEXT = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + PAGES

CODE = r"[a-z]+(?:-[a-z0-9]+)+"
REWRITE = "regenerate the tables: python tests/unit/test_docs.py"
PRESET_CODE = "{section}-unknown-preset"
"""The only code that is built at run time, apart from those of the legality table."""


def id_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_key_with_a_path_is_listed() -> None:
    paragraph = (DOCS / "job-file.md").read_text().partition("**Paths.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w.]+)`", paragraph)) >= set(PATH_KEYS)


def test_every_preset_is_listed() -> None:
    listed = (DOCS / "job-file.md").read_text().partition("## Presets")[2]
    missing = [n for kind in ("models", "clusters") for n in preset_names(kind) if f"`{n}`" not in listed]
    assert missing == []


# Generated tables


def generated(name: str) -> str:
    tables = {"job-file": job_tables, "legality": legality_tables, "architecture": module_tables}
    return {**tables, "other-frameworks": hint_table}[name]()


def hint_table() -> str:
    rows = ["| key elsewhere | here |", "|---|---|"]
    for hint in HINTS:
        names, keys = (", ".join(f"`{name}`" for name in text.split()) for text in (hint.names, hint.keys))
        note = f" ({hint.note})" if keys and hint.note else hint.note
        rows.append(f"| {names} | {keys}{note} |")
    return "\n".join(rows)


def job_tables() -> str:
    schema = job_schema()
    top = {k: v for k, v in schema["properties"].items() if not kinds_of(v)}
    parts = ["## Top level", "", *key_table("", top, set())]
    for section, reference in schema["properties"].items():
        kinds = kinds_of(reference)
        for kind in kinds:
            definition = schema["$defs"][kind]
            required = set(definition.get("required", ()))
            which = f": {kind.removesuffix('Model').lower()}" if len(kinds) > 1 else ""
            parts += ["", f"## `[{section}]`{which}", "", str(definition["description"]), ""]
            parts += key_table(f"{section}.", definition["properties"], required)
        if section == "data":
            for key, kind in (("sources", "Source"), ("eval", "EvalSet")):
                rows = schema["$defs"][kind]
                parts += ["", f"## `[[data.{key}]]`", "", str(rows["description"]), ""]
                parts += key_table(f"data.{key}.", rows["properties"], set(rows["required"]))
    return "\n".join(parts)


def kinds_of(facts: dict[str, Any]) -> list[str]:
    """Kinds of table that a section may be; empty for a plain key."""
    options = [facts, *facts.get("anyOf", ())]
    return [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]


def key_table(prefix: str, properties: dict[str, Any], required: set[str]) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, facts in properties.items():
        meaning = facts.get("description", "").replace("|", "\\|").replace("\n", " ")
        rows.append(
            f"| `{prefix}{key}` | {type_of(facts)} | {default_of(key, facts, required)} | {meaning} |"
        )
    return rows


def type_of(facts: dict[str, Any]) -> str:
    if "$ref" in facts:
        pages = {"Source": "below", "EvalSet": "below"}
        page = pages.get(facts["$ref"].rpartition("/")[2], "[its page](probe.md#the-file)")
        return f"table, see {page}"
    if "anyOf" in facts:
        return type_of(next(option for option in facts["anyOf"] if option.get("type") != "null"))
    if "oneOf" in facts:
        return " or ".join(map(type_of, facts["oneOf"]))
    if "enum" in facts:
        return ", ".join(f"`{value}`" for value in facts["enum"])
    if "const" in facts:
        return f"`{facts['const']}`"
    if facts["type"] == "array":
        return f"list of: {type_of(facts['items'])}"
    words = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    limits = [f"{sign} {facts[bound]}" for bound, sign in bounds if bound in facts]
    return ", ".join([words[facts["type"]], *limits])


def default_of(key: str, facts: dict[str, Any], required: set[str]) -> str:
    if key in required:
        return "required"
    if "default" not in facts:
        exceptions = {"seq_len": "required, except for images", "path": "required, unless there are sources"}
        return exceptions.get(key, "from the preset")
    value = facts["default"]
    if value is None:
        return "see meaning"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def legality_tables() -> str:
    parts: list[str] = []
    for built, title in ((True, "## Never supported"), (False, "## Not built yet")):
        rows = [f"| `{rule.code}` | {rule.statement} |" for rule in RULES if rule.built is built]
        parts += [title, "", "| code | rule |", "|---|---|", *rows, ""]
    return "\n".join(parts).rstrip()


def package_folders() -> list[Path]:
    """Folders of the package, top-level ones first, each followed by its subpackages."""
    return sorted({path.parent for path in SOURCE.rglob("*.py")})


def module_tables() -> str:
    parts: list[str] = []
    for folder in package_folders():
        name = "meshwright" if folder == SOURCE else folder.relative_to(SOURCE).as_posix()
        parts += ["", f"### `{name}`", ""]
        if folder != SOURCE:
            parts += [purpose_of(folder / "__init__.py"), ""]
        rows = [
            f"| `{path.relative_to(SOURCE).as_posix()}` | {purpose_of(path)} |"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py" or folder == SOURCE
        ]
        parts += ["| module | purpose |", "|---|---|", *rows] if rows else []
    return "\n".join(parts).strip()


def purpose_of(path: Path) -> str:
    """The first paragraph of a module's docstring, up to the end of its first sentence."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    sentence = re.match(r".+?[.?!](?=\s+[A-Z]|$)", text)
    plain = (sentence[0] if sentence else text).replace("``", "`").replace("|", "\\|")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", plain)


BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def rewrite(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}\n{generated(match[2])}\n\n{match[3]}", text)


GENERATED = ("architecture", "job-file", "legality", "other-frameworks")


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_up_to_date(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    assert [match[2] for match in BLOCK.finditer(page)] == [name]
    assert page == rewrite(page), REWRITE


def test_job_page_names_every_key_and_no_other() -> None:
    schema = job_schema()
    keys = set()
    for section, facts in schema["properties"].items():
        kinds = kinds_of(facts)
        for kind in kinds:
            keys |= {f"{section}.{key}" for key in schema["$defs"][kind]["properties"]}
        if not kinds:
            keys.add(section)
    for table, kind in (("sources", "Source"), ("eval", "EvalSet")):
        keys |= {f"data.{table}.{key}" for key in schema["$defs"][kind]["properties"]}
    named = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "job-file.md").read_text(), re.MULTILINE))
    assert len(keys) > 50
    assert named == keys, REWRITE


def test_probe_page_names_every_key_of_its_table() -> None:
    definitions = job_schema()["$defs"]
    kinds = {
        "Probed": "",
        "GemmTime": "gemms.",
        "AttentionTime": "attention.",
        "CollectiveTime": "collectives.",
    }
    keys = {f"probed.{at}{key}" for kind, at in kinds.items() for key in definitions[kind]["properties"]}
    # The page says of ``probed.all_cores`` that it has the keys above it again.
    assert set(definitions["OperationTimes"]["properties"]) < set(definitions["Probed"]["properties"])
    named = re.findall(r"^\| `([\w.]+)` \|", (DOCS / "probe.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(keys)


def test_legality_page_has_every_rule() -> None:
    page = (DOCS / "legality.md").read_text()
    assert len(RULES) > 20
    for rule in RULES:
        assert f"| `{rule.code}` | {rule.statement} |" in page, REWRITE


# Architecture: packages, modules and paths


def test_every_package_and_module_is_in_the_architecture() -> None:
    page = (DOCS / "architecture.md").read_text()
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert len(modules) > 200
    missing = [m for m in modules if f"| `{m.relative_to(SOURCE).as_posix()}` |" not in page]
    missing += [f for f in package_folders() if f != SOURCE and f"### `{f.relative_to(SOURCE)}`" not in page]
    assert missing == [], REWRITE


def test_layers_are_those_that_are_checked() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        c["layers"] for c in contract if c["type"] == "layers" and c["containers"] == ["meshwright"]
    )
    torchless = next(set(c["source_modules"]) for c in contract if c.get("forbidden_modules") == ["torch"])
    section = (DOCS / "architecture.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| (?:.*) \| (never|yes|.*) \|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == layers
    assert {f"meshwright.{name}" for name, torch in rows if torch == "never"} == torchless


def test_each_walk_has_at_most_ten_files() -> None:
    page = (DOCS / "architecture.md").read_text()
    walks = [part for part in page.split("\n## ") if "| step | file |" in part]
    assert len(walks) == 3
    for walk in walks:
        steps = re.findall(r"^\| (\d+)\. .* \| `([\w/]+\.py)` \|$", walk, re.MULTILINE)
        assert 3 <= len(steps) <= 10
        assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("path", ALL_TEXT, ids=id_of)
def test_source_files_that_are_named_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return
    text = path.read_text()
    named = {*re.findall(r"`([\w./-]+\.py)`", text), *re.findall(r"(?:tests|benchmarks)/[\w./-]+\.py", text)}
    names = {
        file.name for root in (SOURCE, ROOT / "tests", ROOT / "benchmarks") for file in root.rglob("*.py")
    }
    missing = {name for name in named if "/" not in name} - names - {"utils.py"}
    missing |= {n for n in named if "/" in n and not (SOURCE / n).is_file() and not (ROOT / n).is_file()}
    assert missing == set()


# Error codes


@cache
def source_trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


CODED = ("Problem", "BadDataError")
"""Classes whose first argument is a code."""


@cache
def used_codes() -> tuple[set[str], list[str]]:
    """Codes in the source, and the places that build one in a way this test cannot read."""
    codes = {rule.code for rule in RULES}
    unread: list[str] = []
    for path, tree in source_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODED:
                given = [k.value for k in node.keywords if k.arg == "code"] + node.args[:1]
                expression = given[0]
                if isinstance(expression, ast.Constant):
                    codes.add(expression.value)
                elif isinstance(expression, ast.JoinedStr) and ast.unparse(expression) == f"f'{PRESET_CODE}'":
                    codes |= {PRESET_CODE.format(section=kind) for kind in ("model", "cluster")}
                elif not is_passed_on(expression):
                    unread.append(f"{path.name}:{node.lineno}: {ast.unparse(expression)}")
    for path in (*sorted(SOURCE.rglob("*.py")), ROOT / "Makefile"):
        codes |= set(re.findall(rf"\[({CODE})\]\\?[\"n]", path.read_text()))
    return codes, unread


def is_passed_on(expression: ast.expr) -> bool:
    """A code that a helper takes from its caller, or that is repeated from a rank's own error."""
    return ast.unparse(expression) in ("code", "first['code']", "error.code")


def test_every_error_code_is_documented_and_no_other() -> None:
    codes, unread = used_codes()
    assert not unread, "codes that are neither literals nor of the legality table"
    documented = re.findall(rf"^\| `({CODE})` \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert len(codes) > 60
    assert sorted(set(documented)) == sorted(codes)
    assert len(documented) == len(set(documented)), "a code has two rows"


def test_helpers_that_take_a_code_are_given_literals() -> None:
    """A code that `is_passed_on` accepts must be in the table, or a literal of the caller."""
    codes, _ = used_codes()
    for _, tree in source_trees():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        helpers = {f.name for f in functions if any(a.arg == "code" for a in f.args.args)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
                literals = {a.value for a in ast.walk(node) if isinstance(a, ast.Constant)}
                assert literals & codes, f"{ast.unparse(node)} passes a code that is not documented"


def test_exit_statuses_are_documented() -> None:
    page = (DOCS / "errors.md").read_text()
    for error in (UserError, CheckFailedError, RunFailedError, InterruptedRunError):
        assert re.search(rf"^\| {error.exit_status} \|", page, re.MULTILINE), error.__name__


# Events


def used_events() -> dict[str, set[str]]:
    """Fields of each event that a rank writes."""
    fields: defaultdict[str, set[str]] = defaultdict(set)
    for _, tree in source_trees():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            name = node.args[0]
            owner = ast.unparse(node.func.value)
            writes = node.func.attr == "write" and owner.endswith("events")
            if (writes or node.func.attr == "_write_event") and isinstance(name, ast.Constant):
                fields[name.value] |= {k.arg for k in node.keywords if k.arg}
    fields["events_lost"] |= {"count", "reason"}
    return dict(fields)


def test_every_event_and_field_is_documented() -> None:
    page = (DOCS / "events.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*)$", page, re.MULTILINE))
    common = {"v", "event", "time", "rank", "generation"}
    events = used_events()
    assert len(events) >= 10
    assert set(rows) - common == set(events)
    assert common <= set(rows)
    for event, fields in events.items():
        named = set(re.findall(r"`([a-z_0-9]+)`", rows[event]))
        assert fields <= named, f"{event}: {sorted(fields - named)} not documented"


# Examples, links, commands


def test_bytes_of_the_example_on_the_plan_page() -> None:
    """The table of collectives shows a plan of the first job with two replicas."""
    section = (DOCS / "plan.md").read_text(encoding="utf-8").partition("## Collectives")[2]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines()[4:8]]
    shown = {(axis, op, phase): int(found.replace(",", "")) for axis, op, phase, *_, found in cells}
    sizes = ("data.path=text.txt", "data.seq_len=64", "train.steps=10", "train.global_batch=12")
    job = load_job("tiny", [*sizes, "layout.dp_replicate=2", "layout.micro_batch=3", "cluster.device=cpu"])
    plan, _ = build_plan(job)
    assert shown == {(row.axis, row.op, row.phase): row.bytes for row in plan.collectives}


def fenced(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def marked(marker: str) -> list[Any]:
    """TOML blocks whose first line is a comment with a file's name: complete files."""
    blocks = [(p, b) for p in ALL_TEXT for b in fenced(p, "toml") if b.startswith(f"# {marker}\n")]
    return [pytest.param(block, id=f"{id_of(path)}-{n}") for n, (path, block) in enumerate(blocks)]


@pytest.mark.parametrize("block", marked("job.toml"))
def test_complete_jobs_load(block: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(block)
    assert load_job(str(path)).name == "job"


@pytest.mark.parametrize("block", marked("corpus.toml"))
def test_complete_corpora_load(block: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.toml"
    path.write_text(block)
    assert load_corpus_spec(path).sources


def test_there_are_complete_examples() -> None:
    assert len(marked("job.toml")) >= 2
    assert marked("corpus.toml")


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as the site and code hosts make them."""
    text = re.sub(r"^```.*?^```", "", rewrite(path.read_text()), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("path", ALL_TEXT, ids=id_of)
def test_internal_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{target}: no such file"
        if DOCS in path.parents:
            assert DOCS in linked.parents, f"{target} is not part of the site"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_commands_shown_are_commands() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = defaultdict(list)
    for path in ALL_TEXT:
        for block in fenced(path, "(?:sh|bash|console)"):
            for name in re.findall(r"(?:^|\s|/)meshwright ([a-z][a-z-]+)", block):
                shown[name].append(id_of(path))
    assert {"plan", "train", "audit"} <= set(shown)
    assert set(shown) <= known, {name: shown[name] for name in set(shown) - known}


def test_readme_names_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_changelog_has_an_unreleased_section() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "keepachangelog.com" in text
    assert re.search(r"^## \[Unreleased\]\n+### (Added|Changed)\n", text, re.MULTILINE)


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """Built in a copy, so that neither `site/` nor a cache is left in the tree."""
    if not any(find_spec(name) for name in ("importlinter", "mkdocstrings", "zensical")):
        pytest.skip("the dev extra is not installed")  # CI installs it: a part that is missing there fails
    zensical = Path(sys.executable).with_name("zensical")
    assert zensical.exists(), "zensical is part of the dev extra: pip install 'meshwright[dev]'"
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "src").symlink_to(ROOT / "src")
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    build = subprocess.run(
        [zensical, "build", "--clean", "--strict"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    for page in PAGES:
        relative = page.relative_to(DOCS).with_suffix("")
        folder = relative.parent if relative.name == "index" else relative
        assert (tmp_path / "site" / folder / "index.html").is_file(), page.name
    built = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "meshwright.plan.contract.PlanContract" in built, "the reference was not filled in"


if __name__ == "__main__":
    for page in (DOCS / f"{name}.md" for name in GENERATED):
        page.write_text(rewrite(page.read_text()))
