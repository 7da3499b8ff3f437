"""How the decoder may be divided: a table, and what its sizes must allow. No rank is known here."""

from __future__ import annotations

from megalith.core.errors import RecipeError
from megalith.recipe.families import DecoderConfig

TENSOR = {
    "embedding": "vocabulary",
    "positions": "sequence",
    "blocks.*.attention_norm": "gathered",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.query_norm": "own",
    "blocks.*.attention.key_norm": "own",
    "blocks.*.attention.core": "heads",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp_norm": "gathered",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "norm": "gathered",
    "head": "vocabulary",
}
"""Tensor parallelism: what each part is, see :mod:`megalith.layout.tensor`."""


def check_tensor(config: DecoderConfig, ranks: int) -> None:
    """Refuse a number of tensor-parallel ranks that the decoder's sizes do not divide over.

    Raises:
        RecipeError: with the largest number that works.
    """
    for name in ("heads", "kv_heads", "hidden"):
        size = getattr(config, name)
        if size % ranks:
            works = max(n for n in range(1, ranks) if _fits(config, n))
            raise RecipeError(
                f"layout.tensor: {ranks} does not divide model.{name} {size}; {works} works"
            )


def _fits(config: DecoderConfig, ranks: int) -> bool:
    return not (config.heads % ranks or config.kv_heads % ranks or config.hidden % ranks)
