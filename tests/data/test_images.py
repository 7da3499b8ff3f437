"""Images from IDX files, scikit-learn and Fashion-MNIST: right samples, disjoint splits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from megalith.core.errors import DataError
from megalith.data import Splits
from megalith.data.images import AugmentedImages, Images, load_images
from megalith.recipe.schema import ImageData

FASHION = Path("/usr/share/datasets/fashion-mnist")


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    """The array as the format's description has it, big-endian header and bytes."""
    number = 0x0800 + array.ndim if magic is None else magic
    return struct.pack(f">I{array.ndim}I", number, *array.shape) + array.astype(np.uint8).tobytes()


def write(
    folder: Path, part: str, images: np.ndarray, labels: np.ndarray, gz: bool = False
) -> None:
    folder.mkdir(exist_ok=True)
    for kind, array in (("images", images), ("labels", labels)):
        name, data = f"{part}-{kind}-idx{array.ndim}-ubyte", idx(array)
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)


def some(n: int, seed: int, size: tuple[int, int] = (6, 5)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *size)), np.arange(n) % 4


def load(folder: Path, **fields: object) -> Splits:
    return load_images(ImageData.model_validate({"source": "idx", "folder": str(folder), **fields}))


def raw(dataset: object) -> set[bytes]:
    assert isinstance(dataset, Images)
    return {image.numpy().tobytes() for image in dataset.images}


@pytest.mark.parametrize("gz", [False, True])
def test_samples_are_the_files_values_normalised_by_the_training_split(
    tmp_path: Path, gz: bool
) -> None:
    images, labels = some(40, seed=0)
    write(tmp_path, "train", images, labels, gz)
    tests, test_labels = some(9, seed=1)
    write(tmp_path, "t10k", tests, test_labels, gz)
    splits = load(tmp_path)
    assert splits.facts == {"classes": 4, "channels": 1}
    assert len(splits.train) == 40  # type: ignore[arg-type]
    assert len(splits.validation) == 9  # type: ignore[arg-type]
    for dataset, pixels, targets in (
        (splits.train, images, labels),
        (splits.validation, tests, test_labels),
    ):
        for i in (0, 3, 8):
            sample = dataset[i]
            assert sample["image"].dtype == torch.float32
            assert sample["image"].shape == (1, 6, 5)
            expected = torch.from_numpy((pixels[i] - images.mean()) / images.std())
            torch.testing.assert_close(sample["image"][0].double(), expected, atol=1e-6, rtol=1e-6)
            assert sample["target"].dtype == torch.int64
            assert sample["target"].shape == ()
            assert sample["target"] == targets[i]


def test_without_a_test_set_equal_images_are_never_in_both_splits(tmp_path: Path) -> None:
    images, labels = some(150, seed=2)
    images, labels = np.tile(images, (3, 1, 1)), np.tile(labels, 3)  # every image three times
    write(tmp_path, "train", images, labels)
    splits = load(tmp_path, validation=0.3)
    assert not raw(splits.train) & raw(splits.validation)
    assert len(raw(splits.train) | raw(splits.validation)) == 150
    assert 0.2 < len(splits.validation) / 450 < 0.4  # type: ignore[arg-type]


def test_the_split_of_an_image_depends_on_the_image_alone(tmp_path: Path) -> None:
    images, labels = some(200, seed=3)
    write(tmp_path / "a", "train", images, labels)
    write(tmp_path / "b", "train", images[::-1][:150], labels[::-1][:150])
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    assert raw(b.train) <= raw(a.train)
    assert raw(b.validation) <= raw(a.validation)


def test_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    images, labels = some(50, seed=4)
    write(tmp_path / "a", "train", images, labels)
    write(tmp_path / "b", "train", images, labels, gz=True)
    changed = images.copy()
    changed[7, 0, 0] ^= 1
    write(tmp_path / "c", "train", changed, labels)
    write(tmp_path / "d", "train", images, labels[::-1])
    same = load(tmp_path / "a").fingerprint
    assert load(tmp_path / "b", workers=2).fingerprint == same
    others = [
        load(tmp_path / "c").fingerprint,
        load(tmp_path / "d").fingerprint,
        load(tmp_path / "a", validation=0.4).fingerprint,
        load(tmp_path / "a", augment="shift").fingerprint,
        load(tmp_path / "a", augment="shift-flip").fingerprint,
    ]
    assert len({same, *others}) == 6


def test_only_the_training_split_is_augmented(tmp_path: Path) -> None:
    write(tmp_path, "train", *some(50, seed=5))
    plain, shifted = load(tmp_path), load(tmp_path, augment="shift")
    assert not hasattr(plain.train, "augment")
    assert hasattr(shifted.train, "augment")
    assert not hasattr(shifted.validation, "augment")


