"""Numbers as people read them: 1.24k, 3.4 GiB, 2m13s."""

from __future__ import annotations

import math

_LARGE = ((1e15, "e15"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def number(value: float, digits: int = 4, *, fixed: bool = False) -> str:
    """``value`` with ``digits`` significant digits: ``3.21``, ``0.0006``, ``6e-5``, ``12,345``.

    ``fixed`` keeps zeros at the end (``3.210``), so that values in a column line up.
    """
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        if "." in mantissa and not fixed:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    return (text if fixed else text.rstrip("0")).rstrip(".")


def quantity(value: float, digits: int = 3) -> str:
    """``value`` with a letter for thousands and up: ``1.24k``, ``13.1M``, ``7B``."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in _LARGE:
        # A value that rounds up to the next letter takes it: 999,999 is 1M.
        if abs(value) >= size * (1 - 0.5 * 10**-digits):
            return f"{float(f'{value / size:.{digits}g}'):g}{letter}"
    return number(value, digits)


def size(value: float) -> str:
    """Bytes in binary units: ``512 B``, ``3.4 GiB``."""
    scaled, unit = float(value), 0
    while abs(scaled) >= 1023.95 and unit < len(_BINARY) - 1:
        scaled, unit = scaled / 1024, unit + 1
    text = f"{scaled:.0f}" if unit == 0 or abs(scaled) >= 99.95 else f"{scaled:.1f}"
    return f"{text} {_BINARY[unit]}"


def duration(seconds: float) -> str:
    """Seconds as ``34 ms``, ``5.2 s``, ``2m13s``, ``3h04m`` or ``2d03h``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) < 0.9995:
        return f"{number(seconds * 1000, 3)} ms" if seconds else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def percent(share: float, digits: int = 3) -> str:
    """A share from 0 to 1 as ``46.2 %``."""
    return f"{number(share * 100, digits)} %"
