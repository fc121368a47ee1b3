"""Files of chunks: they are safetensors files, and any part of a full tensor can be read from any of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint_files import TENSORS, manifest_of, save, split_rows
from meshwright.checkpoint.manifest import MANIFEST, encode_checked, read_manifest
from meshwright.checkpoint.tensor_files import CheckpointReader, WriteItem, parse_key, write_tensors
from meshwright.core.errors import UserError
from meshwright.layout.state_chunks import TensorSlice


def test_a_file_of_full_tensors_is_that_of_safetensors(tmp_path):
    """Two dtypes, a scalar, an empty tensor, one that is not contiguous, and names that sort as text."""
    path = save(tmp_path / "c", small_files={"tokenizer.json": b"{}"})
    assert set(read_manifest(path).files) == {"rank-00000.safetensors", "tokenizer.json"}
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs")
    assert (path / "rank-00000.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    loaded = load_file(path / "rank-00000.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_full_tensors_are_read_from_the_chunks_of_all_ranks(tmp_path, ranks):
    saved = CheckpointReader(save(tmp_path, ranks), prefer=ranks - 1)
    assert sorted(saved.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(saved.read(name), tensor)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_is_read_from_any_chunks(tmp_path_factory, data):
    """The chunks are boxes of a random grid, in random files; also columns are cut."""
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    tensor = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    boxes = [
        TensorSlice((top, left), (bottom - top, right - left))
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False)
        for left, right in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    folder = tmp_path_factory.mktemp("c")
    parts = [WriteItem("w", tensor_slice, shape, tensor[tensor_slice.index]) for tensor_slice in boxes]
    files = {
        f"rank-{number:05d}.safetensors": write_tensors(
            folder / f"rank-{number:05d}.safetensors", parts[number::2], lambda *_: None
        )
        for number in range(2)
    }
    content = asdict(replace(manifest_of({"w": tensor}), files=files))
    (folder / MANIFEST).write_bytes(encode_checked(content))
    first = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - start)) for n, start in zip(shape, first, strict=True)]
    tensor_slice = TensorSlice(tuple(first), tuple(size))
    assert torch.equal(
        CheckpointReader(folder, prefer=data.draw(st.integers(0, 3))).read("w", tensor_slice),
        tensor[tensor_slice.index],
    )


def test_a_rank_that_finds_all_it_needs_in_its_own_file_opens_no_other(tmp_path):
    path = save(tmp_path, ranks=3)
    (path / "rank-00000.safetensors").unlink()  # read_manifest would refuse it
    manifest = manifest_of(world_size=3)
    manifest = replace(manifest, files=dict.fromkeys(f"rank-0000{n}.safetensors" for n in range(3)))
    saved = CheckpointReader(path, manifest, prefer=2)
    (part,) = [part for part in split_rows(TENSORS, 2, 3) if part.name == "low"]
    assert torch.equal(saved.read("low", part.tensor_slice), part.values)


def test_missing_elements_are_named(tmp_path):
    """A shard that is dropped silently must not become zeros (Megatron-LM#4378)."""
    path = save(tmp_path, ranks=3)
    content = json.loads((path / MANIFEST).read_bytes())
    del content["files"]["rank-00001.safetensors"]
    (path / MANIFEST).write_bytes(encode_checked(content))
    with pytest.raises(UserError, match="lacks 1 of the 3 elements of low") as caught:
        CheckpointReader(path).read("low")
    assert caught.value.problems[0].code == "checkpoint-broken"


def test_another_shape_and_an_unknown_name_are_refused(tmp_path):
    saved = CheckpointReader(save(tmp_path))
    with pytest.raises(UserError, match=r" low .*\[checkpoint-broken\]"):
        saved.read("low", TensorSlice((2,), (2,)))
    with pytest.raises(UserError, match=r"head\.weight.*\[checkpoint-broken\]"):
        saved.read("head.weight")


@pytest.mark.parametrize("key", ["w@1", "w@1,2,3", "w@-1,0", "w@x,0", "w@"])
def test_keys_that_do_not_fit_their_shape_are_refused(key):
    if key == "w@":
        assert parse_key(key, (2, 3)) == ("w", TensorSlice((0, 0), (2, 3)))
        return
    with pytest.raises(ValueError):  # noqa: PT011
        parse_key(key, (2, 3))
