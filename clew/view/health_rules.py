"""Health check of a run: what deserves a look, why, and the command to type next.

Each concern is found by a pure function of the steps' recorded numbers, which returns None if all is well.
If other trainers warn about the same thing, the thresholds are theirs.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clew.algorithms import ADVANTAGES, WITHIN_GROUP
from clew.algorithms.reward_statistics import CONTRADICTS, SAME
from clew.printing import counted
from clew.record.chain import is_unknown
from clew.record.rejected import Rejected
from clew.record.run_warnings import RunWarning, warnings_in_words

HABIT_SHARE = 0.1
"""Minimum share of all steps in which something must be seen to count as a habit. Most concerns need a habit."""
NEWEST_STEPS, NEWEST_SHARE = 10, 0.5
"""Number of newest steps, and the share of them that is enough for a habit, whatever the older steps show."""
EQUAL_GROUPS = 0.5
"""Share of groups with equal rewards above which a step counts as having taught little."""
TRUNCATED = 0.1
"""Share of a step's episodes cut off at a limit, above which the step counts as truncated."""
LAG = 8
"""Largest lag, in versions, that is no concern, even if rollout.max_lag is larger; AReaL (2505.24298) has up to 8."""
K3_WITHOUT_LAG = 1e-3
"""Mismatch (behaviour_k3) at a lag of 0 above which engine and trainer disagree about the same weights. NeMo RL expects
`gen_kl_error` to be about that large."""
K3 = 0.015
"""Mismatch at any lag that is a concern; prime-rl expects `mismatch_kl` to stay below this."""
CLIPPED = {"token": 0.2, "sequence": 0.5}
"""Share of clipped tokens above which it is a concern, by algorithm.ratio. GSPO's narrow bounds clip many tokens
(2507.18071, section 5.3)."""
REJECTED_TOKENS, ALMOST_ALL = 0.5, 0.9
"""Shares of rejected tokens: the first is a concern as a habit, the second even in a single step. The second is also
the share of truncated episodes at which the concern mentions a wrong end token."""
SPIKE = 10.0
"""Multiple of the usual gradient norm, if training.spike_factor is not set."""
RECENT_NORMS, ENOUGH_NORMS = 32, 8
"""Maximum and minimum number of earlier steps that define the usual gradient norm, as for training.spike_factor."""
JUMP, MIN_NORMS = 30.0, 3
"""Multiple of the usual norm above which a norm is a spike even if most later norms are as large, or if fewer than
`ENOUGH_NORMS` steps came before; and the minimum number of steps that must come before any spike."""
NO_GRADIENT = 1e-7
"""Largest norm of a gradient that is only rounding, as for training.spike_factor."""
FAILED_EPISODES = 0.01
FILTERED_GROUPS = 0.5
"""Shares of failed episodes and of filtered groups above which they are a concern."""
AROUND_EVALUATION = 10
"""Number of steps before an evaluation over which the training reward is averaged."""
FALLEN = 0.1
"""Minimum fall of the reward, or of evaluations without intervals, that is a concern, as a share of the best value."""
WINDOW, OF_STEPS = 10, 0.05
"""Length of the windows that rewards are averaged in: minimum, and share of the run. Few such windows fit into a run,
so the best of them is not far above the others by chance."""
BY_CHANCE = 7.0
"""Number of standard errors by which the newest window may be below the best one by chance."""
AT_ONCE, LASTING = 0.5, 3.0
"""Minimum fall of the reward at a single step, as a share of its mean over the steps before; and the number of
standard errors that replaces `BY_CHANCE` if the reward stays down in all later steps. There must be at least that
number of later steps, too."""

WATCHED = {
    "reward": "rewards",
    "reward_std": "",
    "groups": "",
    "episodes": "",
    "equal_groups_share": "equal rewards",
    "truncated_share": "truncation",
    "lag_max": "lag",
    "behaviour_k3": "mismatch",
    "clip_share": "clipping",
    "rejected_share": "",
    "grad_norm": "gradients",
    "updates_skipped": "",
    "advantage_reward_correlation": "",
    "critic/loss": "",
}
"""Metrics that are kept of each step. The value names the check that is reported as not made if no step has the
metric; "": nothing is reported."""


