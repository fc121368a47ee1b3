"""Formats numbers with units."""

from __future__ import annotations

import math

MIB = 1024**2


def format_bytes(count: float) -> str:
    """Decimal bytes with three significant digits: ``1.24 GB``."""
    return f"{_scaled(count)}B"


def format_count(count: float) -> str:
    """A count with three significant digits: ``8.03 G``; no unit."""
    return _scaled(count).strip()


def format_plural(number: int, noun: str, ending: str = "s") -> str:
    """A number with a noun: ``1 rank``, ``2 ranks``, ``2 batches`` with another ending."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def format_rate(per_second: float, unit: str) -> str:
    """A rate: ``412 GFLOP/s``."""
    return f"{_scaled(per_second)}{unit}/s"


def format_throughput(per_second: float, unit: str) -> str:
    """Throughput of training: ``38.7k tok/s``, ``1.2k img/s``."""
    short = {"tokens": "tok", "images": "img"}.get(unit, unit)
    return f"{_scaled(per_second).replace(' ', '')} {short}/s"


def format_seconds(seconds: float) -> str:
    """A duration: ``820 us``, ``41.3 ms``, ``2.50 s``, ``3 min 20 s``, ``5 h 12 min``."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 2) < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_days(seconds: float) -> str:
    """Days; hours below two days; smaller units below two hours."""
    if math.isinf(seconds):
        return "forever"
    if seconds < 7200:
        return format_seconds(seconds)
    return f"{seconds / 86_400:.1f} days" if seconds >= 172_800 else f"{seconds / 3600:.1f} hours"


def format_cost(cost: float) -> str:
    """A cost in whole USD, with two decimals below 100."""
    return f"{cost:,.0f} USD" if cost >= 100 else f"{cost:.2f} USD"


def _scaled(value: float) -> str:
    """Three significant digits and a prefix; rounds first, so that 999,600 is 1 M."""
    rounded = float(f"{value:.3g}")
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= limit:
            scaled = rounded / limit
            return f"{scaled:.3g} {prefix}" if abs(scaled) < 1000 else f"{scaled:.0f} {prefix}"
    return f"{rounded:.3g} "


def round_measured(value: float) -> float:
    """Four digits: measurements are not more precise."""
    return float(f"{value:.4g}")
