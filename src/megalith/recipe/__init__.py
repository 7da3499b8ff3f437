"""The typed recipe that every verb reads."""

from megalith.recipe.dump import dump
from megalith.recipe.load import load, parse
from megalith.recipe.schema import Recipe

__all__ = ["Recipe", "dump", "load", "parse"]
