"""Plans: every row once, groups whole, budgets kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.training.batching import pack, padding_share, plan_step

BATCHES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=60)


def test_by_hand():
    # 12: 3 rows of 4; the rows of 3 and 2 share the next
    assert pack([4, 2, 4, 3, 4], range(5), budget=12, packed=False) == [[0, 2, 4], [3, 1]]
    # padded to 4, the row of 3 has no room beside two of 4; packed it takes 3 of 11
    assert pack([4, 2, 4, 3, 4], [0, 1, 2, 3], budget=11, packed=False) == [[0, 2], [3, 1]]
    assert pack([4, 2, 4, 3, 4], [0, 1, 2, 3], budget=11, packed=True) == [[0, 2, 3], [1]]
    plan = plan_step([4, 2, 4, 3], ["a", "a", "b", "c"], minibatches=2, budget=100, packed=False)
    assert plan == [[[0, 1]], [[2, 3]]]
    assert padding_share([4, 2, 4, 3], plan, packed=False) == 1 - 13 / 16
    assert padding_share([4, 2, 4, 3], plan, packed=True) == 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_longer_than_the_budget_goes_alone(packed):
    assert pack([50, 3, 50], range(3), budget=10, packed=packed) == [[0], [2], [1]]


def test_much_shorter_rows_do_not_join_a_large_micro_batch_unless_packed():
    lengths = [100] * 25 + [80] * 5 + [70] * 5
    padded = pack(lengths, range(35), budget=16384, packed=False)
    assert padded == [list(range(30)), list(range(30, 35))]
    few = [100] * 5 + [10] * 5
    assert pack(few, range(10), budget=16384, packed=False) == [list(range(10))]
    assert pack(lengths, range(35), budget=16384, packed=True) == [list(range(35))]


@given(batch=BATCHES, minibatches=st.integers(1, 5), budget=st.integers(1, 200), packed=st.booleans())
def test_every_row_once_in_budget_and_groups_whole(batch, minibatches, budget, packed):
    lengths, groups = [length for length, _ in batch], [f"g{group}" for _, group in batch]
    plan = plan_step(lengths, groups, minibatches=minibatches, budget=budget, packed=packed)
    assert sorted(row for minibatch in plan for rows in minibatch for row in rows) == list(range(len(batch)))
    for rows in (rows for minibatch in plan for rows in minibatch):
        taken = [lengths[row] for row in rows]
        assert rows and (len(rows) == 1 or (sum(taken) if packed else len(rows) * max(taken)) <= budget)
        assert taken == sorted(taken, reverse=True)
    groups_of = [{groups[row] for rows in minibatch for row in rows} for minibatch in plan]
    assert sum(map(len, groups_of)) == len(set(groups))  # no group is in two mini-batches
    sizes = [len(names) for names in groups_of]
    assert len(plan) == min(minibatches, len(set(groups))) and max(sizes) - min(sizes) <= 1
    assert json.loads(json.dumps(plan)) == plan
    assert 0 <= padding_share(lengths, plan, packed=False) < 1
    first_seen = list(dict.fromkeys(groups))
    in_order = [name for names in groups_of for name in sorted(names, key=first_seen.index)]
    assert in_order == first_seen
