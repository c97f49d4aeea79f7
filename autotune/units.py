"""Units as people write and read them: memory (``24GiB``), time (``1h30m``), counts (``20B``); and printable text.

Names of models, files, columns and devices may hold any character: a new line would pass for a line of autotune's, an
escape moves the cursor, a mark of direction turns words round. `visible` writes such characters as their escapes.
"""

import datetime
import math
import re

GIB = 1 << 30

_MEMORY_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

_TIME_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_memory(text: str) -> int:
    """Return bytes, else ValueError: '24GiB' is 24 x 2^30, '24GB' 24 x 10^9, a bare number bytes, at least 1,024.

    >>> parse_memory("24GiB"), parse_memory("1.5 GB"), parse_memory("4096")
    (25769803776, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _MEMORY_UNITS.get(match[2].lower()) if match else None
    exact = float(match[1]) * unit if match and unit else 0.0
    value = round(exact) if math.isfinite(exact) else 0
    if value <= 0 or (match and not match[2] and value < 1024):  # '24' is meant as 24GiB
        raise ValueError("expected an amount of memory such as 24GiB, 1.5GB or 800MiB")
    return value


def parse_time_s(text: str) -> float:
    """Return seconds, else ValueError: '90', '90s', '10m', '1h30m'. A number without a unit stands alone.

    >>> parse_time_s("90"), parse_time_s("10m"), parse_time_s("1h30m")
    (90.0, 600.0, 5400.0)
    """
    part = r"(\d+(?:\.\d+)?)\s*([a-z]*)"
    parts, rest = re.findall(part, text.lower()), re.sub(part, "", text.lower()).strip()
    units = [unit if len(parts) > 1 else unit or "s" for _, unit in parts]
    if not parts or rest or any(unit not in _TIME_UNITS_S for unit in units):
        raise ValueError("expected a time such as 90s, 10m or 1h30m")
    seconds = sum(float(number) * _TIME_UNITS_S[unit] for (number, _), unit in zip(parts, units, strict=True))
    if seconds <= 0 or not math.isfinite(seconds):
        raise ValueError("expected a time above zero")
    return seconds


def parse_count(text: str) -> float:
    """Return a count, else ValueError: '20B' is 20 x 10^9, '300e9' and '1_000_000' are what they are.

    >>> parse_count("20B") == parse_count("20e9") == parse_count("20_000_000_000")
    True
    """
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)\s*([kmbgt]?)\s*", text.lower())
    count = float(match[1]) * _COUNTS[match[2]] if match else 0.0
    if not 0 < count < math.inf:
        raise ValueError("expected a number above 0, such as 20B or 300e9")
    return count


def show_memory(value: float) -> str:
    """Return bytes for people.

    >>> show_memory(1.5 * GIB), show_memory(800 * 2**20), show_memory(40_000)
    ('1.50 GiB', '800 MiB', '39 KiB')
    """
    if value >= GIB:
        return f"{value / GIB:.2f} GiB"
    if 0 < value < 1 << 20:
        return f"{value / (1 << 10):.0f} KiB"
    return f"{value / (1 << 20):.0f} MiB"


def show_time(seconds: float) -> str:
    """Return a duration for people: below an hour to the second, so that two of one thing never disagree.

    >>> show_time(45), show_time(268), show_time(720), show_time(3900)
    ('45 s', '4 min 28 s', '12 min', '1 h 05 min')
    """
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def now() -> str:
    """Return the time in UTC by ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def show_rate(value: float, *, is_sure: bool = True) -> str:
    """Return a rate with three significant digits or whole numbers above 100; an unsure one with 'about' and two."""
    if not is_sure:
        return f"about {show_rate(float(f'{value:.2g}'))}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def visible(text: str) -> str:
    r"""Return `text` on one line, characters that can't be printed as Python's escapes.

    >>> print(visible("a\nb \x1b[31mred \u202e"))
    a\nb \x1b[31mred \u202e
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
