"""Decides when too many episodes have failed, and the run stops.

Stopping a healthy run is as bad as training a broken one, so the rule is a statistical test. Its unit is the group,
because the episodes of a group share a prompt and often fail together: a prompt that is too long fails all of them.

Let m be rollout.max_failed_share, and suppose that episodes fail at half that rate, q = m/2. Let S be the sum of the
failed shares of n groups. Each share lies in [0, 1] with mean q, however the episodes of a group depend on one another,
so Hoeffding's inequality holds for S (1963, theorem 1; Chernoff's bound if groups fail only as a whole)::

    P(S >= n x) <= exp(-n KL(x, q)),    KL(x, q) = x ln(x/q) + (1 - x) ln((1 - x)/(1 - q)),    x > q

After each group the last n groups are looked at, for every n up to a window of W. The run stops if n KL(S/n, q) >= h
for one of them. A look then stops a healthy run with a probability of at most W exp(-h). A step has `batch_groups`
looks, and up to as many again for rejected groups that are made anew. So h = ln(2 batch_groups W / FALSE_STOPS) makes a
false stop rarer than FALSE_STOPS a step. W is the number of groups at which the rule meets the limit itself,
W KL(m, m/2) = h. Over W groups, a share above m stops the run; over fewer, only a share so high that chance does not
explain it. For m = 0.2 and 16 groups a batch, that takes 422 groups at 20 %, 122 at 30 %, 37 at 50 %, and 9 if
everything fails.

While no episode has succeeded since the start, all looks together count as one: h = ln(1 / FALSE_STOPS), which is
4 groups for m = 0.2 and 14 for m = 1.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from clew.errors import RolloutError
from clew.record.run_warnings import kind_of

FALSE_STOPS = 1e-4
"""Upper bound of the false stops per step, if half as many episodes fail as rollout.max_failed_share allows."""


class FailureWatch:
    """Looks at the last groups and stops the run when too many of their episodes failed."""

    def __init__(self, max_share: float, batch_groups: int, where: str) -> None:
        """Watch one run. `where` is the folder with the failed episodes, for the message."""
        self._max_share = max_share
        self._where = where
        self.window, self._threshold = window_of(max_share, batch_groups)
        self._shares: deque[float] = deque(maxlen=self.window)
        self._errors: deque[list[str | None]] = deque(maxlen=self.window)
        self._succeeded = False

    def add(self, errors: Sequence[str | None]) -> None:
        """Take the outcomes of a group's episodes: the error of each, or None if it did not fail.

        Raises:
            RolloutError: Too many episodes failed.
        """
        failed = sum(error is not None for error in errors)
        self._shares.append(failed / len(errors))
        self._errors.append(list(errors))
        self._succeeded = self._succeeded or failed < len(errors)
        if failed and (groups := self._too_many()):
            raise RolloutError(self._message(list(self._errors)[-groups:]))

    def _too_many(self) -> int:
        """Return how many of the last groups show that too many episodes fail; 0 if they do not show it."""
        rate = self._max_share / 2
        numbers = np.arange(1, len(self._shares) + 1)
        evidence = numbers * divergence(np.cumsum(list(self._shares)[::-1]) / numbers, rate)
        if evidence.max() >= self._threshold or (not self._succeeded and evidence[-1] >= -math.log(FALSE_STOPS)):
            return int(evidence.argmax()) + 1
        return 0

    def _message(self, groups: list[list[str | None]]) -> str:
        episodes = [error for errors in groups for error in errors]
        failed = [error for error in episodes if error is not None]
        kinds = Counter(kind_of(each) for each in failed)
        kind, count = kinds.most_common(1)[0]
        example = next(each for each in failed if kind_of(each) == kind)
        more = len(kinds) - 1
        others = f"; there {'is 1 other kind' if more == 1 else f'are {more} other kinds'}" if more else ""
        too_long = ""
        if "RequestTooLong" in kind:
            too_long = " Set data.max_prompt_tokens to leave prompts out that are too long."
        return (
            f"Cannot go on: {len(failed)} of the last {len(episodes)} episodes failed ({len(groups)} groups). "
            f"rollout.max_failed_share={self._max_share:g} is the limit: repair the cause, or raise it.{too_long} The "
            f"most common error ({count} times{others}):\n\n{example.rstrip()}\n\n"
            f"Each failed episode is on record in {self._where}."
        )


def window_of(max_share: float, batch_groups: int) -> tuple[int, float]:
    """Return the window W, in groups, and the threshold h; see the top of this module."""
    if max_share == 0:
        return 1, 0.0
    at_the_limit = float(divergence(np.array([max_share]), max_share / 2)[0])
    window = 1
    while (threshold := math.log(2 * batch_groups * window / FALSE_STOPS)) > window * at_the_limit:
        window = math.ceil(threshold / at_the_limit)
    return window, threshold


def divergence(shares: np.ndarray, rate: float) -> np.ndarray:
    """Return KL(share, rate) in nats, and 0 where the share is not above the rate."""
    if rate == 0:
        return np.where(shares > 0, math.inf, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        others = np.where(shares < 1, (1 - shares) * np.log((1 - shares) / (1 - rate)), 0.0)
        return np.where(shares > rate, shares * np.log(shares / rate) + others, 0.0)