@dataclass(frozen=True, kw_only=True)
class Concern:
    """Something about a run that deserves a look."""

    cause: str
    evidence: str
    then: str
    """Arguments of the command to type next, with RUN for the run."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Metrics and timings of all committed steps."""

    steps: np.ndarray
    """Numbers of the steps [N], in order."""
    metrics: dict[str, np.ndarray]
    """Metrics `WATCHED`, [N] float64 each; NaN where a step does not have the metric, or where it is not finite."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Sums of the steps' timings over the run."""

    def has(self, name: str) -> bool:
        """Return whether any step has the metric."""
        return bool(np.isfinite(self.metrics[name]).any())

    def unjudged(self) -> list[str]:
        """Return what cannot be judged because no step has the metric for it."""
        return [cause for name, cause in WATCHED.items() if cause and not self.has(name)]


class Collector:
    """Collects the few numbers of each step that the health check needs.

    The check of the chain calls it with each step, so that the steps are read only once.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Any]] = {}
        self._seconds: dict[str, float] = {}

    def __call__(self, step: int, content: Mapping[str, Any]) -> None:
        """Keep the metrics of a step's JSON, whose values may be of any type. This must be fast: there may be ten
        thousand steps."""
        if is_unknown(content):
            return
        metrics, timings = content.get("metrics"), content.get("timings")
        if isinstance(metrics, dict):
            self._rows[step] = list(map(metrics.get, WATCHED))
        for name, value in timings.items() if isinstance(timings, dict) else ():
            if type(value) is float and 0 < value < math.inf:
                self._seconds[name] = self._seconds.get(name, 0.0) + value

    def history(self) -> History:
        steps = sorted(self._rows)
        rows = [self._rows[step] for step in steps]
        try:
            table = np.array(rows, np.float64)  # None becomes NaN
        except (TypeError, ValueError, OverflowError):
            table = np.array([[_number(value) for value in row] for row in rows])
        columns = np.where(np.isfinite(table), table, np.nan).reshape(len(steps), len(WATCHED)).T
        return History(
            steps=np.array(steps, np.int64),
            metrics=dict(zip(WATCHED, columns, strict=True)),
            seconds=dict(sorted(self._seconds.items(), key=lambda item: -item[1])),
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


# Causes ---------------------------------------------------------------------------------------------------------------


def equal_steps(history: History, advantages: str) -> list[int]:
    """Return the steps that taught little because rewards were equal; empty if it is not a habit.

    Advantages within groups, and a user's own without a critic, need rewards that differ within a group; the others
    need rewards that differ within the batch.
    """
    own_without_critic = advantages not in ADVANTAGES and not history.has("critic/loss")
    if advantages in WITHIN_GROUP or own_without_critic:
        equal = history.metrics["equal_groups_share"] > EQUAL_GROUPS
    else:
        equal = history.metrics["reward_std"] <= SAME
    return history.steps[equal].tolist() if _is_habit(equal) else []


def equal_rewards(history: History, steps: Sequence[int], kinds: Mapping[float, int], looked: str) -> Concern | None:
    """Return the concern that too many groups teach nothing.

    Args:
        steps: Result of `equal_steps`.
        kinds: Number of groups whose episodes all have the same reward, by that reward.
        looked: Words that name the steps in which these groups were counted.
    """
    if not steps:
        return None
    share = history.metrics["equal_groups_share"][np.searchsorted(history.steps, steps[-1])]
    newest = f"; newest: {_percent(share)} at step {steps[-1]}" if math.isfinite(share) else ""
    which = Counter(kinds).most_common(4)
    apart = f". {looked}: {', '.join(f'{count} groups all {reward:g}' for reward, count in which)}" if which else ""
    return Concern(
        cause="equal rewards",
        evidence=f"{_where(steps, len(history.steps))}, most groups had equal rewards, which teach nothing"
        f"{newest}{apart}",
        then=f"show RUN {steps[-1]}",
    )


def truncation(history: History) -> Concern | None:
    cut = history.metrics["truncated_share"] > TRUNCATED
    what = f"more than {_percent(TRUNCATED)} of the episodes were cut off at sampling.max_new_tokens or another limit"
    if (history.metrics["truncated_share"] >= ALMOST_ALL).any():
        what += " (nearly all: the limit is too small, or the model ends its answers with another token)"
    return _above(history, "truncation", "truncated_share", cut, what)


def lag(history: History, max_lag: int | None) -> Concern | None:
    """Return the concern that tokens are older than rollout.max_lag allows, or older than `LAG` versions."""
    highest = LAG if max_lag is None else min(max_lag, LAG)
    which = f"rollout.max_lag={max_lag}" if highest == max_lag else f"{LAG} versions"
    older = history.metrics["lag_max"] > highest
    return _above(history, "lag", "lag_max", older, f"tokens lag behind by more than {which}")


def mismatch(history: History) -> Concern | None:
    """Return the concern that the policy that sampled is far from the one at the start of the step."""
    k3, fresh = history.metrics["behaviour_k3"], history.metrics["lag_max"] == 0
    then = "blame RUN --step {} --by behaviour_k3"
    what = f"behaviour_k3 is above {K3_WITHOUT_LAG:g} at a lag of 0: engine and trainer disagree about the same weights"
    found = _above(history, "mismatch", "behaviour_k3", fresh & (k3 > K3_WITHOUT_LAG), what, then)
    what = (
        f"behaviour_k3 is above {K3:g}: the policy that sampled is far from the one that is trained (if tokens lag, "
        f"lower training.lr or rollout.max_lag)"
    )
    return found or _above(history, "mismatch", "behaviour_k3", k3 > K3, what, then)


def clipping(history: History, ratio: str, loss: str) -> Concern | None:
    limit = CLIPPED.get(ratio, CLIPPED["token"])
    clipped = history.metrics["clip_share"] > limit
    effect = ", and so have no gradient" if loss == "clip" else ""  # CISPO clips weights, and keeps the gradient
    what = f"more than {_percent(limit)} of the tokens are clipped{effect}"
    return _above(history, "clipping", "clip_share", clipped, what, "blame RUN --step {}")


def rejected_tokens(history: History) -> Concern | None:
    """Return the concern that steps rejected most of their tokens.

    Without algorithm.reject and the like, no step has the metric, and there is no concern.
    """
    share = history.metrics["rejected_share"]
    by = "of the tokens were rejected by algorithm.reject, veto or off_policy_delta, and taught nothing"
    cause, name = "rejected tokens", "rejected_share"
    habit = _above(history, cause, name, share > REJECTED_TOKENS, f"more than {_percent(REJECTED_TOKENS)} {by}")
    what = f"at least {_percent(ALMOST_ALL)} {by}"
    return habit or _above(history, cause, name, share >= ALMOST_ALL, what, one_is_enough=True)


def gradients(history: History, factor: float | None, *, supervised: bool = False) -> Concern | None:
    """Return the concern that the gradient spiked, or that updates were left out.

    Args:
        factor: Value of training.spike_factor; None: `SPIKE`.
        supervised: True for a run of `clew sft`, which `clew blame` does not accept.
    """
    spikes = find_spikes(history, factor or SPIKE)
    skipped = np.nan_to_num(history.metrics["updates_skipped"])
    parts, steps = [], list(spikes)
    if spikes:
        worst = max(spikes, key=lambda step: spikes[step][0] / spikes[step][1])
        norm, usual = spikes[worst]
        parts.append(
            f"{_where(list(spikes), len(history.steps))}, the norm is over {factor or SPIKE:g} times the median of the "
            f"steps before; worst: {norm:.4g} at step {worst}, where {usual:.4g} is usual"
        )
        steps = [worst]
    if skipped.any():
        of_skipped = history.steps[skipped > 0].tolist()
        parts.append(f"{skipped.sum():.0f} updates were left out ({_where(of_skipped, len(history.steps))})")
        steps = steps or of_skipped
    if not parts:
        return None
    then = f"show RUN {steps[0]}" if supervised else f"blame RUN --step {steps[0]}"
    return Concern(cause="gradients", evidence="; ".join(parts), then=then)


def find_spikes(history: History, factor: float) -> dict[int, tuple[float, float]]:
    """Return the steps whose gradient norm is a spike, with the norm and the usual norm at that step.

    A spike is above `factor` times the usual norm, which is the median of the recent steps, and above `factor` times
    the median of the whole run. Above `JUMP` times the usual norm, the whole run does not matter. If fewer than
    `ENOUGH_NORMS` steps came before, only a `JUMP` counts, and their maximum is the usual norm.

    Steps with norms of almost 0 (their rewards were equal) are left out: otherwise the step after them would count as
    a spike.
    """
    usable = history.metrics["grad_norm"] > NO_GRADIENT
    norms, steps = history.metrics["grad_norm"][usable], history.steps[usable]
    spikes = {}
    # The usual norm is at least the lowest norm so far, so this cheap comparison leaves few steps to look at.
    lowest = np.minimum.accumulate(norms)
    for place in np.flatnonzero(norms[MIN_NORMS:] > factor * lowest[MIN_NORMS - 1 : -1]) + MIN_NORMS:
        recent = norms[max(0, place - RECENT_NORMS) : place]
        enough = len(recent) >= ENOUGH_NORMS
        usual = float(np.median(recent) if enough else recent.max())
        stands_out = enough and norms[place] > factor * max(usual, float(np.median(norms)))
        if stands_out or norms[place] > max(JUMP, factor) * usual:
            spikes[int(steps[place])] = (float(norms[place]), usual)
    return spikes


def contradiction(history: History) -> Concern | None:
    """Return the concern that a user's own advantages do not follow the rewards."""
    correlation = history.metrics["advantage_reward_correlation"]
    known = correlation[np.isfinite(correlation)]
    if not len(known) or known.mean() > CONTRADICTS:
        return None
    lowest = int(history.steps[np.nanargmin(correlation)])
    return Concern(
        cause="advantages",
        evidence=f"within groups, advantages and rewards have a correlation of {known.mean():.2f} (mean of "
        f"{len(known)} steps), so better answers are not made likelier; lowest: {known.min():.2f} at step {lowest}. "
        f"Check that algorithm.advantages returns its numbers in the order of the sequences",
        then=f"replay RUN --step {lowest} --break advantages",
    )


