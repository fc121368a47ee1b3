"""Finds the weights of a Hugging Face folder and checks their headers, before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.hf.names import (
    HEAD,
    bare_name,
    full_name,
    is_buffer,
    list_hf_locations,
    list_hf_shapes,
)
from meshwright.core.errors import Problem, UserError
from meshwright.core.tensor_header import TensorInfo, read_tensor_header
from meshwright.spec.hf_config import INDEX_FILE, WEIGHTS_FILE, find_weights_file
from meshwright.spec.model import DecoderModel

DTYPES = ("F32", "BF16", "F16")
MOST_NAMED = 10
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str
    """Its name in the file."""
    facts: TensorInfo


@dataclass(frozen=True)
class HfWeights:
    """The complete weights of a model."""

    tensors: dict[str, StoredTensor]
    """By full Hugging Face name."""

    @property
    def files(self) -> list[Path]:
        """The files, without duplicates."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.facts.bytes for tensor in self.tensors.values())


def find_weights(folder: Path, model: DecoderModel) -> HfWeights | None:
    """The weights of a folder, complete and of the right shapes; None if it holds only a config.

    Raises:
        UserError: They are incomplete, of another model, or not safetensors.
    """
    files = _list_files(folder)
    if files is None:
        return None
    found: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            header = read_tensor_header(file)
        except FileNotFoundError:
            rule = f"is named in {INDEX_FILE}, but not there"
            problems.append(_broken(file, rule, "Download the folder again"))
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(_broken(file, f"cannot be used: {reason}", "Download it again"))
            continue
        for name, facts in header.items():
            full = full_name(name, model)
            if full in found:
                rule = f"holds {name}, which {found[full].file.name} holds too"
                problems.append(_broken(file, rule, "Keep one of them"))
            found[full] = StoredTensor(file, name, facts)
    if problems:  # the tensors of a missing shard would only be listed again
        raise UserError(*problems)
    return _fit(folder, found, model)


def require_weights(model: DecoderModel) -> HfWeights:
    """The weights of the folder of a model, which must have them."""
    assert model.hf is not None, "called for models with a folder"
    found = find_weights(Path(model.hf), model)
    if found is None:
        rule, fix = f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}", "Download the whole folder"
        raise UserError(_broken(Path(model.hf), rule, fix))
    return found


def _list_files(folder: Path) -> list[Path] | None:
    """The files with weights; None if there are none."""
    first = find_weights_file(folder)
    if first is not None:
        return _read_index(first) if first.name == INDEX_FILE else [first]
    if other := sorted(p.name for p in folder.glob("*.safetensors")):
        rule = f"holds {_name(other)}, but neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        raise UserError(
            _broken(folder, rule, "Download the whole folder, or remove them to train from scratch")
        )
    if pickles := sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern)):
        rule = f"holds weights as pickles, which can run code when they are read: {_name(pickles)}"
        fix = "Convert them: in transformers, from_pretrained(folder).save_pretrained(folder)"
        raise UserError(Problem("model-hf-pickle", rule, path=str(folder), fix=fix))
    return None


def _read_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(_broken(index, "is not a valid index", "Download it again")) from None
    bad = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
    if bad or not names:
        rule = f"names shards outside of its folder: {_name(bad)}" if bad else "names no shards"
        raise UserError(_broken(index, rule, "Download it again"))
    return [index.parent / name for name in sorted(names)]


def _fit(folder: Path, found: dict[str, StoredTensor], model: DecoderModel) -> HfWeights:
    """Compare the tensors with those that the model needs; every difference is listed."""
    needed = list_hf_shapes(model)
    found = {name: tensor for name, tensor in found.items() if not is_buffer(name)}
    embedding = list_hf_locations(model)["embed.weight"].name
    if model.tied_embeddings and HEAD in found:  # saved under both names, or under the other one
        head = found.pop(HEAD)
        found.setdefault(embedding, head)
    problems = []
    if missing := needed.keys() - found.keys():
        if any(
            tensor.name == bare_name(name, model) != name for name, tensor in found.items() if name in needed
        ):
            missing = {bare_name(name, model) for name in missing}  # named like the others in the file
        rule = f"lacks {len(missing)} of the model's {len(needed)} tensors: {_name(missing)}"
        problems.append(Problem("model-hf-weights-missing", rule, path=str(folder)))
    if extra := found.keys() - needed.keys():
        names = _name([found[name].name for name in extra])
        rule = f"holds {len(extra)} tensors that the model does not have: {names}"
        fix = "Does its config.json belong to these weights?"
        problems.append(Problem("model-hf-weights-extra", rule, path=str(folder), fix=fix))
    both = sorted(needed.keys() & found.keys())
    shapes = [
        f"{found[name].name} is {_times(found[name].facts.shape)}, not {_times(needed[name])}"
        for name in both
        if found[name].facts.shape != needed[name]
    ]
    if shapes:
        rule = f"holds {len(shapes)} tensors whose shape does not match the config: {_name(shapes, '; ')}"
        problems.append(Problem("model-hf-weights-shape", rule, path=str(folder)))
    stored = [found[name] for name in both]
    types = [
        f"{tensor.name} is {tensor.facts.dtype}" for tensor in stored if tensor.facts.dtype not in DTYPES
    ]
    if types:
        rule = f"holds {len(types)} tensors that are not {', '.join(DTYPES)}: {_name(types)}"
        fix = "Quantised weights cannot be trained: use the original weights"
        problems.append(Problem("model-hf-weights-dtype", rule, path=str(folder), fix=fix))
    if problems:
        raise UserError(*problems)
    return HfWeights(found)


def _name(names: Collection[str], separator: str = ", ") -> str:
    """The first ten, and how many more."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return separator.join(sorted(names)[:MOST_NAMED]) + more


def _times(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _broken(path: Path, rule: str, fix: str) -> Problem:
    return Problem("model-hf-weights-broken", rule, path=str(path), fix=fix)
