"""Digests of arrays: sums of integers mixed from each element's bits and position.

They are exact, fast, and do not depend on how an array is split over ranks. The digest of the whole is the sum (modulo
2**64) of the digests of its pieces, each computed with the positions that its elements have in the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from functools import cache
from typing import NamedTuple

import numpy as np

from clew.record.rows import ENCODER, Sequence, timeless

BLOCK = 1 << 16
_MASK = (1 << 64) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 (Steele et al., 2014), made odd so that no changed bit is multiplied away."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


WITHIN_BLOCK = _mix(np.arange(BLOCK, dtype=np.uint64))
"""Factors for the bits of an element, by its position in its block."""
_UP_TO = np.zeros(BLOCK + 1, np.uint64)
"""Sums of the first 0, 1, 2, ... of `WITHIN_BLOCK`."""
np.cumsum(WITHIN_BLOCK, out=_UP_TO[1:])


def digest_array(array: np.ndarray, *, name: str = "", start: int = 0) -> int:
    """Return the digest of one array, or of the piece of it that begins at flat position `start`.

    Every bit counts: 0.0 and -0.0 differ, and so do two NaNs with different payloads.

    Args:
        array: The array or the piece of it.
        name: Name of the array. It is part of the digest, so that the result changes when two arrays change places.
        start: Flat position of the piece's first element in the whole array.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}")
    total = 0
    offset = start % BLOCK
    for first in range(-offset, bits.size, BLOCK):
        block = bits[max(first, 0) : first + BLOCK].astype(np.uint64)
        begin = max(-first, 0)
        end = begin + block.size
        # each bit pattern counts as one more
        within = int(np.dot(block, WITHIN_BLOCK[begin:end])) + int(_UP_TO[end]) - int(_UP_TO[begin])
        total += within * _of_block((start + first) // BLOCK)
    return salted(total, name, flat.dtype.str)


def of_blocks(first: int, count: int) -> np.ndarray:
    """Return the factors for the digests of `count` blocks, beginning with the block number `first`."""
    return _mix(np.arange(first, first + count, dtype=np.uint64))


@cache
def _of_block(index: int) -> int:
    return int(of_blocks(index, 1)[0])


def salted(total: int, name: str, dtype: str) -> int:
    """Return the digest of an array, given the sum over its blocks. dtype: as NumPy writes it, such as "<f4"."""
    return total * _salt(name, dtype) & _MASK


@cache
def _salt(name: str, dtype: str) -> int:
    """Return an odd number that stands for an array's name and type."""
    return int.from_bytes(hashlib.blake2b(f"{name}:{dtype}".encode(), digest_size=8).digest(), "little") | 1


def digest_arrays(named: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the digest of a set of named arrays, as 16 hexadecimal digits. The order of the arrays does not matter."""
    return total(digest_array(array, name=name) for name, array in named)


class RowDigest(NamedTuple):
    """Two digests of one row of training tokens."""

    data: int
    """Digest of what the model is trained on: tokens, mask, logprobs, versions, temperatures, reward, images."""
    origin: int
    """Digest of where the row comes from: group, episode, turns, finish reason, rewards by name, the prompt's row,
    interactions."""


def digest_rows(batch: SequenceABC[Sequence]) -> dict[str, RowDigest]:
    """Return the digests of each row, by its ID. They cover all columns but times, the admitted version and `error`."""
    of_data = zip((row.id for row in batch), _digests_of_data(batch), strict=True)
    return {name: RowDigest(data, _digest_of_origin(row)) for (name, data), row in zip(of_data, batch, strict=True)}


def _digest_of_origin(row: Sequence) -> int:
    """Return the digest of where a row comes from, taken over JSON as Python's own library writes it: the way in which
    other libraries write some numbers changes from one version to the next."""
    interactions = list(map(timeless, row.interactions))
    said = (row.group_id, row.episode_id, row.finish_reason, row.rewards, row.data, interactions)
    content = ENCODER.encode(said).encode() + row.turn_ids.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _digests_of_data(batch: SequenceABC[Sequence]) -> list[int]:
    starts = np.cumsum([0, *(len(row.input_ids) for row in batch)])
    lengths = np.diff(starts)
    position_S = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    mixed_S = _mix(np.arange(lengths.max(initial=0), dtype=np.uint64))[position_S]
    digests = (lengths.astype(np.uint64) + np.uint64(1)) * np.uint64(_salt("length", "<u8"))
    digests += (np.array([row.reward for row in batch]).view(np.uint64) + np.uint64(1)) * np.uint64(
        _salt("reward", "<f8")
    )
    if any(row.images for row in batch):
        digests += np.array([digest_images(row.images) for row in batch], np.uint64)
    for name in ("input_ids", "loss_mask", "logprobs", "versions", "temperatures"):
        flat_S = np.concatenate([getattr(row, name) for row in batch])
        bits_S = flat_S.view(f"u{flat_S.dtype.itemsize}").astype(np.uint64)
        sums = np.concatenate([[np.uint64(0)], np.cumsum((bits_S + np.uint64(1)) * mixed_S, dtype=np.uint64)])
        digests += (sums[starts[1:]] - sums[starts[:-1]]) * np.uint64(_salt(name, flat_S.dtype.str))
    return digests.tolist()


def digest_images(names: SequenceABC[str]) -> int:
    """Return the digest of the images of a row, which are named by their content; 0 if there are none."""
    return sum(_salt(f"image {place} {name}", "<u8") for place, name in enumerate(names)) & _MASK


def digest_batch(digests: Mapping[str, RowDigest]) -> str:
    """Return the digest of what the model is trained on in a batch, given the result of `digest_rows`."""
    return digest_arrays([("rows", np.array([each.data for each in digests.values()], np.uint64))])


def total(digests: Iterable[int]) -> str:
    """Return the digest of a set, given the digests of its members, as 16 hexadecimal digits."""
    return f"{sum(digests) & _MASK:016x}"


def to_hex(digests: Iterable[int]) -> str:
    """Return the digests one after the other, 16 hexadecimal digits each."""
    return "".join(f"{digest:016x}" for digest in digests)


def from_hex(text: str) -> list[int]:
    """Return the digests that `to_hex` wrote."""
    return [int(text[first : first + 16], 16) for first in range(0, len(text), 16)]