def rejections(rejected: Rejected, history: History) -> Concern | None:
    parts, example = [], ""
    failed, filtered = rejected.episodes.total(), rejected.filtered_groups.total()
    trained, groups = (float(np.nansum(history.metrics[name])) for name in ("episodes", "groups"))
    if failed > FAILED_EPISODES * (failed + trained):
        [(kind, count)] = rejected.episodes.most_common(1)
        whole = f", and {rejected.failed_groups} whole groups with them" if rejected.failed_groups else ""
        more = len(rejected.episodes) - 1
        others = f", and {counted(more, 'other kind')} of error" if more else ""
        parts.append(f"{_of(failed, failed + trained, 'episodes')} failed{whole}: {count} times {kind}{others}")
        example = rejected.examples.get(kind, "")
    if filtered > FILTERED_GROUPS * (filtered + groups):
        why = ", ".join(f"{count} for {reason}" for reason, count in rejected.filtered_groups.most_common(3))
        parts.append(f"{_of(filtered, filtered + groups, 'groups')} were left out: {why}")
        example = example or rejected.examples.get(rejected.filtered_groups.most_common(1)[0][0], "")
    return Concern(cause="rejected", evidence="; ".join(parts), then=f"show RUN {example}".strip()) if parts else None


def warnings(warned: Sequence[RunWarning], last: int) -> Concern | None:
    """Return the concern that there are warnings. `last` is the number of the last committed step."""
    if not warned:
        return None
    which = f"{counted(len(warnings_in_words(list(warned))), 'kind')} of warning, listed above"
    steps = [one.step for one in warned if one.step is not None and 0 <= one.step <= last]
    return Concern(cause="warnings", evidence=which, then=f"show RUN {steps[-1]}" if steps else "status RUN")


