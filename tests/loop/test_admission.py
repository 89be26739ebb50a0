"""Admission and the choice of a batch, against arbitrary orders of finishing and crashes."""

import random
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from clew.loop.choose_batch import choose_batch
from clew.rollout.admission import may_start


def choose(step, finished, running, batch_groups=2, max_lag=2, late: Literal["wait", "train"] = "wait"):
    return choose_batch(
        step=step, finished=finished, running=running, batch_groups=batch_groups, max_lag=max_lag, late=late
    )


def test_admission_by_hand():
    assert may_start(waiting=0, running=0, remaining=100, max_lag=0, batch_groups=16) == 16
    assert may_start(waiting=10, running=20, remaining=100, max_lag=1, batch_groups=16) == 2
    assert may_start(waiting=16, running=0, remaining=100, max_lag=0, batch_groups=16) == 0
    assert may_start(waiting=3, running=2, remaining=8, max_lag=3, batch_groups=16) == 3
    assert may_start(waiting=40, running=0, remaining=100, max_lag=0, batch_groups=16) == 0


def test_oldest_admitted_first():
    choice = choose(3, {"g7": 2, "g5": 3, "g6": 2, "g9": 1}, {})
    assert choice.groups == ("g9", "g6") and choice.too_old == ()


def test_a_batch_that_is_not_complete_is_missing_groups():
    assert choose(0, {"g0": 0}, {"g1": 0}).groups == ()


def test_the_batch_waits_for_a_group_that_would_be_too_old():
    choice = choose(2, {"g3": 1, "g4": 1}, {"g2": 0})
    assert choice.groups == () and choice.too_old == ("g2",)
    assert choose(2, {"g3": 1, "g4": 1}, {"g2": 0}, late="train").groups == ("g3", "g4")
    assert choose(1, {"g3": 1, "g4": 1}, {"g2": 0}).groups == ("g3", "g4")


def test_the_batch_waits_when_more_would_be_due_than_the_next_batch_holds():
    """Three running groups of version 0 could, at step 1, be trained on in step 2 one by one, but not together."""
    choice = choose(1, {"g6": 1, "g7": 1}, {"g2": 0, "g3": 0, "g4": 0})
    assert choice.groups == () and set(choice.too_old) == {"g2", "g3", "g4"}


def test_what_is_late_already_and_finished_holds_nobody_up():
    assert choose(9, {"g1": 0, "g2": 0, "g3": 0}, {}).groups == ("g1", "g2")


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    batch_groups=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    late=st.sampled_from(["wait", "train"]),
    speed=st.sampled_from([0.05, 0.3, 0.9]),
    crashes=st.booleans(),
    rejects=st.booleans(),
)
def test_whatever_happens_lag_is_bounded_and_nothing_is_lost_or_used_twice(
    seed, batch_groups, max_lag, late, speed, crashes, rejects
):
    """Rollout, trainer, crashes and rejections take turns at random; groups finish in any order."""
    steps, draw = 8, random.Random(seed)
    inbox, running, committed, rejected, consumed_by = {}, {}, set(), set(), {}
    batch, step, published = None, 0, 0
    next_number, unsettled = 0, []
    for _ in range(50_000):
        event = draw.random()
        if event < 0.3:  # rollout looks: groups that a committed step names leave once its successor is published
            new = may_start(
                waiting=len(inbox),
                running=len(running),
                max_lag=max_lag,
                batch_groups=batch_groups,
                remaining=(steps - published) * batch_groups,
            )
            for _ in range(new):
                running[unsettled.pop(0) if unsettled else next_number] = published
                next_number = max(next_number, max(running) + 1)
        elif event < 0.3 + 0.4 * speed and running:
            group = draw.choice(sorted(running))
            version = running.pop(group)
            if rejects and draw.random() < 0.2:
                rejected.add(group)
            else:
                inbox[group] = version
        elif event < 0.72 and crashes and draw.random() < 0.02:  # rollout dies: what ran is made again, with its name
            unsettled = sorted(set(unsettled) | set(running))
            running = {}
        elif published == steps:
            break
        elif batch is None:
            finished = {str(g).zfill(6): v for g, v in inbox.items() if g not in committed}
            choice = choose_batch(
                step=step,
                finished=finished,
                max_lag=max_lag,
                late=late,
                batch_groups=batch_groups,
                running={str(g).zfill(6): v for g, v in running.items()},
            )
            batch = [int(g) for g in choice.groups] or None
        elif step == published and draw.random() < 0.5:
            for group in batch:
                assert group not in consumed_by and group not in rejected
                consumed_by[group] = step
                if late == "wait":
                    assert step - inbox[group] <= max_lag
            committed |= set(batch)
            step += 1
        elif step > published:
            published = step
        if step == published and batch is not None and committed.issuperset(batch):
            inbox = {g: v for g, v in inbox.items() if g not in committed}
            batch = None
    assert step == steps, "the run came to a standstill"
    assert len(consumed_by) == steps * batch_groups
    assert not inbox and not running, "more groups were started than the run consumes"
    assert set(consumed_by) | rejected == set(range(next_number)), "a group was lost"
