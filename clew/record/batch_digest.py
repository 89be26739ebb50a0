"""Digests of batches: two for each row (its data and its origin), and one for all that a step is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np

from clew.record.array_digest import MASK, digest_arrays, mix, salt
from clew.record.rows import ENCODER, MASKS, Sequence, timeless


class RowDigest(NamedTuple):
    """Two digests of one row of training tokens."""

    data: int
    """Digest of what the model is trained on: tokens, mask, logprobs, versions, temperatures, sampling masks, reward,
    images."""
    origin: int
    """Digest of where the row comes from: group, episode, turns, finish reason, rewards by name, the prompt's row,
    interactions."""


def digest_rows(batch: SequenceABC[Sequence]) -> dict[str, RowDigest]:
    """Return the digests of each row, by its ID.

    They cover all columns but times, the admitted version, `error`, `sampled_by` and `routed_experts`.
    """
    of_data = zip((row.id for row in batch), _digests_of_data(batch), strict=True)
    return {name: RowDigest(data, _digest_of_origin(row)) for (name, data), row in zip(of_data, batch, strict=True)}


def _digest_of_origin(row: Sequence) -> int:
    """Return the digest of where a row comes from.

    It is the digest of JSON that Python's own library writes: other libraries may write some numbers differently from
    one version to the next.
    """
    interactions = list(map(timeless, row.interactions))
    origin = (row.group_id, row.episode_id, row.finish_reason, row.rewards, row.data, interactions)
    content = ENCODER.encode(origin).encode() + row.turn_ids.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _digests_of_data(batch: SequenceABC[Sequence]) -> list[int]:
    starts = np.cumsum([0, *(len(row.input_ids) for row in batch)])
    lengths = np.diff(starts)
    position_S = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    mixed_S = mix(np.arange(lengths.max(initial=0), dtype=np.uint64))[position_S]
    digests = (lengths.astype(np.uint64) + np.uint64(1)) * np.uint64(salt("length", "<u8"))
    digests += (np.array([row.reward for row in batch]).view(np.uint64) + np.uint64(1)) * np.uint64(
        salt("reward", "<f8")
    )
    if any(row.images for row in batch):
        digests += np.array([digest_images(row.images) for row in batch], np.uint64)
    for name in ("input_ids", "loss_mask", "logprobs", "versions", "temperatures"):
        flat_S = np.concatenate([getattr(row, name) for row in batch])
        bits_S = flat_S.view(f"u{flat_S.dtype.itemsize}").astype(np.uint64)
        # Sums up to each token, so that the sum of a row is one subtraction. + 1: a token 0 counts, too.
        sums = np.concatenate([[np.uint64(0)], np.cumsum((bits_S + np.uint64(1)) * mixed_S, dtype=np.uint64)])
        digests += (sums[starts[1:]] - sums[starts[:-1]]) * np.uint64(salt(name, flat_S.dtype.str))
    masks = [
        0 if row.sampling_mask_ids is None else int(digest_arrays((name, getattr(row, name)) for name in MASKS), 16)
        for row in batch
    ]  # 0: rows without a mask have the digests that they had before there were masks
    return (digests + np.array(masks, np.uint64)).tolist()


def digest_images(names: SequenceABC[str]) -> int:
    """Return the digest of the images of a row, which are named by their content; 0 if there are none."""
    return sum(salt(f"image {place} {name}", "<u8") for place, name in enumerate(names)) & MASK


def digest_batch(digests: Mapping[str, RowDigest]) -> str:
    """Return the digest of what the model is trained on in a batch, given the result of `digest_rows`."""
    return digest_arrays([("rows", np.array([each.data for each in digests.values()], np.uint64))])


def to_hex(digests: Iterable[int]) -> str:
    """Return the digests one after the other, 16 hexadecimal digits each."""
    return "".join(f"{digest:016x}" for digest in digests)


def from_hex(text: str) -> list[int]:
    """Return the digests that `to_hex` wrote."""
    return [int(text[first : first + 16], 16) for first in range(0, len(text), 16)]
