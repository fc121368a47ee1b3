"""Labelled images: a folder with two arrays, or generated synthetic images.

A folder has ``images.npy`` (N x C x H x W or N x H x W x C, uint8 or float32) and ``labels.npy`` (N
integers), which are memory-mapped. The eval split is ``eval_images.npy`` and ``eval_labels.npy`` if they
exist, otherwise selected by a hash of the image number, so that appended images do not move earlier ones
between splits.

Images are returned as float32, channels first. Bytes 0 to 255 become -1 to 1; float32 images are expected to
be normalised already.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.data.splitmix import GOLDEN, Uint64s, mix
from meshwright.spec.job import SYNTHETIC_IMAGES
from meshwright.spec.model import ResNetModel

SYNTHETIC_SAMPLES = {"train": 4096, "eval": 512}
DEFAULT_EVAL_FRACTION = 0.01
IMAGES, LABELS = "images.npy", "labels.npy"

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

_HALF_BYTE = np.float32(127.5)
_CHECKED_AT_ONCE = 2**24
"""Pixels of float32 images that are checked at once."""
_NOISE_STARTS = 2**20
"""Possible offsets of an image's noise."""
_SAMPLED_IMAGES = 64
"""Images that are hashed for a folder's identity."""


@dataclass(frozen=True)
class ImageShape:
    """Shape of the images, and number of classes."""

    channels: int
    side: int
    classes: int

    @property
    def pixels(self) -> int:
        """Values per image."""
        return self.channels * self.side**2


def image_shape(model: ResNetModel) -> ImageShape:
    """The images that a model reads."""
    return ImageShape(model.channels, model.image_size, model.num_classes)


class SyntheticImages:
    """Waves with noise; the class sets direction, length and colour. An image is a function of its number.

    The noise of an image is a slice of one long array, so that generation keeps up with a fast device.
    """

    sha256 = hashlib.sha256(b"meshwright synthetic images 2").hexdigest()

    def __init__(self, split: str, shape: ImageShape) -> None:
        self.shape = shape
        drawn = _draw(np.arange(_NOISE_STARTS + shape.pixels, dtype=np.uint64))
        self._noise: Float32s = (_unit(drawn) - 0.5).astype(np.float32)
        self._first = 0 if split == "train" else SYNTHETIC_SAMPLES["train"]
        self.shard_sample_counts = (SYNTHETIC_SAMPLES[split],)

    def __len__(self) -> int:
        return self.shard_sample_counts[0]

    def read(self, indices: npt.ArrayLike) -> tuple[Float32s, Int64s]:
        """Images (n, channels, side, side) and labels (n)."""
        numbers: Uint64s = (_checked(indices, len(self)) + self._first).astype(np.uint64)
        shape = self.shape
        drawn = _draw(numbers)
        labels = (drawn % np.uint64(shape.classes)).astype(np.int64)
        phase = _unit(mix(drawn)) * 2 * np.pi
        angle = np.pi * labels / shape.classes
        waves = (2 + labels % 3)[:, None]
        steps = np.arange(shape.side) * (2 * np.pi / shape.side)
        along = waves * np.cos(angle)[:, None] * steps
        across = waves * np.sin(angle)[:, None] * steps + phase[:, None]
        # sin(a + b) as two outer products: a sine per row and column instead of per pixel.
        wave = _outer(np.cos(across), np.sin(along)) + _outer(np.sin(across), np.cos(along))
        colours = 0.25 + 0.25 * np.cos(angle[:, None] * 2 + np.arange(shape.channels))
        images: Float32s = colours.astype(np.float32)[:, :, None, None] * wave[:, None]
        for index, start in enumerate(mix(drawn + GOLDEN) % np.uint64(_NOISE_STARTS)):
            images[index] += self._noise[int(start) :][: shape.pixels].reshape(images[index].shape)
        return images, labels

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """Number of labels: one per image."""
        return int(np.size(np.asarray(indices)))


