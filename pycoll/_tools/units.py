"""Times and bandwidths as users write them: ``5us``, ``10GB/s``, ``200Mbit/s``."""

from __future__ import annotations

import math
import re

from pycoll._support.wording import SECONDS

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_seconds(text: str, option: str) -> float:
    """Read a time, for example ``5us`` or ``1.5ms``.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(_NUMBER + r"\s*(ns|us|ms|s)?", text.strip().lower().replace("µ", "u"))
    if found is None or (found[2] is None and float(found[1])):
        raise ValueError(f"{option} is {text!r}, which is no time: write 500ns, 5us, 1.5ms or 1s")
    return float(found[1]) * SECONDS[found[2] or "s"]


def parse_bandwidth(text: str, option: str) -> float:
    """Read bytes a second, for example from ``10GB/s``, ``1GiB/s`` or ``200Mbit/s``.

    Raises:
        ValueError: it is none.
    """
    pattern = _NUMBER + r"\s*([kmgt]?)(i?)(b|bit)(?:/s|ps)"
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(
            f"{option} is {text!r}, which is no bandwidth: write 10GB/s, 1GiB/s or 200Mbit/s"
        )
    prefix = _PREFIXES[found[2].lower()]
    if found[3]:
        prefix = 1024.0 ** round(math.log(prefix, 1000))
    # Gb/s and Gbps are bits, as everywhere in networks; GB/s are bytes.
    in_bits = found[4].lower() == "bit" or found[4] == "b"
    return float(found[1]) * prefix / (8 if in_bits else 1)


def bandwidth_text(bandwidth: float) -> str:
    """Write bytes a second in the unit in which they are a handy number."""
    if bandwidth == math.inf:
        return "no limit of bandwidth"
    for prefix, factor in reversed(_PREFIXES.items()):
        if bandwidth >= 0.9995 * factor or not prefix:  # 999.9 MB/s is written as 1 GB/s
            return f"{bandwidth / factor:.3g} {prefix.upper().replace('K', 'k')}B/s"
    raise AssertionError