def test_shifts_reach_an_eighth_each_way_and_fill_with_black() -> None:
    image = np.arange(1, 16 * 24 + 1).reshape(1, 16, 24) % 251 + 1
    data = AugmentedImages(image.astype(np.uint8), np.zeros(1), mean=10.0, std=2.0)
    generator = torch.Generator().manual_seed(0)
    possible = {(dy, dx): moved(image[0], dy, dx) for dy in range(-4, 5) for dx in range(-4, 5)}
    seen = set()
    for _ in range(400):
        found = (data.augment(data[0], generator)["image"][0] * 2 + 10).round().numpy()
        matches = [by for by, pixels in possible.items() if np.array_equal(found, pixels)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == {(dy, dx) for dy in range(-2, 3) for dx in range(-3, 4)}


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    height, width = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                out[y, x] = image[y - down, x - right]
    return out


def test_augmentation_is_a_function_of_the_generator_and_flips_half() -> None:
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    data = AugmentedImages(image, np.zeros(1), mean=0.0, std=1.0, flip=True)
    draws = [
        [data.augment(data[0], generator)["image"] for _ in range(200)]
        for generator in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    mirrored = sum(bool(x[0, 4, 3] > x[0, 4, 4]) for x in draws[0])
    assert 70 < mirrored < 130


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    splits = load_images(ImageData(source="digits"))
    assert splits.facts == {"classes": 10, "channels": 1}
    assert not raw(splits.train) & raw(splits.validation)
    digits = datasets.load_digits()
    theirs = {
        (image.astype(np.uint8).tobytes(), int(label))
        for image, label in zip(digits["images"], digits["target"], strict=True)
    }
    ours = set()
    for part in (splits.train, splits.validation):
        assert isinstance(part, Images)
        for image, label in zip(part.images, part.labels, strict=True):
            ours.add((image.numpy().tobytes(), int(label)))
    assert ours == theirs
    values = torch.stack([splits.train[i]["image"] for i in range(len(splits.train))])  # type: ignore[arg-type]
    assert abs(float(values.mean())) < 1e-4
    assert abs(float(values.std()) - 1) < 1e-3


@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_fashion_mnist_is_whole() -> None:
    splits = load_images(ImageData(source="fashion-mnist"))
    assert isinstance(splits.train, Images)
    assert isinstance(splits.validation, Images)
    assert splits.facts == {"classes": 10, "channels": 1}
    # 6000 and 1000 images of each class, and the mean that its users normalise with.
    assert splits.train.labels.bincount().tolist() == [6000] * 10
    assert splits.validation.labels.bincount().tolist() == [1000] * 10
    assert splits.train.mean / 255 == pytest.approx(0.2860, abs=1e-4)
    assert splits.train.std / 255 == pytest.approx(0.3530, abs=1e-4)
    assert splits.train[0]["target"] == 9  # an ankle boot comes first


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    images, labels = some(20, seed=6)
    with pytest.raises(DataError, match="no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no 'train-images-idx3-ubyte', plain or with \.gz"):
        load(tmp_path)

    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)

    file = tmp_path / "train-images-idx3-ubyte"
    write(tmp_path, "train", images, labels)
    file.write_bytes(idx(images, magic=0x0D03))
    refused(r"starts with 00000d03, not 00000803 \(IDX, bytes, 3 dimensions\)")
    file.write_bytes(b"")
    refused("starts with nothing")
    file.write_bytes(idx(images)[:7])
    refused("ends inside its header")
    file.write_bytes(idx(images)[:-1])
    refused(r"has 615 bytes, its header \(20 x 6 x 5\) asks for 616")
    file.write_bytes(idx(images[:19]))
    refused("train has 19 images but 20 labels")
    file.unlink()
    Path(f"{file}.gz").write_bytes(gzip.compress(idx(images))[:-20])
    refused("cannot be read")
    Path(f"{file}.gz").unlink()

    write(tmp_path, "train", images, labels)
    write(tmp_path, "t10k", images, labels + 1)
    refused(r"validation split has label 4, the training split only 0 to 3")
    write(tmp_path, "t10k", *some(5, seed=0, size=(6, 6)))
    refused("train images are 6 x 5, test images 6 x 6")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused("no 't10k-labels-idx1-ubyte'")


def test_a_share_that_empties_a_split_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train", *some(3, seed=7))
    with pytest.raises(
        DataError, match=r"data\.validation: 0\.001 of 3 images leaves one split empty"
    ):
        load(tmp_path, validation=0.001)
