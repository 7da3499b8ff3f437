"""Plan, train, shrink and ship large PyTorch models, and prove each hand-over."""

__version__ = "0.1.0"
