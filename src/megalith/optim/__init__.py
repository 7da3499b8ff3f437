"""Optimizers, schedules, clipping and weight averages."""

from megalith.optim.ema import Ema
from megalith.optim.optimizers import Optimizers, build
from megalith.optim.schedules import Schedule
from megalith.optim.schedules import build as build_schedule

__all__ = ["Ema", "Optimizers", "Schedule", "build", "build_schedule"]
