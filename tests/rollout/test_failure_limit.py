"""The rule by which failed episodes stop a run: how rarely it stops a healthy one, and how soon a hopeless one."""

from __future__ import annotations

import math
import random

import pytest

from clew.errors import RolloutError
from clew.rollout.failure_limit import FALSE_STOPS, FailureWatch, window_of

BATCH, SAMPLES = 16, 8


def groups_until_stop(watch: FailureWatch, shares: list[float]) -> int:
    """Return how many groups it takes; each fails with that share of its episodes."""
    for number, share in enumerate(shares, start=1):
        failed = round(SAMPLES * share)
        try:
            watch.add(["RuntimeError: broken"] * failed + [None] * (SAMPLES - failed))
        except RolloutError:
            return number
    raise AssertionError(f"no stop in {len(shares)} groups")


def log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def tail(n: int, rate: float, at_least: int) -> float:
    """P(at least so many of n whole groups fail)."""
    log_pmf = (
        math.log(rate) * k + math.log1p(-rate) * (n - k) - math.log(n + 1) - log_beta(k + 1, n - k + 1)
        for k in range(at_least, n + 1)
    )
    return math.fsum(map(math.exp, log_pmf))


def kl(share: float, rate: float) -> float:
    pairs = ((share, rate), (1 - share, 1 - rate))
    return sum(part * math.log(part / other) for part, other in pairs if part)


@pytest.mark.parametrize("max_share", [0.1, 0.2, 0.5, 1.0])
def test_a_false_stop_is_rarer_than_one_in_ten_thousand_steps_at_half_the_limit(max_share: float) -> None:
    """Computed exactly for groups that fail as a whole, the worst case: a step has a look after each of its groups, and
    a look is at the last n groups, for each n of the window."""
    window, threshold = window_of(max_share, BATCH)
    rate = max_share / 2
    look, needed = 0.0, 1
    for n in range(1, window + 1):
        while needed <= n and (needed <= rate * n or n * kl(needed / n, rate) < threshold):
            needed += 1  # a longer window needs no fewer
        if needed <= n:
            assert needed >= max_share * n * (1 - 1e-9), "no share below the limit stops a run"
            look += tail(n, rate, needed)
    assert 0 < 2 * BATCH * look < FALSE_STOPS


@pytest.mark.parametrize("together", [False, True], ids=["episode by episode", "whole groups"])
def test_a_simulated_run_at_half_the_limit_goes_on(together: bool) -> None:
    """10 % of the episodes fail in 600 steps. The window of 64 episodes stopped four of four such runs."""
    draw, watch = random.Random(1), FailureWatch(0.2, BATCH, "rejected")
    for _ in range(600 * BATCH):
        whole = draw.random() < 0.1
        watch.add(
            ["RuntimeError: broken" if (whole if together else draw.random() < 0.1) else None for _ in range(SAMPLES)]
        )


@pytest.mark.parametrize(("share", "within"), [(1.0, 9), (0.75, 17), (0.5, 37), (0.25, 203), (0.2, None)])
def test_it_stops_the_sooner_the_more_fail_also_after_a_long_healthy_time(share: float, within: int | None) -> None:
    watch, odd = FailureWatch(0.2, BATCH, "rejected"), [0.25, 0.125] * 1000
    if within is None:
        with pytest.raises(AssertionError, match="no stop"):  # 18.75 % on average
            groups_until_stop(watch, odd)
        return
    for _ in range(5000):
        watch.add([None] * SAMPLES)
    assert groups_until_stop(watch, [share] * 1000) <= within


@pytest.mark.parametrize(("max_share", "groups"), [(0.2, 4), (0.05, 3), (0.5, 7), (1.0, 14), (0.0, 1)])
def test_where_nothing_ever_succeeded_it_stops_at_once(max_share: float, groups: int) -> None:
    assert groups_until_stop(FailureWatch(max_share, BATCH, "rejected"), [1.0] * 99) == groups


def test_the_message_says_how_many_the_most_common_error_and_which_setting_to_raise() -> None:
    watch = FailureWatch(0.2, BATCH, "runs/a/0/rejected")
    with pytest.raises(RolloutError) as raised:
        for number in range(9):
            watch.add([f"RequestTooLong: {number} tokens\nTraceback"] * 5 + ["KeyError: 'x'"] * 3)
    said = str(raised.value)
    assert said.startswith(
        "Cannot go on: 32 of the last 32 episodes failed (4 groups). rollout.max_failed_share=0.2 is the limit: repair "
        "the cause, or raise it. Set data.max_prompt_tokens to leave prompts out that are too long. The most common "
        "error (20 times; there is 1 other kind):\n\nRequestTooLong: 0 tokens\nTraceback"
    )
    assert said.endswith("Each failed episode is on record in runs/a/0/rejected.")
