"""Plans: every row once, groups whole, budgets kept."""

import json

from hypothesis import given
from hypothesis import strategies as st

from clew.training.batching import pack, padding_share, plan_step

BATCHES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=60)


def test_by_hand():
    # 12: 3 rows of 4; the rows of 3 and 2 share the next
    assert pack([4, 2, 4, 3, 4], range(5), budget=12) == [[0, 2, 4], [3, 1]]
    assert plan_step([4, 2, 4, 3], ["a", "a", "b", "c"], minibatches=2, budget=100) == [[[0, 1]], [[2, 3]]]


def test_a_row_longer_than_the_budget_goes_alone():
    assert pack([50, 3, 50], range(3), budget=10) == [[0], [2], [1]]


def test_much_shorter_rows_do_not_join_a_large_micro_batch():
    lengths = [100] * 25 + [80] * 5 + [70] * 5
    assert pack(lengths, range(35), budget=16384) == [list(range(30)), list(range(30, 35))]
    few = [100] * 5 + [10] * 5
    assert pack(few, range(10), budget=16384) == [list(range(10))]


@given(batch=BATCHES, minibatches=st.integers(1, 5), budget=st.integers(1, 200))
def test_every_row_once_in_budget_and_groups_whole(batch, minibatches, budget):
    lengths, groups = [length for length, _ in batch], [f"g{group}" for _, group in batch]
    plan = plan_step(lengths, groups, minibatches=minibatches, budget=budget)
    assert sorted(row for minibatch in plan for rows in minibatch for row in rows) == list(range(len(batch)))
    for rows in (rows for minibatch in plan for rows in minibatch):
        assert rows and (len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget)
    groups_of = [{groups[row] for rows in minibatch for row in rows} for minibatch in plan]
    assert sum(map(len, groups_of)) == len(set(groups))  # no group is in two mini-batches
    sizes = [len(names) for names in groups_of]
    assert len(plan) == min(minibatches, len(set(groups))) and max(sizes) - min(sizes) <= 1
    assert json.loads(json.dumps(plan)) == plan
    assert 0 <= padding_share(lengths, plan) < 1
    first_seen = list(dict.fromkeys(groups))
    in_order = [name for names in groups_of for name in sorted(names, key=first_seen.index)]
    assert in_order == first_seen
