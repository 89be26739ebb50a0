"""Digests of arrays: sums of integers mixed from each element's bits and position.

They are exact, fast, and do not depend on how an array is split over ranks. The digest of the whole is the sum (modulo
2**64) of the digests of its pieces, each computed with the positions that its elements have in the whole.

This module imports only NumPy, because inference servers with packages of their own load it, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import numpy as np

BLOCK = 1 << 16
MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """Hash values by splitmix64's finalizer (Steele et al., 2014). Results are odd: products with them lose no bit."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


WITHIN_BLOCK = mix(np.arange(BLOCK, dtype=np.uint64))
"""Factors for the bits of an element, by its position in its block."""
_UP_TO = np.zeros(BLOCK + 1, np.uint64)
"""Prefix sums of `WITHIN_BLOCK`, beginning with 0."""
np.cumsum(WITHIN_BLOCK, out=_UP_TO[1:])


def digest_array(array: np.ndarray, *, name: str = "", start: int = 0) -> int:
    """Return the digest of one array, or of the piece of it that begins at flat position `start`.

    Every bit counts: 0.0 and -0.0 differ, and so do two NaNs with different payloads. So does the name: the digest of a
    set changes when two of its arrays swap names.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}")
    total = 0
    offset = start % BLOCK  # blocks begin where they would in the whole array
    for first in range(-offset, bits.size, BLOCK):
        block = bits[max(first, 0) : first + BLOCK].astype(np.uint64)
        begin = max(-first, 0)
        end = begin + block.size
        # each bit pattern counts as one more than it is, so that zeros count, too
        within = int(np.dot(block, WITHIN_BLOCK[begin:end])) + int(_UP_TO[end]) - int(_UP_TO[begin])
        total += within * _of_block((start + first) // BLOCK)
    return salted(total, name, flat.dtype.str)


def of_blocks(first: int, count: int) -> np.ndarray:
    """Return the factors for the digests of `count` blocks, beginning with the block number `first`."""
    return mix(np.arange(first, first + count, dtype=np.uint64))


@cache
def _of_block(index: int) -> int:
    return int(of_blocks(index, 1)[0])


def salted(total: int, name: str, dtype: str) -> int:
    """Return the digest of an array, given the sum over its blocks. dtype: as NumPy writes it, such as "<f4"."""
    return total * salt(name, dtype) & MASK


@cache
def salt(name: str, dtype: str) -> int:
    """Return an odd number that stands for an array's name and type."""
    return int.from_bytes(hashlib.blake2b(f"{name}:{dtype}".encode(), digest_size=8).digest(), "little") | 1


def digest_arrays(named: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the digest of a set of named arrays, as 16 hexadecimal digits. The order of the arrays does not matter."""
    return total(digest_array(array, name=name) for name, array in named)


def total(digests: Iterable[int]) -> str:
    """Return the digest of a set, given the digests of its members, as 16 hexadecimal digits."""
    return f"{sum(digests) & MASK:016x}"
