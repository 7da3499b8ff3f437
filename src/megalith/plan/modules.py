"""Which module is running, in forward and in backward.

In forward, hooks that see every module keep a stack. Backward runs no module; but autograd numbers
its nodes in the order in which forward made them, so the number of the node that runs now leads
back to the module that was running then. Nothing is attached to tensors, which keeps it cheap.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules import module as hooks

_NOT_NUMBERED = 1 << 62  # AccumulateGrad nodes have the largest number there is


class Running:
    """Knows the path of the module that is running, while it is entered.

    Args:
        model: its modules are told apart by name; others are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(part): name for name, part in model.named_modules()}
        self._model = model  # keeps the ids in use
        self._stack: list[str] = []
        self._starts = [0]
        self._paths = [""]
        self._last = ""
        self._handles: list[Any] = []

    def path(self) -> str:
        """The innermost module's path; empty at the root and outside of the model."""
        if self._stack:
            return self._stack[-1]
        node: Node | None = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number < _NOT_NUMBERED:
            self._last = self._paths[bisect.bisect_right(self._starts, number) - 1]
        return self._last

    def __enter__(self) -> Running:
        add: Callable[..., Any] = hooks.register_module_forward_hook
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            add(self._end, always_call=True),  # recomputation leaves modules by an exception
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def _begin(self, module: nn.Module, given: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)
            self._note(name)

    def _end(self, module: nn.Module, given: Any, result: Any) -> None:
        name = self._names.get(id(module))
        if name is None or name not in self._stack:
            return
        while self._stack.pop() != name:
            continue
        self._note(self._stack[-1] if self._stack else "")

    def _note(self, name: str) -> None:
        """From the next node on, what autograd records belongs to ``name``."""
        number = torch.autograd._get_sequence_nr()  # pyright: ignore
        if number == self._starts[-1]:
            self._paths[-1] = name
        else:
            self._starts.append(number)
            self._paths.append(name)
