"""Digests: every bit and place counts; the way an array is split does not."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clew.record import rows
from clew.record.array_digest import digest_array, digest_arrays
from clew.record.batch_digest import digest_rows
from tests.record.test_rows import a_sequence

BLOCK = 65536
arrays = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False))


def test_a_number_worked_out_by_hand() -> None:
    """One element, zero: (0 + 1) * mix(0) * mix(0) * salt, with splitmix64's first output for seed 0, made odd."""
    mixed = 0xE220A8397B1DCDAF | 1
    salt = int.from_bytes(hashlib.blake2b(b"w:<u4", digest_size=8).digest(), "little") | 1
    assert digest_array(np.zeros(1, np.uint32), name="w") == mixed * mixed * salt % 2**64


@given(arrays, st.data())
def test_one_flipped_bit_changes_it(array: np.ndarray, data: st.DataObject) -> None:
    before = digest_array(array)
    place, bit = data.draw(st.integers(0, array.size - 1)), data.draw(st.integers(0, 31))
    array.view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert digest_array(array) != before


@given(arrays)
def test_the_order_of_elements_counts(array: np.ndarray) -> None:
    turned = array[::-1]
    same_bits = np.array_equal(turned.copy().view(np.uint32), array.view(np.uint32))
    assert (digest_array(turned) == digest_array(array)) == same_bits


def test_pieces_add_up_to_the_whole() -> None:
    whole = np.random.default_rng(0).standard_normal(3 * BLOCK + 77).astype(np.float32)
    pieces = [(0, BLOCK), (BLOCK, 3 * BLOCK), (3 * BLOCK, whole.size)]
    added = sum(digest_array(whole[first:last], name="w", start=first) for first, last in pieces) % 2**64
    assert added == digest_array(whole, name="w")


def test_names_and_types_count() -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)
    assert digest_arrays([("a", a), ("b", b)]) == digest_arrays([("b", b), ("a", a)])
    assert digest_arrays([("a", a), ("b", b)]) != digest_arrays([("a", b), ("b", a)])
    assert digest_array(a) != digest_array(a.view(np.int32))
    assert digest_array(np.array([0.0])) != digest_array(np.array([-0.0]))


@pytest.mark.parametrize(
    ("changes", "data", "origin"),
    [
        ({}, False, False),
        ({"admitted_at": 7.0, "consumed_at": 8.0, "admitted_version": 9}, False, False),
        ({"interactions": [{"id": "a.i0", "seed": 7, "started_at": 5.0, "finished_at": 6.0}]}, False, False),
        ({"reward": 0.25}, True, False),
        ({"images": ["0" * 32]}, True, False),
        ({"logprobs": np.array([0, -0.0], np.float32)}, True, False),
        ({"group_id": "g000001"}, False, True),
        ({"episode_id": "g000001.e0"}, False, True),
        ({"turn_ids": np.array([-1, 1], np.int32)}, False, True),
        ({"finish_reason": "length"}, False, True),
        ({"rewards": {"other": 1.0}}, False, True),
        ({"data": {"prompt": "2+1="}}, False, True),
        ({"interactions": [{"id": "i0", "output_tokens": 2}]}, False, True),
    ],
)
def test_each_column_of_a_row_counts_in_one_of_its_digests(changes: dict[str, Any], data: bool, origin: bool) -> None:
    row = dataclasses.replace(a_sequence("a", 2), turn_ids=np.array([-1, 0], np.int32))
    before, after = (digest_rows([each])["a"] for each in (row, dataclasses.replace(row, **changes)))
    assert (before.data != after.data, before.origin != after.origin) == (data, origin)


def test_a_row_that_is_read_has_the_digests_that_it_was_written_with() -> None:
    odd = {"surrogate": "\ud800", "large": 2**80, "nan": float("nan"), "tenth": 0.1, "nested": [{"é": None}]}
    written = dataclasses.replace(a_sequence("a"), data=odd, interactions=[odd], rewards={"ü": 1e300})
    [read] = rows.from_table(rows.to_table([written]))
    assert digest_rows([read]) == digest_rows([written])


def test_an_origin_worked_out_by_hand() -> None:
    """The digest must not change with a library that writes 6.02e23 or non-ASCII characters differently."""
    row = dataclasses.replace(
        a_sequence("a", 2), data={"ü": 6.02e23, "tiny": 1e-7}, turn_ids=np.array([-1, 0], np.int32)
    )
    text = (
        b'["a", "a", "stop", {"exact": 0.5}, {"\\u00fc": 6.02e+23, "tiny": 1e-07}, [{"id": "a.i0", "seed": 7}]]'
        b"\xff\xff\xff\xff\x00\x00\x00\x00"
    )
    expected = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    assert digest_rows([row])["a"].origin == expected
