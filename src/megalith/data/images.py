"""Images with a class each: scikit-learn's digits, Fashion-MNIST, and folders of IDX files.

A sample is ``{"image": float32 [channels, height, width], "target": int64 scalar}``; the image is
normalised with the training split's mean and standard deviation. Where a source has no test set,
an image's own hash decides its split, so that no image is in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from megalith.core import imports
from megalith.core.errors import DataError
from megalith.data import Splits
from megalith.data.idx import Labelled, find, read_labelled
from megalith.recipe.schema import ImageData

_FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist


def load_images(section: ImageData) -> Splits:
    """The splits that ``section`` names; all images are in memory, one byte a pixel.

    ``facts`` are ``classes`` and ``channels``.

    Raises:
        DataError: a file is missing or is not what its name says.
        MissingExtra: ``digits`` without scikit-learn.
    """
    train, validation, origin = _read(section)
    classes = int(train.labels.max()) + 1
    if int(validation.labels.max()) >= classes:
        raise DataError(
            f"data.source = {section.source}: the validation split has label "
            f"{int(validation.labels.max())}, the training split only 0 to {classes - 1}"
        )
    mean, std = _statistics(train.images)
    kind = Images if section.augment == "none" else AugmentedImages
    options = {"flip": True} if section.augment == "shift-flip" else {}
    height, width = train.images.shape[1:]
    return Splits(
        train=kind(train.images, train.labels, mean, std, **options),
        validation=Images(validation.images, validation.labels, mean, std),
        facts={"classes": classes, "channels": 1},
        fingerprint=_fingerprint(section, train, validation),
        description={
            "source": origin,
            "train": f"{len(train.labels):,} images",
            "validation": f"{len(validation.labels):,} images",
            "image": f"1 x {height} x {width}",
            "classes": classes,
            "mean": round(mean, 4),
            "std": round(std, 4),
            "augment": section.augment,
        },
    )


class Images(Dataset[dict[str, Tensor]]):
    """Grey images in memory.

    Args:
        images: uint8 ``[n, height, width]``.
        labels: integers ``[n]``.
        mean, std: of the pixels' values, subtracted and divided by.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, std: float) -> None:
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = (self.images[index].float() - self.mean) / self.std
        return {"image": image.unsqueeze(0), "target": self.labels[index]}


class AugmentedImages(Images):
    """Images whose samples can be shifted at random, and mirrored where ``flip`` is set."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: float,
        std: float,
        flip: bool = False,
    ) -> None:
        super().__init__(images, labels, mean, std)
        self.flip = flip

    def augment(self, sample: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """``sample`` shifted by up to an eighth of its size each way, at least one pixel.

        What comes in at the edge is black. Every draw is from ``generator``.
        """
        image = sample["image"]
        height, width = image.shape[-2:]
        down, right = max(1, height // 8), max(1, width // 8)
        black = (0.0 - self.mean) / self.std
        padded = F.pad(image, (right, right, down, down), value=black)
        top = int(torch.randint(2 * down + 1, (), generator=generator))
        left = int(torch.randint(2 * right + 1, (), generator=generator))
        image = padded[..., top : top + height, left : left + width]
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = image.flip(-1)
        return {**sample, "image": image.contiguous()}


def _read(section: ImageData) -> tuple[Labelled, Labelled, str]:
    """Training split, validation split, and where they come from."""
    if section.source == "digits":
        bunch: Any = imports.optional("sklearn.datasets", "vision", "data.source = digits")
        digits = bunch.load_digits()
        everything = Labelled(digits.images.astype(np.uint8), digits.target.astype(np.int64))
        return *_split(everything, section), "scikit-learn's digits"
    folder = Path(section.folder) if section.folder else _FASHION
    if not folder.is_dir():
        hint = (
            "install Debian's package dataset-fashion-mnist, or set data.folder"
            if section.folder is None
            else "data.folder names it"
        )
        raise DataError(f"data.source = {section.source}: no folder '{folder}'; {hint}")
    train = read_labelled(folder, "train")
    if find(folder, "t10k", "images") is None and find(folder, "t10k", "labels") is None:
        return *_split(train, section), str(folder)
    test = read_labelled(folder, "t10k")
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = [" x ".join(map(str, part.images.shape[1:])) for part in (train, test)]
        raise DataError(f"'{folder}': train images are {sizes[0]}, test images {sizes[1]}")
    return train, test, str(folder)


def _split(everything: Labelled, section: ImageData) -> tuple[Labelled, Labelled]:
    """Training and validation by the hash of each image, equal images on the same side."""
    draws = np.array([int.from_bytes(h[:8], "little") / 2**64 for h in _hashes(everything.images)])
    chosen = draws < section.validation
    if chosen.all() or not chosen.any():
        raise DataError(
            f"data.validation: {section.validation} of {len(chosen)} images leaves one split empty"
        )
    images, labels = everything.images, everything.labels
    return Labelled(images[~chosen], labels[~chosen]), Labelled(images[chosen], labels[chosen])


def _hashes(images: np.ndarray) -> Iterator[bytes]:
    for image in images:
        yield hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _statistics(images: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the pixels, from exact integer sums."""
    counts = np.bincount(images.ravel(), minlength=256)
    values = np.arange(256)
    mean = float((counts * values).sum()) / images.size
    variance = float((counts * values**2).sum()) / images.size - mean**2
    return mean, max(variance, 0.0) ** 0.5 or 1.0


def _fingerprint(section: ImageData, *splits: Labelled) -> str:
    """Hash of the samples and of what is done to them; where they lie does not matter."""
    digest = hashlib.blake2b(f"images 1 {section.augment}".encode(), digest_size=16)
    for split in splits:
        digest.update(str(split.images.shape).encode())
        digest.update(split.images.tobytes())
        digest.update(split.labels.astype("<i8").tobytes())
    return digest.hexdigest()
