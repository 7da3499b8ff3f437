"""Print the matmul peaks of this machine in FLOP/s as JSON, by ``megalith.core.devices``."""

from __future__ import annotations

import json

import torch

from megalith.core import devices


def main() -> None:
    device = torch.device("cpu")
    peaks = {
        name: devices.matmul_peak(device, devices.DTYPES[name], seconds=4.0)
        for name in ("fp32", "bf16")
    }
    print(json.dumps({"peaks": peaks, "capability": torch.backends.cpu.get_cpu_capability()}))


if __name__ == "__main__":
    main()
