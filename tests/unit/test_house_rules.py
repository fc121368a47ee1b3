"""House rules as tests: lengths, names, docstrings, assert messages, commands, imports without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from meshwright.cli.app import app
from meshwright.spec.legality.table import RULES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "meshwright"
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 600
MOST_FUNCTION_LINES = 100
MOST_ARGUMENTS = 10
COMMANDS = {
    "plan",
    "train",
    "audit",
    "eval",
    "faults",
    "generate",
    "agent",
    "hang",
    "init",
    "prepare",
    "schema",
    "runs",
    "report",
    "bench collectives",
    "bench scaling",
}
COMMANDS |= {f"checkpoint {name}" for name in ("copy", "export", "list", "prune", "verify")} | {
    "schedule collective",
    "schedule pipeline",
    "simulate collective",
    "simulate failures",
    "simulate step",
}
COMMANDS |= {"dry-run", "probe", "prove", "tune", "validate", "wordcount"}
NO_TORCH = ("core", "spec", "schedule", "layout", "plan", "simulate", "validation", "data", "launch")
NO_TORCH += ("audit", "diagnose", "elastic", "report")
CODE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
HEAVY = ("torch", "tokenizers", "transformers", "safetensors", "ray", "pyspark", "mlflow", "wandb")


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_source_files_are_found():
    assert len(MODULES) > 40


def test_no_file_is_too_long():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}, f"{MOST_LINES} lines at most"


def test_no_function_is_too_long():
    lengths = {
        (name_of(path), f.name): (f.end_lineno or 0) - f.lineno + 1
        for path in MODULES
        for f in functions(path)
    }
    assert {name: n for name, n in lengths.items() if n > MOST_FUNCTION_LINES} == {}


def test_no_function_takes_too_many_arguments():
    counts = {
        (name_of(path), f.name): count_arguments(f)
        for path in MODULES
        for f in functions(path)
        if not is_command(f) and not is_kernel(f)
    }
    assert {name: n for name, n in counts.items() if n > MOST_ARGUMENTS} == {}


def count_arguments(function) -> int:
    taken = function.args
    named = (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)
    return len([a for a in named if a.arg not in ("self", "cls")])


def is_command(function) -> bool:
    """A command of the command line. Its arguments are options with names."""
    return any(ast.unparse(d).endswith(".command()") for d in function.decorator_list)


def is_kernel(function) -> bool:
    """A GPU kernel. Its arguments are pointers and sizes, which cannot be grouped in an object."""
    return any(ast.unparse(d) == "triton.jit" for d in function.decorator_list)


def test_every_module_has_a_docstring():
    assert [name_of(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_nothing_calls_print():
    """``cli.output`` decides what goes to standard output."""
    found = [
        (name_of(path), node.lineno)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_nothing_is_pickled():
    """Neither by torch's collectives of objects, nor in a file: reading a pickle runs code."""
    sends = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
    found = [
        (name_of(path), node.lineno)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Attribute) and sends.match(node.attr))
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"pickle", "shelve"})
        or (isinstance(node, ast.ImportFrom) and node.module in ("pickle", "shelve"))
    ]
    assert found == []


def test_every_assert_has_a_message():
    found = [
        (name_of(path), node.lineno)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert found == []


def test_all_is_sorted():
    for path in MODULES:
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                names = ast.literal_eval(node.value)
                assert names == sorted(names), name_of(path)


def test_no_module_is_called_utils():
    names = ("utils", "util", "helpers", "helper", "common", "misc")
    assert [name_of(path) for path in MODULES if path.stem in names] == []


def test_packages_without_torch_do_not_import_it_at_module_level():
    """``launch`` may import it inside a function. The others may not at all (import-linter)."""
    for path in MODULES:
        if path.parts[len(SOURCE.parts)] not in NO_TORCH:
            continue
        names = set()
        for node in parsed(path).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").split(".")[0])
        assert names & set(HEAVY) == set(), name_of(path)


TERMS = {
    "activation checkpointing": "models/activation_checkpointing.py",
    "all-gather": "parallel/fsdp.py",
    "all-reduce": "parallel/ddp.py",
    "autotuning": "models/kernels/gemm_autotune.py",
    "context parallel": "parallel/context.py",
    "data parallel": "parallel/ddp.py",
    "expert parallel": "parallel/expert.py",
    "FSDP": "parallel/fsdp.py",
    "GEMM": "models/kernels/gemm.py",
    "gradient accumulation": "train/trainer.py",
    "gradient checkpointing": "models/activation_checkpointing.py",
    "gradient clipping": "train/amp.py",
    "learning rate schedule": "layout/lr_schedule.py",
    "loss parallel": "parallel/tensor.py",
    "loss scaling": "train/amp.py",
    "master weights": "models/bf16_weights.py",
    "mixed precision": "train/amp.py",
    "offload": "train/optimizer_offload.py",
    "pipeline parallel": "parallel/pipeline/pipeline.py",
    "reduce-scatter": "parallel/fsdp.py",
    "ring attention": "parallel/ring_attention.py",
    "sequence parallel": "parallel/tensor.py",
    "tensor parallel": "parallel/tensor.py",
    "warmup": "layout/lr_schedule.py",
    "ZeRO": "parallel/zero1.py",
}
"""Terms of the field, and the module that a search for each must find."""


@pytest.mark.parametrize("term", TERMS)
def test_a_search_for_a_term_finds_its_module(term):
    assert term.lower() in (SOURCE / TERMS[term]).read_text(encoding="utf-8").lower()


# Unit tests


OTHER_TESTS = {"benchmarks"}
"""Folders of unit tests for something outside the package."""
TESTED_ABOVE = {"runs/faults", "runs/faults/checks"}
"""Packages whose tests are in the folder above, or run whole trainings (tests/faults)."""


def folders_with(pattern: str, root: Path) -> set[str]:
    """Folders below a root with such files, relative to it."""
    return {path.parent.relative_to(root).as_posix() for path in root.rglob(pattern)} - {"."}


def test_unit_tests_mirror_the_packages():
    """A package with code has a folder with tests, and a folder with tests has its package."""
    tested = folders_with("test_*.py", ROOT / "tests" / "unit")
    with_code = {path for path in MODULES if any(isinstance(n, CODE) for n in parsed(path).body)}
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in with_code} - {"."}
    assert packages - tested == TESTED_ABOVE
    assert tested - folders_with("__init__.py", SOURCE) == OTHER_TESTS


