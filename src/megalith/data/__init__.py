"""Samples: where they come from, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to import, and half of this package does without it
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class Splits:
    """The data of a run.

    Attributes:
        train: map-style dataset; ``train[i]`` is a dict of tensors whose shapes do not depend on
            ``i``. An optional method ``augment(sample, generator)`` changes a sample at random.
        validation: map-style dataset, never augmented.
        facts: what a model must know of the data, such as ``{"vocab": 4096}``.
        tokenizer: of text, else ``None``.
        fingerprint: hash of everything that decides the samples; a run resumes only on the same.
        description: what the data is, for the report.
    """

    train: Dataset[dict[str, Any]]
    validation: Dataset[dict[str, Any]]
    facts: dict[str, int] = field(default_factory=dict)
    tokenizer: Any = None
    fingerprint: str = ""
    description: dict[str, Any] = field(default_factory=dict)
