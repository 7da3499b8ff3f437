"""What every test starts from."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Two threads and one seed, whatever the machine and the order of the tests."""
    if torch.get_num_threads() > 2:
        torch.set_num_threads(2)
    torch.manual_seed(0)
