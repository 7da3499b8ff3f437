"""An optimizer of the user's own, whose state holds a number and a scalar tensor."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.Optimizer):
    """Gradient descent that counts its calls."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["scale"] = torch.ones((), dtype=torch.float64)
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


def counting(groups: Any, lr: float) -> Counting:
    """The factory."""
    return Counting(groups, lr)
