"""Digests of arrays: sums of integers mixed from each element's bits and position.

Exact, quick, and the same however an array is split over ranks: the digest of a whole is the sum (modulo 2**64) of
the digests of its pieces, each computed with the positions that its elements have in the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import numpy as np

_BLOCK = 1 << 16
_MASK = (1 << 64) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al., 2014), made odd, so that no changed bit can be multiplied away."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


_WITHIN_BLOCK = _mix(np.arange(_BLOCK, dtype=np.uint64))


def digest_array(array: np.ndarray, *, name: str = "", start: int = 0) -> int:
    """Digest of one array, or of the piece of it that begins at flat position `start` (a multiple of 65,536 unless
    the piece is the last).

    name: goes into the digest, so that two arrays that changed places differ.
    Every bit counts: 0.0 and -0.0 differ, and so do two NaNs with different payloads.
    """
    assert start % _BLOCK == 0
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}")
    total = 0
    for first in range(0, bits.size, _BLOCK):
        block = bits[first : first + _BLOCK].astype(np.uint64)
        within = int(np.add.reduce((block + np.uint64(1)) * _WITHIN_BLOCK[: block.size], dtype=np.uint64))
        total += within * _of_block((start + first) // _BLOCK)
    return total * _salt(name, flat.dtype.str) & _MASK


@cache
def _of_block(index: int) -> int:
    return int(_mix(np.array([index], dtype=np.uint64))[0])


@cache
def _salt(name: str, dtype: str) -> int:
    """An odd number for what the array is."""
    return int.from_bytes(hashlib.blake2b(f"{name}:{dtype}".encode(), digest_size=8).digest(), "little") | 1


def digest_arrays(named: Iterable[tuple[str, np.ndarray]]) -> str:
    """Digest of a set of named arrays, as 16 hexadecimal digits; their order does not matter."""
    return f"{sum(digest_array(array, name=name) for name, array in named) & _MASK:016x}"