# Error codes


def codes_in_source() -> set[str]:
    """String literals passed first to ``Problem(...)``, and the codes of the legality table."""
    found = {rule.code for rule in RULES}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "code")]
                found |= {a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def test_error_codes_have_the_form_area_what():
    found = codes_in_source()
    assert len(found) > 50
    assert [code for code in found if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", code)] == []


def test_every_error_code_is_documented():
    """``core/errors.py`` requires it."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert sorted(code for code in codes_in_source() if code not in page) == []


# The command line


def commands():
    """Every command by name, such as ``plan`` and ``bench scaling``."""
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, holder in groups:
        for command in holder.registered_commands:
            yield prefix + (command.name or command.callback.__name__), command


def test_the_commands_are_the_documented_ones():
    assert {name for name, _ in commands()} == COMMANDS


def test_every_command_takes_json_and_has_help():
    import inspect

    for name, command in commands():
        assert "as_json" in inspect.signature(command.callback).parameters, name
        assert command.callback.__doc__


# Imports


def loaded_by(code: str) -> set[str]:
    """Top-level packages in ``sys.modules`` after running ``code`` in a fresh interpreter."""
    names = "sorted({m.split('.')[0] for m in sys.modules})"
    script = f"{code}\nimport json, sys\nsys.stdout.write(json.dumps({names}))"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_planning_and_every_command_import_no_torch_and_tokenizers():
    """The test imports each module of these layers and of each command."""
    layers = ("core", "spec", "schedule", "plan", "simulate", "explain", "prepare", "launch", "cli")
    wanted = [dotted(p) for p in MODULES if p.parts[len(SOURCE.parts)] in layers]
    assert len(wanted) > 30
    assert loaded_by("\n".join(f"import {name}" for name in wanted)) & set(HEAVY) == set()


def test_help_imports_no_heavy_package():
    """``--help`` imports neither torch nor numpy nor pydantic."""
    loaded = loaded_by("import meshwright.cli.app")
    assert loaded & {*HEAVY, "numpy", "pydantic"} == set()


def test_importing_the_package_configures_nothing():
    """No environment variable, signal or logging handler changes on import."""
    code = (
        "import os, signal, logging\n"
        "before = (dict(os.environ), signal.getsignal(signal.SIGTERM), list(logging.getLogger().handlers))\n"
        "import meshwright.cli.app, meshwright.plan.contract, meshwright.audit.compare\n"
        "after = (dict(os.environ), signal.getsignal(signal.SIGTERM), list(logging.getLogger().handlers))\n"
        "assert before == after, 'something was configured on import'\n"
    )
    loaded_by(code)


# Imports of files that no type checker reads


def names_of_module(module: str) -> set[str]:
    """The names that can be imported from a module, found without importing it."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return set()
    names = {p.stem for p in path.glob("*")} if path.is_dir() else set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")) + sorted(ROOT.glob("tests/gpu/*.py")))
def test_imports_of_benchmarks_and_gpu_tests_exist(path):
    """`make test` does not run them, so a rename would go unnoticed."""
    wrong = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshwright"
        for alias in node.names
        if alias.name not in names_of_module(node.module or "")
    ]
    assert wrong == []
