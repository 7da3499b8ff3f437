"""Will it fit, how long will it take, what would be better: answered without the machine.

```python
plan = megalith.plan(recipe, on="64xH100")
plan.fits, plan.needed, plan.time.seconds, plan.run.dollars
```

A rank's own step runs on tensors without data (:mod:`~megalith.plan.trace`), in a process of its
own (:mod:`~megalith.plan.worker`); what it allocates gives memory, what it computes and sends time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.plan.estimate import Plan, plan

__all__ = ["Plan", "plan"]


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import, and a worker's own modules need none of this.
    if name not in __all__:
        raise AttributeError(f"module 'megalith.plan' has no attribute '{name}'")
    return getattr(importlib.import_module("megalith.plan.estimate"), name)
