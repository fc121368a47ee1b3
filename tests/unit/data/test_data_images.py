"""Images: the synthetic set, folders of arrays, the split, and every way in which a folder can be wrong."""

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


def folder_of(path: Path, images: object, labels: object, prefix: str = "") -> Path:
    path.mkdir(exist_ok=True)
    np.save(path / f"{prefix}images.npy", images)
    np.save(path / f"{prefix}labels.npy", labels)
    return path


def codes(folder: Path, eval_fraction: float | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_images(folder, SHAPE, eval_fraction)
    return [p.code for p in caught.value.problems]


def test_synthetic_images_are_a_function_of_their_number_alone():
    """Read together, alone, or again: the same values; train and eval differ; classes occur."""
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


def test_classes_of_synthetic_images_can_be_told_apart():
    """Power along the class's own wave is larger than along another's: there is something to learn."""
    shape = ImageShape(1, 32, 2)
    images, labels = open_images(SYNTHETIC_IMAGES, "train", shape, None).read(np.arange(200))
    power = np.abs(np.fft.fft2(images[:, 0]))
    along = power[:, 0, 2]  # class 0: two waves along the width
    assert along[labels == 0].mean() > 5 * along[labels == 1].mean()


@pytest.mark.parametrize("last", [False, True])
def test_bytes_are_normalised_and_channels_come_first(tmp_path, last):
    """0 and 255 become -1 and 1 in either order of dims; labels follow their images through the split."""
    images = np.zeros((30, 3, 8, 8), dtype=np.uint8)
    images[:, 0] = np.arange(30)[:, None, None]
    images[:, 1] = 255
    stored = images.transpose(0, 2, 3, 1) if last else images
    folder = folder_of(tmp_path / "photos", stored, np.arange(30) % 5)
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


def test_float_images_are_passed_on_and_own_evaluation_files_are_used(tmp_path):
    values = np.linspace(-3, 3, 2 * 192, dtype=np.float32).reshape(2, 3, 8, 8)
    folder = folder_of(tmp_path / "photos", values, [0, 1])
    folder_of(folder, values[:1] + 1, [4], "eval_")
    check_images(folder, SHAPE, None)
    train, held_out = (open_images(str(folder), split, SHAPE, None) for split in ("train", "eval"))
    assert (train.read([0, 1])[0] == values).all()
    assert held_out.read([0])[1].tolist() == [4]
    assert codes(folder, 0.5) == ["data-already-split"]


@given(st.integers(2, 300), st.floats(0.001, 0.5))
def test_neither_split_is_empty_and_appending_moves_nothing(count, fraction):
    """Only the rule that fills an empty side may look at the other images."""
    held_out = select_held_out(count, fraction)
    assert 0 < held_out.sum() < count
    longer = select_held_out(count + 50, fraction)
    moved = (longer[:count] != held_out).sum()
    assert moved <= 1
    assert moved == 0 or held_out.sum() in (1, count - 1)


def test_identity_changes_with_the_data(tmp_path):
    images, labels = np.zeros((9, 3, 8, 8), np.uint8), np.zeros(9, np.int64)
    first = open_images(str(folder_of(tmp_path / "a", images, labels)), "train", SHAPE, None).sha256
    again = open_images(str(folder_of(tmp_path / "b", images, labels)), "train", SHAPE, None).sha256
    labels[3] = 1
    other = open_images(str(folder_of(tmp_path / "c", images, labels)), "train", SHAPE, None).sha256
    images[4] = 1
    another = open_images(str(folder_of(tmp_path / "d", images, labels)), "train", SHAPE, None).sha256
    assert first == again
    assert len({first, other, another}) == 3


GOOD_IMAGES, GOOD_LABELS = np.zeros((4, 3, 8, 8), np.uint8), np.arange(4)


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (GOOD_IMAGES.astype(np.float64), GOOD_LABELS, ["data-images-dtype"]),
        (np.zeros((4, 1, 8, 8), np.uint8), GOOD_LABELS, ["data-images-shape"]),
        (np.zeros((4, 9, 9, 3), np.uint8), GOOD_LABELS, ["data-images-shape"]),
        (GOOD_IMAGES, GOOD_LABELS[:3], ["data-images-count"]),
        (GOOD_IMAGES[:0], GOOD_LABELS[:0], ["data-images-count"]),
        (GOOD_IMAGES, GOOD_LABELS + 2, ["data-labels-range"]),
        (GOOD_IMAGES, GOOD_LABELS - 1, ["data-labels-range"]),
        (GOOD_IMAGES, GOOD_LABELS.astype(float), ["data-labels-dtype"]),
        (GOOD_IMAGES, GOOD_LABELS[:, None], ["data-labels-dtype"]),
        (np.array(3), np.array(3), ["data-images-dtype", "data-images-shape", "data-labels-dtype"]),
        (np.full((4, 3, 8, 8), np.nan, np.float32), GOOD_LABELS, ["data-images-not-finite"]),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path, images, labels, expected):
    assert codes(folder_of(tmp_path / "photos", images, labels)) == expected


def test_missing_and_unreadable_files_are_named(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    assert not looks_like_images(folder)
    assert codes(folder) == ["data-images-missing"] * 2
    folder_of(folder, GOOD_IMAGES, GOOD_LABELS)
    assert looks_like_images(folder)
    (folder / "labels.npy").write_text("not an array")
    assert codes(folder) == ["data-images-unreadable"]
    folder_of(folder, GOOD_IMAGES, GOOD_LABELS)
    np.save(folder / "eval_images.npy", GOOD_IMAGES)
    assert codes(folder) == ["data-images-missing"], "half an evaluation set"
    np.save(folder / "labels.npy", np.array([None] * 4), allow_pickle=True)
    assert "data-images-unreadable" in codes(folder)
