"""Schedules of the user's own: f(update, steps) -> factor on the learning rate."""


def halves(update: int, steps: int) -> float:
    """Half as much after every update."""
    return 0.5**update


def explodes(update: int, steps: int) -> float:
    """Good for four updates, then far too much."""
    return 1.0 if update < 4 else 300.0


def breaks(update: int, steps: int) -> float:
    """Good for eight updates, then infinite: the weights are lost."""
    return 1.0 if update < 8 else float("inf")