def reward(history: History, changes: Sequence[tuple[int, str]] = ()) -> Concern | None:
    """Return the concern that the training reward fell, with the step and a change of the configuration near it."""
    there = np.isfinite(history.metrics["reward"])
    rewards, steps = history.metrics["reward"][there], history.steps[there]
    window = max(WINDOW, int(OF_STEPS * len(rewards)))
    found = _fall_of_means(rewards, steps, window)
    if found is None:
        errors = history.metrics["reward_std"] / np.sqrt(np.maximum(1, history.metrics["groups"]))
        found = _fall_at_once(rewards, steps, errors[there])
    if found is None:
        return None
    words, fell = found
    near = [f"{words} from step {step} on" for step, words in changes if abs(fell - step) <= window]
    changed = f". The configuration changed there: {near[-1]}" if near else ""
    return Concern(cause="reward", evidence=f"the training reward fell {words}{changed}", then=f"show RUN {fell}")


def _fall_of_means(rewards: np.ndarray, steps: np.ndarray, window: int) -> tuple[str, int] | None:
    """Return, as text, how far the newest window's mean is below the best, and the step of the fall; or None.

    The noise is estimated from differences between successive steps, so a steady rise adds little to it.
    """
    if len(rewards) < 2 * window:
        return None
    sums = np.concatenate([[0.0], np.cumsum(rewards)])
    means = (sums[window:] - sums[:-window]) / window  # means[i] is that of the window that begins at i
    best, newest = int(np.argmax(means)), len(means) - 1
    # The difference of two rewards has twice the variance of one, hence the 2; a mean over a window has 1/window of it.
    noise = float(np.diff(rewards).std()) / math.sqrt(2 * window)
    if means[best] - means[newest] <= max(FALLEN * abs(means[best]), BY_CHANCE * noise):
        return None
    fell = int(steps[best + _split(rewards[best:])])
    words = (
        f"from {means[best]:.3f} (steps {steps[best]} to {steps[best + window - 1]}) to {means[newest]:.3f} "
        f"(steps {steps[newest]} to {steps[-1]}), about at step {fell}"
    )
    return words, fell


