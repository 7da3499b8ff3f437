"""A run's state on disk: whole, checked, and exact."""

from megalith.checkpoint.state import load_model, model_tensors, numbers, restore, tensors
from megalith.checkpoint.store import Entry, best, entries, load, newest_whole, prune, save

__all__ = [
    "Entry",
    "best",
    "entries",
    "load",
    "load_model",
    "model_tensors",
    "newest_whole",
    "numbers",
    "prune",
    "restore",
    "save",
    "tensors",
]
