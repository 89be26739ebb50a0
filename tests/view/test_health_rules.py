"""The health check of `clew show RUN`: each cause is planted in a run of its own, and a sound run is called sound."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clew.record import rows
from clew.record.bundle import write_bundle
from clew.record.files import write_json
from clew.record.rejected import FILTERED
from clew.record.run import RunDirectory
from clew.training import gradient_checks
from clew.view import health_rules
from clew.view.health_rules import WATCHED, Collector, History, find_spikes, gradients, reward
from tests.training.sequences import make_config
from tests.view.test_show import commit, failed, group, shown

STEPS = 40


@pytest.mark.parametrize("name", ["RECENT_NORMS", "ENOUGH_NORMS", "NO_GRADIENT"])
def test_a_spike_is_the_same_for_training_and_for_the_health_check(name: str) -> None:
    assert getattr(health_rules, name) == getattr(gradient_checks, name)


def sound(step: int) -> dict[str, float]:
    """Return the metrics of a step of a run that learns, with a little noise."""
    noise = random.Random(step).random()
    return {
        "reward": 0.2 + step / 80 + noise / 50,
        "reward_std": 0.4,
        "groups": 8.0,
        "episodes": 64.0,
        "equal_groups_share": 0.1 + 0.2 * noise,
        "truncated_share": 0.05 * noise,
        "lag_mean": 0.5,
        "lag_max": 1.0,
        "behaviour_k3": 1e-3 * noise,
        "clip_share": 0.05 * noise,
        "grad_norm": 0.5 + noise,
        "updates_skipped": 0.0,
        "loss": 0.1,
    }


def make_run(folder: Path, planted: dict[int, dict[str, float]] | None = None, **sections: Any) -> RunDirectory:
    """Make a run of `STEPS` sound steps, with the planted metrics in some of them."""
    run = RunDirectory(folder / "runs" / "test" / "0")
    run.describe(make_config("a/model", rollout={"max_lag": 1}, **sections), threads=1)
    for step in range(STEPS):
        batch = group(f"g{step:06d}", (0.0, 1.0) if step % 2 else (1.0, 1.0))
        commit(run, step, batch, metrics=sound(step) | (planted or {}).get(step, {}))
    return run


def health(run: RunDirectory) -> dict[str, str]:
    """Return evidence and next command by cause, as `clew show` prints them; the first line under "health"."""
    lines = shown(run, width=2000).partition("\nhealth")[2].splitlines()
    found, cause = {"health": lines[0].strip()}, ""
    for line in lines[1:]:
        if not line.startswith(" "):
            cause, _, line = line.partition("  ")
        found[cause.strip()] = (found.get(cause.strip(), "") + " " + line.strip()).strip()
    return found


def of_steps(steps: range, **metrics: float) -> dict[int, dict[str, float]]:
    return dict.fromkeys(steps, metrics)


def test_a_sound_run_is_called_sound(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for version, passed in ((0, 0.2), (20, 0.5), (40, 0.49)):
        run.evals.write(version, [], {"pass@1": passed, "reward": passed, "episodes": 200})
    assert health(run) == {"health": "sound: nothing stands out in all 40 steps on record."}


@pytest.mark.parametrize("seed", range(20))
def test_sound_steps_with_other_noise_are_sound(seed: int) -> None:
    collector = Collector()
    for step in range(200):
        norm = random.Random(1000 * seed + step).lognormvariate(0, 0.5)
        collector(step, {"metrics": sound(step) | {"grad_norm": norm}})
    assert find_spikes(collector.history(), 10) == {}


CAUSES = {
    "truncation": (
        of_steps(range(30, 35), truncated_share=0.3) | {35: {"truncated_share": 0.45}},
        "in 6 of 40 steps, from 30 to 35, more than 10 % of the episodes were cut off at sampling.max_new_tokens or "
        "another limit; most: 45 % at step 35. → clew show {run} 35",
    ),
    "mismatch": (
        of_steps(range(5, 20), behaviour_k3=0.02) | {20: {"behaviour_k3": 0.07}},
        "in 16 of 40 steps, from 5 to 20, behaviour_k3 is above 0.015: the policy that sampled is far from the one "
        "that is trained (if tokens lag, lower training.lr or rollout.max_lag); most: 0.07 at step 20. "
        "→ clew blame {run} --step 20 --by behaviour_k3",
    ),
    "clipping": (
        of_steps(range(36, 40), clip_share=0.25),
        "in 4 of 40 steps, from 36 to 39, more than 20 % of the tokens are clipped, and so have no gradient; "
        "most: 25 % at step 36. → clew blame {run} --step 36",
    ),
    "rejected tokens": (
        of_steps(range(40), rejected_share=0.002) | of_steps(range(10, 15), rejected_share=0.6),
        "in 5 of 40 steps, from 10 to 14, more than 50 % of the tokens were rejected by algorithm.reject, veto or "
        "off_policy_delta, and taught nothing; most: 60 % at step 10. → clew show {run} 10",
    ),
    "lag": (
        of_steps(range(30, 40), lag_max=3.0),
        "in 10 of 40 steps, from 30 to 39, tokens lag behind by more than rollout.max_lag=1; most: 3 at step 30. "
        "→ clew show {run} 30",
    ),
    "gradients": (
        {25: {"grad_norm": 50.0, "updates_skipped": 1.0}},
        "in step 25 of 40 steps, the norm is over 10 times the median of the steps before; worst: 50 at step 25, where "
        "{usual:.4g} is usual; 1 updates were left out (in step 25 of 40 steps). → clew blame {run} --step 25",
    ),
    "advantages": (
        of_steps(range(40), advantage_reward_correlation=0.0) | {7: {"advantage_reward_correlation": -0.4}},
        "within groups, advantages and rewards have a correlation of -0.01 (mean of 40 steps), so better answers are "
        "not made likelier; lowest: -0.40 at step 7. Check that algorithm.advantages returns its numbers in the order "
        "of the sequences. → clew replay {run} --step 7 --break advantages",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_found_alone(cause: str, tmp_path: Path) -> None:
    planted, expected = CAUSES[cause]
    run = make_run(tmp_path, planted)
    usual = float(np.median([sound(step)["grad_norm"] for step in range(25)]))
    assert health(run) == {
        "health": "1 thing deserves a look. All 40 steps on record were looked at.",
        cause: expected.format(run=run.path, usual=usual),
    }


def test_a_run_with_warnings_and_no_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.report("rollout"):
        logging.getLogger("clew.rollout").warning("a tool was slow")
    assert health(run)["health"] == "1 thing deserves a look. No step is on record."


def test_one_step_that_rejects_almost_all_of_its_tokens(tmp_path: Path) -> None:
    planted = of_steps(range(40), rejected_share=0.002)
    run = make_run(tmp_path / "planted", planted | {23: {"rejected_share": 0.9}})
    assert health(run)["rejected tokens"] == (
        "in step 23 of 40 steps, at least 90 % of the tokens were rejected by algorithm.reject, veto or "
        f"off_policy_delta, and taught nothing; most: 90 % at step 23. → clew show {run.path} 23"
    )
    for name, sound_runs in {"few": planted, "once": planted | {23: {"rejected_share": 0.7}}}.items():
        assert "sound" in health(make_run(tmp_path / name, sound_runs))["health"]


def test_groups_that_are_all_0_and_all_1_are_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path, of_steps(range(20, 40), equal_groups_share=0.75))
    assert health(run)["equal rewards"] == (
        "in 20 of 40 steps, from 20 to 39, most groups had equal rewards, which teach nothing; newest: 75 % at step "
        f"39. Steps 20, 25, 30, 34, 39: 3 groups all 1. → clew show {run.path} 39"
    )
    for step in (20, 25):
        batch = [*group(f"g{step:06d}", (0.0, 0.0)), *group("g000099", (0.0, 0.0))]
        run.steps.write_data(step, rows.to_table(batch))
    assert "Steps 20, 25, 30, 34, 39: 4 groups all 0, 2 groups all 1" in health(run)["equal rewards"]
    run.steps.prune(before=39)
    assert "Step 39" not in health(run)["equal rewards"] and "newest: 75 %" in health(run)["equal rewards"]


def test_equal_rewards_within_groups_do_not_matter_where_the_batch_is_compared(tmp_path: Path) -> None:
    planted = of_steps(range(20, 40), equal_groups_share=0.75)
    assert "sound" in health(make_run(tmp_path / "a", planted, algorithm={"advantages": "batch"}))["health"]
    planted = of_steps(range(20, 40), equal_groups_share=1.0, reward_std=1.4e-17)  # as of rewards that are all 0.1
    assert "equal rewards" in health(make_run(tmp_path / "b", planted, algorithm={"advantages": "batch"}))


def test_groups_of_one_episode_are_no_concern_of_a_user_s_advantages_with_a_critic(tmp_path: Path) -> None:
    planted = of_steps(range(40), equal_groups_share=1.0)
    own = {"algorithm": {"advantages": "tests.training.test_gae.one_step"}}
    assert "equal rewards" in health(make_run(tmp_path / "without", planted, **own))
    planted = of_steps(range(40), equal_groups_share=1.0, **{"critic/loss": 0.1})
    assert "equal rewards" not in health(make_run(tmp_path / "with", planted, **own))


def test_mismatch_without_lag_has_a_tighter_limit(tmp_path: Path) -> None:
    planted = of_steps(range(0, 40, 2), lag_max=0.0, behaviour_k3=4e-3)
    found = health(make_run(tmp_path, planted))["mismatch"]
    assert found.startswith("in 20 of 40 steps, from 0 to 38, behaviour_k3 is above 0.001 at a lag of 0: engine and")


def test_a_narrow_clip_over_sequences_may_hold_more(tmp_path: Path) -> None:
    planted = of_steps(range(40), clip_share=0.3)
    assert "clipping" in health(make_run(tmp_path / "a", planted))
    assert "clipping" not in health(make_run(tmp_path / "b", planted, algorithm={"preset": "gspo"}))


def test_tokens_that_cispo_clips_keep_their_gradient(tmp_path: Path) -> None:
    planted = of_steps(range(20, 40), clip_share=0.3)
    assert "no gradient" in health(make_run(tmp_path / "a", planted))["clipping"]
    found = health(make_run(tmp_path / "b", planted, algorithm={"preset": "cispo"}))["clipping"]
    assert "are clipped" in found and "no gradient" not in found


def test_rejected_groups_and_episodes_with_reasons(tmp_path: Path) -> None:
    run = make_run(tmp_path, of_steps(range(STEPS), groups=1.0, episodes=2.0))
    run.reject("g000001.e2", [failed("g000001.e2.s0", "ValueError: no tool 7\nTraceback")])
    for number in range(50, 53):
        run.reject(f"g{number:06d}", [failed(f"g{number:06d}.e0.s0", "ValueError: no tool 8")])
    assert health(run)["rejected"] == (
        "4 of 84 episodes (4.76 %) failed, and 3 whole groups with them: 4 times ValueError: no tool 7, or with other "
        "numbers. "
        f"→ clew show {run.path} g000001.e2"
    )
    run = make_run(tmp_path / "filtered", of_steps(range(STEPS), groups=1.0, episodes=2.0))
    for number in range(100, 160):
        reward = float(number % 3 == 0)
        reason = f"{FILTERED}all rewards equal ({reward:g})"
        batch = group(f"g{number:06d}", (reward, reward))
        run.reject(f"g{number:06d}", [dataclasses.replace(row, error=reason) for row in batch])
    assert health(run)["rejected"] == (
        "60 of 100 groups (60 %) were left out: 40 for all rewards equal (0), 20 for all rewards equal (1). "
        f"→ clew show {run.path} g000100"
    )
    assert "40 groups left out: all rewards equal (0)" in shown(run)


def test_one_failed_episode_of_many_is_sound(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.reject("g000001.e2", [failed("g000001.e2.s0", "ValueError: no tool 7")])
    assert "sound" in health(run)["health"]


def test_warnings_on_record(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    entries = [(3, "a tool was slow: 4 s"), (17, "a tool was slow: 5 s"), (None, "odd")]
    lines = [{"time": 1.0, "process": "rollout", "step": step, "text": text} for step, text in entries]
    run.warnings_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert health(run)["warnings"] == f"2 kinds of warning, listed above. → clew show {run.path} 17"


def test_evaluations_that_fall_while_the_training_reward_rises(tmp_path: Path) -> None:
    def evaluated(
        name: str, *values: float, planted: dict[int, dict[str, float]] | None = None, half: float = 0.04
    ) -> dict[str, str]:
        run = make_run(tmp_path / name, planted)
        for version, value in zip((0, 10, 20, 40), values, strict=True):
            width = {"pass@1": [value - half, value + half]}
            run.evals.write(version, [], {"pass@1": value, "reward": value, "intervals": width if half else {}})
        return health(run)

    evaluated("of other prompts", 0.6, 0.6, 0.4, 0.4)
    changed = RunDirectory(tmp_path / "of other prompts" / "runs" / "test" / "0")
    write_json(changed.run_json, {**changed.facts(), "changes": [{"step": 15, "fields": {"eval.path": ["a", "b"]}}]})
    assert "evaluations" not in health(changed)
    found = evaluated("falls", 0.2, 0.5, 0.6, 0.4)["evaluations"]
    assert found.startswith(
        "pass@1 fell from 0.600 at version 20 to 0.400 at version 40, while the training reward rose"
    )
    assert found.endswith("--steps 20:40")
    assert "sound" in evaluated("by chance", 0.2, 0.5, 0.6, 0.55)["health"]
    assert "evaluations" in evaluated("more than chance", 0.2, 0.5, 0.6, 0.54)
    assert "sound" in evaluated("few prompts", 0.2, 0.5, 0.6, 0.4, half=0.15)["health"]
    assert "evaluations" in evaluated("no intervals", 0.2, 0.5, 0.6, 0.4, half=0)
    both = {step: {"reward": 0.8 - step / 80} for step in range(STEPS)}
    found = evaluated("both fall", 0.2, 0.5, 0.6, 0.4, planted=both)
    assert [*found] == ["health", "reward", "evaluations"]
    assert "to 0.400 at version 40, while the training reward fell from" in found["evaluations"]


def test_the_step_at_which_evaluations_and_the_training_reward_fell(tmp_path: Path) -> None:
    """The reward falls at step 4 and comes back in part, so its own means over 10 steps do not tell."""
    fallen = {step: {"reward": 0.9 if step < 4 else 0.1 + step / 100} for step in range(STEPS)}
    run = make_run(tmp_path, fallen)
    for version, value in ((0, 0.9), (40, 0.3)):
        run.evals.write(version, [], {"pass@1": value, "reward": value, "episodes": 500})
    assert health(run)["evaluations"] == (
        "pass@1 fell from 0.900 at version 0 to 0.300 at version 40, while the training reward fell from 0.459 (steps "
        f"0 to 9) to 0.445 (steps 30 to 39), about at step 4. → clew show {run.path} 4"
    )


def test_a_training_reward_that_falls(tmp_path: Path) -> None:
    """Plant half of the reward from step 25 on. Noise around one level is sound, also in long runs."""
    fallen = {step: {"reward": sound(step)["reward"] / 2} for step in range(25, STEPS)}
    run = make_run(tmp_path / "falls", fallen)
    assert health(run)["reward"] == (
        "the training reward fell from 0.456 (steps 15 to 24) to 0.320 (steps 30 to 39), about at step 25. "
        f"→ clew show {run.path} 25"
    )
    facts = json.loads(run.run_json.read_text())
    changes = [{"step": step, "fields": {"training.lr": [1e-5, lr]}} for step, lr in ((5, 2e-5), (25, 1e-3))]
    run.run_json.write_text(json.dumps(facts | {"changes": changes}))
    found = health(run)
    changed = "about at step 25. The configuration changed there: training.lr 1e-05 -> 0.001 from step 25 on. →"
    assert changed in found["reward"] and list(found)[1] == "reward"  # what a run is judged by comes first
    for seed in range(20):
        chance = random.Random(seed)
        level, collector = chance.choice((0.02, 0.5, 0.9)), Collector()
        for step in range(2000):
            right = sum(chance.random() < level for _ in range(64)) / 64
            collector(step, {"metrics": sound(step) | {"reward": right}})
        assert reward(collector.history()) is None


def test_a_reward_that_falls_at_once(tmp_path: Path) -> None:
    """Plant a fall into a run too short for means over windows, and into a single step of a long one."""
    for seed in range(20):
        chance, collector = random.Random(seed), Collector()
        for step in range(12):
            right = sum(chance.random() < 0.67 for _ in range(64)) / 64
            collector(step, {"metrics": sound(step) | {"reward": right, "groups": 64.0, "reward_std": 0.47}})
        assert reward(collector.history()) is None
    for fallen in (3, 11):
        collector = Collector()
        for step in range(12):
            right = 0.02 if step >= fallen else 0.67 + step % 2 / 100
            collector(step, {"metrics": sound(step) | {"reward": right, "groups": 64.0, "reward_std": 0.47}})
        concern = reward(collector.history())
        assert concern is not None and concern.then == f"show RUN {fallen}"
        assert concern.evidence.startswith("the training reward fell at once from 0.67")
    collector = Collector()
    for step in range(8):  # of 16 groups, after the first step: less certain, but it does not come back
        collector(step, {"metrics": sound(step) | {"reward": 0.0 if step else 0.42, "groups": 16.0}})
    assert (concern := reward(collector.history())) is not None and concern.then == "show RUN 1"
    found = health(make_run(tmp_path, {30: {"reward": 0.02}}))["reward"]
    assert re.match(
        r"the training reward fell at once from 0.5\d\d .* to 0.020 at step 30; 0.69\d in the newest", found
    )


def test_a_gradient_norm_that_jumps_early_or_for_good() -> None:
    for jump, steps in ((4, 6), (15, 40)):
        collector = Collector()
        for step in range(steps):
            collector(step, {"metrics": sound(step) | {"grad_norm": (50 if step >= jump else 1) + step % 2 / 10}})
        found = find_spikes(collector.history(), 10)
        assert min(found) == jump and found[jump][1] == pytest.approx(1, abs=0.2)
        assert gradients(collector.history(), None) is not None


def test_rewards_that_are_never_above_0(tmp_path: Path) -> None:
    below = {step: {"reward": -0.5 + step / 100} for step in range(STEPS)}
    run = make_run(tmp_path, below)
    assert "negative rewards" not in health(run)  # an episode of the newest step has a reward of 1
    run.steps.write_data(STEPS - 1, rows.to_table(group("g000039", (-1.0, 0.0))))
    assert health(run)["negative rewards"] == (
        "no episode of step 39 has a reward above 0, and no step a mean above 0 (lowest: -0.5). If your reward is no "
        f"penalty or distance, check its sign. → clew show {run.path} 39"
    )
    rewards = [0.0 if step % 3 == 0 else 0.5 for step in range(STEPS)]
    planted = {step: {"reward": each} for step, each in enumerate(rewards)}
    assert "negative rewards" not in health(make_run(tmp_path / "above", planted))


def test_a_spike_after_steps_without_gradient_is_none(tmp_path: Path) -> None:
    planted = of_steps(range(5, 30), grad_norm=1e-9)
    assert "sound" in health(make_run(tmp_path, planted | {30: {"grad_norm": 1.0}}))["health"]
    history = History(steps=np.arange(3), metrics={name: np.full(3, math.nan) for name in WATCHED})
    assert find_spikes(history, 10) == {}


def test_what_is_not_on_record_is_not_judged(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "test" / "0")
    commit(run, 0, group("g000000"), metrics={"loss": 0.1, "grad_norm": 1.0, "reward": 0.5})
    assert health(run)["health"] == (
        "sound: nothing stands out in the one step on record. Not on record, so not judged: equal rewards, truncation, "
        "lag, mismatch, clipping."
    )
    assert "health" not in shown(RunDirectory(tmp_path / "bare"))
    bundle = write_bundle(make_run(tmp_path / "b"), 3, stages_only=True, to=tmp_path / "small.zip")
    assert "sound: nothing stands out in the one step on record." in shown(bundle)


def test_a_broken_chain_is_not_called_sound(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.steps.json_path(3).write_text(run.steps.json_path(3).read_text().replace('"loss": 0.1', '"loss": 0.2'))
    assert health(run)["health"].startswith("nothing but the broken chain below stands out in all 40 steps")


def test_odd_content_of_a_step_is_left_out() -> None:
    collector = Collector()
    odd: list[Any] = [{"metrics": {"reward": "high", "lag_max": 10**400}, "timings": {"rollout": "x", "b": 2.0}}, {}]
    odd += [{"metrics": [1], "timings": 3}, {"metrics": {"reward": 0.5}, "timings": {"b": 1.5, "rollout": 9.0}}]
    for step, content in enumerate(odd):
        collector(step, content)
    history = collector.history()
    assert history.steps.tolist() == [0, 3] and history.seconds == {"rollout": 9.0, "b": 3.5}
    assert math.isnan(history.metrics["reward"][0]) and history.metrics["reward"][1] == 0.5
    assert math.isnan(history.metrics["lag_max"][0])


def test_a_spike_of_a_supervised_run_is_not_sent_to_blame() -> None:
    metrics = {name: np.full(21, math.nan) for name in WATCHED} | {"grad_norm": np.array([1.0] * 20 + [100.0])}
    history = History(steps=np.arange(21), metrics=metrics)
    for supervised, then in ((True, "show RUN 20"), (False, "blame RUN --step 20")):
        concern = gradients(history, None, supervised=supervised)
        assert concern is not None and concern.then == then
