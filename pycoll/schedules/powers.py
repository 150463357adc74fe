"""Powers of two, and how many of them."""

from __future__ import annotations


def floor_lg(size: int) -> int:
    """Logarithm to base 2, rounded down."""
    return size.bit_length() - 1


def ceil_lg(size: int) -> int:
    """Logarithm to base 2, rounded up."""
    return (size - 1).bit_length()


def power_below(size: int) -> int:
    """Largest power of two that is not above `size`."""
    return 1 << floor_lg(size)


def distances(size: int) -> list[int]:
    """1, 2, 4, ... below `size`."""
    return [1 << bit for bit in range(ceil_lg(size))]
