"""Image data: the synthetic set, folders of arrays, the split, and an error code per invalid folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.images import ImageShape, check_images, looks_like_images, open_images, select_held_out
from meshwright.spec.job import SYNTHETIC_IMAGES

SHAPE = ImageShape(channels=3, side=8, classes=5)


def write_images(path: Path, images: object, labels: object, prefix: str = "") -> Path:
    """Write images and labels to a folder."""
    path.mkdir(exist_ok=True)
    np.save(path / f"{prefix}images.npy", images)
    np.save(path / f"{prefix}labels.npy", labels)
    return path


def codes(folder: Path, eval_fraction: float | None = None) -> list[str]:
    """The error codes of an invalid folder."""
    with pytest.raises(UserError) as caught:
        check_images(folder, SHAPE, eval_fraction)
    return [p.code for p in caught.value.problems]


def test_synthetic_image_depends_on_its_index_only():
    """Reading images together or alone gives the same values. The splits differ, and all classes occur."""
    train = open_images(SYNTHETIC_IMAGES, "train", SHAPE, None)
    held_out = open_images(SYNTHETIC_IMAGES, "eval", SHAPE, None)
    images, labels = train.read([0, 7, 4095])
    assert images.shape == (3, 3, 8, 8)
    assert images.dtype == np.float32
    alone, label = train.read([7])
    assert (alone[0] == images[1]).all()
    assert label[0] == labels[1]
    assert not (held_out.read([7])[0] == alone).all()
    assert (len(train), len(held_out), train.count_targets([1, 2, 3])) == (4096, 512, 3)
    everything = train.read(np.arange(500))
    assert set(everything[1].tolist()) == set(range(5))
    assert np.abs(everything[0]).max() <= 1.0
    with pytest.raises(IndexError, match="4096"):
        train.read([4096])


def test_synthetic_classes_are_distinguishable():
    """Each class has more power at its own frequency than the other class."""
    shape = ImageShape(1, 32, 2)
    images, labels = open_images(SYNTHETIC_IMAGES, "train", shape, None).read(np.arange(200))
    power = np.abs(np.fft.fft2(images[:, 0]))
    along = power[:, 0, 2]  # class 0: two waves along the width
    assert along[labels == 0].mean() > 5 * along[labels == 1].mean()


@pytest.mark.parametrize("last", [False, True])
def test_uint8_images_are_normalized_and_channels_first(tmp_path, last):
    """0 and 255 become -1 and 1 in either order of dimensions. Labels stay with their images in the split."""
    images = np.zeros((30, 3, 8, 8), dtype=np.uint8)
    images[:, 0] = np.arange(30)[:, None, None]
    images[:, 1] = 255
    stored = images.transpose(0, 2, 3, 1) if last else images
    folder = write_images(tmp_path / "photos", stored, np.arange(30) % 5)
    check_images(folder, SHAPE, 0.3)
    seen = []
    for split in ("train", "eval"):
        data = open_images(str(folder), split, SHAPE, 0.3)
        pixels, labels = data.read(np.arange(len(data)))
        assert pixels.shape[1:] == (3, 8, 8)
        assert (pixels[:, 1] == 1).all()
        assert (pixels[:, 2] == -1).all()
        numbers = np.rint(pixels[:, 0, 0, 0] * 127.5 + 127.5).astype(int)
        assert (labels == numbers % 5).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(30)), "every image is in one split"


def test_float_images_are_unchanged_and_eval_files_are_used(tmp_path):
    values = np.linspace(-3, 3, 2 * 192, dtype=np.float32).reshape(2, 3, 8, 8)
    folder = write_images(tmp_path / "photos", values, [0, 1])
    write_images(folder, values[:1] + 1, [4], "eval_")
    check_images(folder, SHAPE, None)
    train, held_out = (open_images(str(folder), split, SHAPE, None) for split in ("train", "eval"))
    assert (train.read([0, 1])[0] == values).all()
    assert held_out.read([0])[1].tolist() == [4]
    assert codes(folder, 0.5) == ["data-already-split"]


@given(st.integers(2, 300), st.floats(0.001, 0.5))
def test_split_is_never_empty_and_stable_under_appending(count, fraction):
    """At most one image moves, and only where a split would be empty."""
    held_out = select_held_out(count, fraction)
    assert 0 < held_out.sum() < count
    longer = select_held_out(count + 50, fraction)
    moved = (longer[:count] != held_out).sum()
    assert moved <= 1
    assert moved == 0 or held_out.sum() in (1, count - 1)


def test_sha256_depends_on_images_and_labels(tmp_path):
    images, labels = np.zeros((9, 3, 8, 8), np.uint8), np.zeros(9, np.int64)
    first = open_images(str(write_images(tmp_path / "a", images, labels)), "train", SHAPE, None).sha256
    again = open_images(str(write_images(tmp_path / "b", images, labels)), "train", SHAPE, None).sha256
    labels[3] = 1
    other = open_images(str(write_images(tmp_path / "c", images, labels)), "train", SHAPE, None).sha256
    images[4] = 1
    another = open_images(str(write_images(tmp_path / "d", images, labels)), "train", SHAPE, None).sha256
    assert first == again
    assert len({first, other, another}) == 3


VALID_IMAGES, VALID_LABELS = np.zeros((4, 3, 8, 8), np.uint8), np.arange(4)


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (VALID_IMAGES.astype(np.float64), VALID_LABELS, ["data-images-dtype"]),
        (np.zeros((4, 1, 8, 8), np.uint8), VALID_LABELS, ["data-images-shape"]),
        (np.zeros((4, 9, 9, 3), np.uint8), VALID_LABELS, ["data-images-shape"]),
        (VALID_IMAGES, VALID_LABELS[:3], ["data-images-count"]),
        (VALID_IMAGES[:0], VALID_LABELS[:0], ["data-images-count"]),
        (VALID_IMAGES, VALID_LABELS + 2, ["data-labels-range"]),
        (VALID_IMAGES, VALID_LABELS - 1, ["data-labels-range"]),
        (VALID_IMAGES, VALID_LABELS.astype(float), ["data-labels-dtype"]),
        (VALID_IMAGES, VALID_LABELS[:, None], ["data-labels-dtype"]),
        (np.array(3), np.array(3), ["data-images-dtype", "data-images-shape", "data-labels-dtype"]),
        (np.full((4, 3, 8, 8), np.nan, np.float32), VALID_LABELS, ["data-images-not-finite"]),
    ],
)
def test_invalid_arrays_are_refused(tmp_path, images, labels, expected):
    assert codes(write_images(tmp_path / "photos", images, labels)) == expected


def test_missing_and_unreadable_files_are_refused(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    assert not looks_like_images(folder)
    assert codes(folder) == ["data-images-missing"] * 2
    write_images(folder, VALID_IMAGES, VALID_LABELS)
    assert looks_like_images(folder)
    (folder / "labels.npy").write_text("not an array")
    assert codes(folder) == ["data-images-unreadable"]
    write_images(folder, VALID_IMAGES, VALID_LABELS)
    np.save(folder / "eval_images.npy", VALID_IMAGES)
    assert codes(folder) == ["data-images-missing"], "eval images without eval labels"
    np.save(folder / "labels.npy", np.array([None] * 4), allow_pickle=True)
    assert "data-images-unreadable" in codes(folder)