class StoredImages:
    """One split of a folder."""

    def __init__(self, folder: Path, split: str, shape: ImageShape, eval_fraction: float | None) -> None:
        """Map the arrays; :func:`check_images` checks them before."""
        self.shape = shape
        own_split = (folder / f"eval_{IMAGES}").exists()
        prefix = "eval_" if own_split and split == "eval" else ""
        self._images = _map(folder / f"{prefix}{IMAGES}")
        labels: npt.NDArray[Any] = _map(folder / f"{prefix}{LABELS}")
        self._labels: Int64s = np.asarray(labels, dtype=np.int64)
        self._last = self._images.shape[1:] != (shape.channels, shape.side, shape.side)
        self._numbers: Int64s = np.arange(len(self._labels))
        if not own_split:
            held_out = select_held_out(len(self._labels), eval_fraction or DEFAULT_EVAL_FRACTION)
            self._numbers = self._numbers[held_out if split == "eval" else ~held_out]
        self.shard_sample_counts = (len(self._numbers),)

    def __len__(self) -> int:
        return self.shard_sample_counts[0]

    def read(self, indices: npt.ArrayLike) -> tuple[Float32s, Int64s]:
        """Images (n, channels, side, side) and labels (n)."""
        numbers = self._numbers[_checked(indices, len(self))]
        raw = self._images[numbers]
        if self._last:
            raw = raw.transpose(0, 3, 1, 2)
        images = np.ascontiguousarray(raw, dtype=np.float32)
        if raw.dtype == np.uint8:
            images = (images - _HALF_BYTE) / _HALF_BYTE
        return images, self._labels[numbers]

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """Number of labels: one per image."""
        return int(np.size(np.asarray(indices)))

    @property
    def sha256(self) -> str:
        """Identity of the split: shape, dtype, image numbers, all labels, and the bytes of 64 images."""
        digest = hashlib.sha256(f"{self._images.shape} {self._images.dtype}".encode())
        digest.update(self._numbers.astype("<i8").tobytes())
        digest.update(self._labels.astype("<i8").tobytes())
        for number in np.linspace(0, len(self._images) - 1, _SAMPLED_IMAGES).astype(np.int64):
            digest.update(np.ascontiguousarray(self._images[number]).tobytes())
        return digest.hexdigest()


ImageDataset = SyntheticImages | StoredImages


def open_images(path: str, split: str, shape: ImageShape, eval_fraction: float | None) -> ImageDataset:
    """The images of one split."""
    if path == SYNTHETIC_IMAGES:
        return SyntheticImages(split, shape)
    return StoredImages(Path(path), split, shape, eval_fraction)


