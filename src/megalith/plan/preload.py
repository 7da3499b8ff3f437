"""What the process that traces are forked from imports once, so that each starts in an instant."""

from __future__ import annotations

import warnings

warnings.simplefilter("ignore")

import megalith.plan.summary  # noqa: E402
import megalith.step  # noqa: E402, F401
