"""Numbers as people read them: durations, speeds, sizes, losses. For terminals and pages alike."""

from __future__ import annotations

import math
import time


def number(value: float) -> str:
    """A loss or metric with as many digits as it deserves: 0.9778, 12.3, 1.2e-05, nan."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:.0f}"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def count(value: float) -> str:
    """A whole number with thin gaps between thousands: 12 345."""
    return f"{value:,.0f}".replace(",", " ")


def short_count(value: float) -> str:
    """A number for a narrow place: 950, 12.3k, 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            digits = 1 if abs(scaled) < 100 and round(scaled, 1) != round(scaled) else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as 0.4 s, 12 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def step_time(seconds: float) -> str:
    """The time of a step with three digits: 850 us, 5.21 ms, 52.1 ms, 1.25 s."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    scaled, unit = (seconds * 1e3, "ms") if seconds < 0.9995 else (seconds, "s")
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {unit}"


def size(size_bytes: float) -> str:
    """Bytes as 512 B, 340 MiB, 12.5 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            scaled = size_bytes / scale
            digits = 1 if scaled < 10 or (unit in ("TiB", "GiB") and scaled < 100) else 0
            return f"{scaled:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"


def bandwidth(bytes_per_s: float) -> str:
    """Bytes per second as 12.3 GB/s."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def percent(share: float) -> str:
    """A share of one: 42 %, <1 %, 0 %."""
    if not math.isfinite(share):
        return "?"
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def plural(value: int, word: str) -> str:
    """A count with its noun: 1 rank, 2 ranks."""
    return f"{count(value)} {word}" + ("" if value == 1 else "s")


def clock_time(time_s: float, *, with_date: bool = False) -> str:
    """A moment (Unix time) in local time: 14:03:22, or 2026-11-21 14:03:22."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(time_s))
