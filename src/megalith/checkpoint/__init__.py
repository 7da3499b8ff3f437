"""A run's state on disk: whole, checked, exact, and free of the layout it was saved under."""

from megalith.checkpoint.read import holds, load, load_into
from megalith.checkpoint.saver import Saver
from megalith.checkpoint.state import (
    load_model,
    model_tensors,
    numbers,
    restore,
    wholes,
)
from megalith.checkpoint.store import Entry, best, entries, newest_whole, prune, read_entry
from megalith.checkpoint.write import Parts, save

__all__ = [
    "Entry",
    "Parts",
    "Saver",
    "best",
    "entries",
    "holds",
    "load",
    "load_into",
    "load_model",
    "model_tensors",
    "newest_whole",
    "numbers",
    "prune",
    "read_entry",
    "restore",
    "save",
    "wholes",
]
