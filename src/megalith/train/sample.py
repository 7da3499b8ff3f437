"""Texts that a model writes while it trains: one at each evaluation, in ``samples.jsonl``."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megalith import models
from megalith.core import seeds
from megalith.core.errors import MegalithError, RecipeError
from megalith.core.runs import RunFolder, write_whole
from megalith.generate import Sampling, generate
from megalith.layout.gather import gather
from megalith.layout.units import named_tensors
from megalith.models.decoder import Decoder
from megalith.recipe import Recipe
from megalith.train.metrics import read_lines

if TYPE_CHECKING:  # setup imports this module
    from megalith.train.setup import Session

TEMPERATURE, TOP_P = 0.8, 0.95
"""Usual values: close to what the model has learnt, without the long tail of unlikely tokens."""


def check_sampling(recipe: Recipe, model: nn.Module, tokenizer: Any) -> None:
    """Refuse a recipe whose ``evaluate.prompt`` its model cannot continue.

    Raises:
        RecipeError: the model is no decoder, or the data has no tokenizer.
    """
    if recipe.evaluate.prompt is None:
        return
    if not isinstance(model, Decoder):
        raise RecipeError(
            f"evaluate.prompt: a {type(model).__name__} cannot continue text, only the decoder "
            "can; leave the prompt out"
        )
    if tokenizer is None:
        raise RecipeError("evaluate.prompt: needs data with a tokenizer; leave the prompt out")


def write_sample(session: Session, prompt: str) -> str | None:
    """Let the present weights, averaged if there are any, continue ``prompt``; returns all of it.

    All ranks call it; rank 0, which must have room for the whole model, writes, and the others get
    ``None``.

    Appends ``{"step", "prompt", "text"}`` to the run's samples; ``text`` begins with the prompt. If
    the model's logits are not finite, the text ends there and the entry's ``error`` says so. The
    draws depend on the run's seed and the step alone, and neither torch's random state nor the
    modules' mode is changed, so training goes on as if there had been no sample.
    """
    step, recipe = session.step, session.recipe
    sampling = Sampling(
        max_tokens=recipe.evaluate.sample_tokens,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=seeds.derive(recipe.train.seed, "sample", step.done),
    )
    entry: dict[str, Any] = {"step": step.done, "prompt": prompt, "text": prompt}
    with step.ema.applied() if step.ema is not None else nullcontext():
        model = step.model if session.mesh.size == 1 else _whole(session)
        if model is None:
            return None
        assert isinstance(model, Decoder)
        try:
            entry["text"] += generate(model, session.splits.tokenizer, prompt, sampling)
        except MegalithError as error:  # a sample must not end training
            entry["error"] = str(error)
    with session.folder.samples.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return entry["text"]


@torch.no_grad()
def _whole(session: Session) -> nn.Module | None:
    """The model in one piece on rank 0, from all ranks' parts."""
    tensors = gather(session.step.pieces()["model"], session.mesh)
    if not session.mesh.main:
        return None
    config = session.recipe.model.model_copy(update={"path": None})  # its weights are replaced
    model = models.build(config, session.recipe.train.seed, session.device)
    for name, tensor in named_tensors(model):
        tensor.copy_(tensors[name])
    return model


def trim_samples(folder: RunFolder, step: int) -> None:
    """Drop samples of updates after ``step``: a run that resumes there writes them again."""
    if not folder.samples.exists():
        return
    kept = [
        entry
        for entry in read_lines(folder.samples)
        if isinstance(entry.get("step"), int) and entry["step"] <= step
    ]
    lines = [json.dumps(entry) + "\n" for entry in kept]
    write_whole(folder.samples, "".join(lines))
