"""Errors a user can act on: each message is one line that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MegalithError(Exception):
    """Base of every error that Megalith raises on purpose."""


class RecipeError(MegalithError):
    """The recipe is wrong: the message starts with the field's path, such as ``train.steps``."""


class DataError(MegalithError):
    """A source of data is missing, unreadable, or not what the recipe says it is."""


class CheckpointError(MegalithError):
    """A checkpoint is missing, damaged, or belongs to another recipe."""


class TrainingError(MegalithError):
    """Training cannot go on, for example after too many non-finite gradients in a row."""


class PlanError(MegalithError):
    """A step cannot be planned: it could not be traced, or the machine is not known."""


class MissingExtra(MegalithError):
    """An optional package is needed: the message names the extra that brings it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'steps'?"`` for the closest valid name, or an empty string."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""