def select_held_out(count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """The held-out images: those whose hash is below the fraction.

    With at least two images no split is empty: the image with the nearest hash changes sides.
    """
    drawn = _unit(_draw(np.arange(count, dtype=np.uint64)))
    held_out = drawn < fraction
    if count > 1 and not held_out.any():
        held_out[drawn.argmin()] = True
    if count > 1 and held_out.all():
        held_out[drawn.argmax()] = False
    return held_out


def has_eval_split(path: str) -> bool:
    """Whether the held-out images are given: synthetic ones, and those of ``eval_images.npy``."""
    return path == SYNTHETIC_IMAGES or (Path(path) / f"eval_{IMAGES}").exists()


def looks_like_images(folder: Path) -> bool:
    """Whether a folder has image arrays."""
    return (folder / IMAGES).is_file()


def check_images(
    folder: Path, shape: ImageShape, eval_fraction: float | None, eval_only: bool = False
) -> None:
    """Check that the model can read a folder; float32 images are checked for NaN.

    Args:
        folder: Folder of the arrays.
        shape: Shape of the model's images.
        eval_fraction: Of the job.
        eval_only: Whether only the held-out images are read.

    Raises:
        UserError: With all problems.
    """
    given = [name for name in (f"eval_{IMAGES}", f"eval_{LABELS}") if (folder / name).exists()]
    prefixes = ["eval_"] if given and eval_only else ["", "eval_"] if given else [""]
    if given and eval_fraction is not None:
        rule = f"has no effect: {folder} has {given[0]}"
        fix, value = "Leave data.eval_fraction out", eval_fraction
        raise UserError(Problem("data-already-split", rule, path="data.eval_fraction", value=value, fix=fix))
    problems = [p for prefix in prefixes for p in _find_problems(folder, prefix, shape)]
    if problems:
        raise UserError(*problems)


def _find_problems(folder: Path, prefix: str, shape: ImageShape) -> list[Problem]:
    images_path, labels_path = folder / f"{prefix}{IMAGES}", folder / f"{prefix}{LABELS}"
    opened: list[npt.NDArray[Any]] = []
    problems: list[Problem] = []
    for path in (images_path, labels_path):
        try:
            opened.append(_map(path))
        except FileNotFoundError:
            fix = f"A folder of images has {IMAGES} and {LABELS}, and both or neither of eval_*"
            problems.append(Problem("data-images-missing", "does not exist", path=str(path), fix=fix))
        except (OSError, ValueError) as error:
            fix = "Write it with numpy.save, without objects"
            rule = f"is not an array that can be read: {error}"
            problems.append(Problem("data-images-unreadable", rule, path=str(path), fix=fix))
    if problems:
        return problems
    images, labels = opened
    problems = _check_array(images_path, images, shape) + _check_labels(labels_path, labels, shape)
    if problems:  # counts are checked for valid arrays only
        return problems
    if len(images) != len(labels):
        rule = f"has {len(images)} images, and {labels_path.name} has {len(labels)} labels"
        problems.append(
            Problem("data-images-count", rule, path=str(images_path), fix="Use one label per image")
        )
    elif not len(labels):
        rule = "has no images"
        problems.append(Problem("data-images-count", rule, path=str(images_path), fix="Add images"))
    if not problems and images.dtype == np.float32:
        problems += _check_finite(images_path, images)
    return problems


def _check_array(path: Path, images: npt.NDArray[Any], shape: ImageShape) -> list[Problem]:
    problems = []
    if images.dtype not in (np.uint8, np.float32):
        rule = f"has {images.dtype}; images are uint8, or normalised float32"
        problems.append(Problem("data-images-dtype", rule, path=str(path), fix="Convert it with astype"))
    channels, side = shape.channels, shape.side
    if images.shape[1:] not in ((channels, side, side), (side, side, channels)):
        rule = f"has images of {images.shape[1:]}; the model reads ({channels}, {side}, {side}) or "
        rule += f"({side}, {side}, {channels}): model.channels={channels}, model.image_size={side}"
        fix = "Set model.channels and model.image_size to those of the images, or resize them"
        problems.append(Problem("data-images-shape", rule, path=str(path), fix=fix))
    return problems


def _check_labels(path: Path, labels: npt.NDArray[Any], shape: ImageShape) -> list[Problem]:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        rule = f"has {labels.dtype} of shape {labels.shape}; labels are a 1-D array of integers"
        return [Problem("data-labels-dtype", rule, path=str(path), fix="Use one class number per image")]
    if not len(labels):
        return []
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= shape.classes:
        rule = f"has labels {low} to {high}; model.num_classes={shape.classes} are numbered from 0"
        fix = f"Use model.num_classes={high + 1} or more" if low >= 0 else "Number the classes from 0"
        return [Problem("data-labels-range", rule, path=str(path), fix=fix)]
    return []


def _check_finite(path: Path, images: npt.NDArray[Any]) -> list[Problem]:
    """Check float32 images in chunks."""
    step = max(1, _CHECKED_AT_ONCE // max(1, images[0].size))
    for start in range(0, len(images), step):
        piece = images[start : start + step]
        fine = np.isfinite(piece).reshape(len(piece), -1).all(axis=1)
        if not fine.all():
            number = start + int(np.argmin(fine))
            rule = f"has a value that is not finite in image {number}"
            fix = "Remove the image, or replace the value"
            return [Problem("data-images-not-finite", rule, path=str(path), fix=fix)]
    return []


def _map(path: Path) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _checked(indices: npt.ArrayLike, count: int) -> Int64s:
    wanted: Int64s = np.asarray(indices, dtype=np.int64).reshape(-1)
    if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < count:
        raise IndexError(f"images {wanted.min()} to {wanted.max()} of {count}")
    return wanted


def _outer(rows: npt.NDArray[np.float64], columns: npt.NDArray[np.float64]) -> Float32s:
    """The outer product of rows and columns, per image."""
    outer: Float32s = rows.astype(np.float32)[:, :, None] * columns.astype(np.float32)[:, None]
    return outer


def _draw(numbers: Uint64s) -> Uint64s:
    """64 random bits per number (SplitMix64)."""
    return mix((numbers + np.uint64(1)) * GOLDEN)


def _unit(drawn: Uint64s) -> npt.NDArray[np.float64]:
    """The upper 53 of 64 random bits, as a float64 from 0 to 1."""
    return (drawn >> np.uint64(11)).astype(np.float64) / 2.0**53