def _fall_at_once(rewards: np.ndarray, steps: np.ndarray, errors: np.ndarray) -> tuple[str, int] | None:
    """Return, as text, the largest fall from the mean of the steps before to a single step, and that step; or None.

    The noise of a step is estimated from the steps before it or, if they are few, from the spread of the rewards
    within each of them.

    Args:
        errors: Standard errors of the steps' rewards [N]; NaN where unknown.
    """
    falls = {}
    for place in range(1, len(rewards)):
        recent = rewards[max(0, place - RECENT_NORMS) : place]
        level = float(recent[-WINDOW:].mean())
        fall = level - float(rewards[place])
        if fall <= AT_ONCE * abs(level):
            continue
        after = rewards[place:]
        lasts = len(after) > LASTING and after.max() < level - AT_ONCE * abs(level)
        if len(recent) >= ENOUGH_NORMS:
            noise = float(np.diff(recent).std()) / math.sqrt(2)
        else:
            # Variances add up: 1 / place for the mean of the steps before, and 1 for this step, unless later steps
            # confirm the fall.
            noise = float(errors[:place].max()) * math.sqrt(1 / place + (not lasts))
        if fall > (LASTING if lasts else BY_CHANCE) * noise:  # False if the noise is unknown
            falls[place] = fall, level
    if not falls:
        return None
    place = max(falls, key=lambda place: falls[place])
    level, newest = falls[place][1], f"; {rewards[-1]:.3f} in the newest" if place < len(rewards) - 1 else ""
    words = f"at once from {level:.3f} (the steps before) to {rewards[place]:.3f} at step {steps[place]}{newest}"
    return words, int(steps[place])


def negative_rewards(history: History, highest: float) -> Concern | None:
    """Return the concern that no episode gets a reward above 0, as if the sign of the reward were wrong.

    `highest` is the highest reward of an episode of the newest step; NaN if it is unknown.
    """
    rewards = history.metrics["reward"]
    if not (history.has("reward") and highest <= 0 and np.nanmax(rewards) <= 0 and np.nanmin(rewards) < 0):
        return None
    return Concern(
        cause="negative rewards",
        evidence=f"no episode of step {history.steps[-1]} has a reward above 0, and no step a mean above 0 (lowest: "
        f"{np.nanmin(rewards):.3g}). If your reward is no penalty or distance, check its sign",
        then=f"show RUN {history.steps[-1]}",
    )


def _split(values: np.ndarray) -> int:
    """Return the index that splits the values into two parts with the least squared distances from their means."""
    before = np.arange(1, len(values))
    after = len(values) - before
    sums = np.cumsum(values)
    apart = sums[:-1] / before - (sums[-1] - sums[:-1]) / after
    # The squared distances from the mean of all values add up to a fixed sum: what lies between the two parts' means,
    # plus what is left within the parts. The split that maximises the former minimises the latter.
    return int(np.argmax(apart**2 * before * after)) + 1


def evaluations(history: History, evals: Sequence[Mapping[str, Any]]) -> Concern | None:
    """Return the concern that evaluations fell.

    The evidence says how the training reward changed meanwhile: if it rose, the model overfits. If it fell as well,
    the next command shows the step near which it fell.
    """
    name = "pass@1" if all("pass@1" in one for one in evals) else "reward"
    known = [one for one in evals if math.isfinite(_number(one.get(name)))]
    if len(known) < 2:
        return None
    best, newest = max(known, key=lambda one: one[name]), known[-1]
    high, low = float(best[name]), float(newest[name])
    if high - low <= _margin(name, best, newest):
        return None
    versions = int(best["version"]), int(newest["version"])
    beside, look = _reward_between(history, *versions)
    return Concern(
        cause="evaluations",
        evidence=f"{name} fell from {high:.3f} at version {versions[0]} to {low:.3f} at version {versions[1]}{beside}",
        then=f"show RUN {look if look is not None else f'--steps {versions[0]}:{versions[1]}'}",
    )


