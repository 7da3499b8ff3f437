"""What the process that traces are forked from imports once, so that each starts in an instant."""

from __future__ import annotations

import gc
import warnings

warnings.simplefilter("ignore")
gc.disable()  # a search for garbage among what was just imported finds none, and costs a tenth

import megalith.plan.summary  # noqa: E402
import megalith.step  # noqa: E402, F401

gc.freeze()  # nor do traces look through it again
gc.enable()
