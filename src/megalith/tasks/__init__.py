"""What a model is asked to do: batch, loss, metrics."""

from __future__ import annotations

from megalith.core import imports
from megalith.core.errors import RecipeError
from megalith.recipe.schema import TaskSection
from megalith.tasks.base import IGNORE, Batch, Loss, Task

__all__ = ["IGNORE", "Batch", "Loss", "Task", "build"]


def build(section: TaskSection) -> Task:
    """The task that the recipe names, or the user's own.

    Raises:
        RecipeError: a reference does not resolve.
    """
    if section.factory is not None:
        task: Task = imports.resolve(section.factory, "task.factory")(**section.args)
        for part in ("item", "count", "loss", "summary"):
            if not hasattr(task, part):
                raise RecipeError(
                    f"task.factory: '{section.factory}' returned {type(task).__name__}, which has "
                    f"no '{part}' (see megalith.tasks.Task)"
                )
        return task
    loss = imports.resolve(section.loss, "task.loss") if section.loss else None
    if section.name == "classify":
        from megalith.tasks.classify import Classify

        return Classify(label_smoothing=section.label_smoothing, loss=loss)
    from megalith.tasks.language import Language

    return Language(label_smoothing=section.label_smoothing, z_loss=section.z_loss, loss=loss)