def _margin(name: str, best: Mapping[str, Any], newest: Mapping[str, Any]) -> float:
    """Return the largest fall that may be chance: half the width of a 95 % interval of the difference."""
    margin = math.hypot(_half_interval(name, best), _half_interval(name, newest))
    return margin if math.isfinite(margin) else FALLEN * abs(float(best[name]))


def _half_interval(name: str, evaluation: Mapping[str, Any]) -> float:
    """Return half the width of a 95 % interval on record; NaN if there is none that can be read."""
    intervals = evaluation.get("intervals")
    bounds = intervals.get(name) if isinstance(intervals, Mapping) else None
    if not isinstance(bounds, list) or len(bounds) != 2:
        return math.nan
    return (_number(bounds[1]) - _number(bounds[0])) / 2


def _reward_between(history: History, *versions: int) -> tuple[str, int | None]:
    """Return, as text, how the training reward changed between two versions, and the step near which it fell, or None.

    The means of the steps before each version are compared; for a version near the start, those of the first steps.
    """
    known = np.isfinite(history.metrics["reward"])
    rewards, steps = history.metrics["reward"][known], history.steps[known]
    if not len(rewards):
        return "", None
    ends = [max(int(np.searchsorted(steps, version)), min(AROUND_EVALUATION, len(steps))) for version in versions]
    starts = [max(0, end - AROUND_EVALUATION) for end in ends]
    means = [float(rewards[start:end].mean()) for start, end in zip(starts, ends, strict=True)]
    if starts[0] == starts[1]:
        return "", None
    of_steps = (
        f"{mean:.3f} (steps {steps[start]} to {steps[end - 1]})"
        for mean, start, end in zip(means, starts, ends, strict=True)
    )
    words = f", while the training reward {'fell' if means[1] < means[0] else 'rose'} from {' to '.join(of_steps)}"
    between = rewards[starts[0] : ends[1]]
    split = _split(between)
    if means[1] >= means[0] or between[:split].mean() <= between[split:].mean():
        return words, None
    fell = int(steps[starts[0] + split])
    return f"{words}, about at step {fell}", fell


def command(then: str, path: Path) -> str:
    """Return the command to type, with the path of the run in place of RUN."""
    return f"clew {then}".replace("RUN", shlex.quote(str(path)), 1)


# Words ----------------------------------------------------------------------------------------------------------------


def _above(
    history: History,
    cause: str,
    name: str,
    mask: np.ndarray,
    what: str,
    then: str = "show RUN {}",
    *,
    one_is_enough: bool = False,
) -> Concern | None:
    """Return a concern that names the worst of the steps in `mask`; None if they are not a habit.

    Args:
        name: The metric. Higher is worse.
        mask: The steps in question, [N] bool.
        what: What was found there.
        then: Arguments of the command to type next, with {} for the worst step.
        one_is_enough: Return a concern for any step; it need not be a habit.
    """
    if not (mask.any() if one_is_enough else _is_habit(mask)):
        return None
    worst = int(np.argmax(np.where(mask, history.metrics[name], -np.inf)))
    value, step = float(history.metrics[name][worst]), int(history.steps[worst])
    most = _percent(value) if name.endswith("_share") else f"{value:.3g}"
    where = _where(history.steps[mask].tolist(), len(history.steps))
    return Concern(cause=cause, evidence=f"{where}, {what}; most: {most} at step {step}", then=then.format(step))


def _is_habit(mask: np.ndarray) -> bool:
    enough = mask.any() and mask.sum() >= min(2, len(mask))  # a single step of several is an accident
    return bool(enough) and bool(mask.mean() >= HABIT_SHARE or mask[-NEWEST_STEPS:].mean() >= NEWEST_SHARE)


def _where(steps: Sequence[int], count: int) -> str:
    if len(steps) == 1:
        return f"in step {steps[0]} of {count} steps"
    return f"in {len(steps)} of {count} steps, from {steps[0]} to {steps[-1]}"


def _of(part: int, whole: float, what: str) -> str:
    return f"{part:,} of {whole:,.0f} {what} ({_percent(part / whole)})" if whole > part else f"{part:,} {what}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
