"""A run that has nothing to learn says so: in the log, and in `clew status`."""

import io
import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from clew import config as configuration
from clew.loop.nothing_to_learn import WARN_STEPS, NothingToLearn
from clew.loop.trainer_process import learn_inline
from clew.record.run import RunDirectory
from clew.record.run_warnings import read_warnings, warnings_in_words
from clew.view.status import status_table
from tests.models import tiny_model, tiny_tokenizer


def always(completion: str, data: dict) -> float:
    return 0.25


def metrics(share: float, deviation: float) -> dict[str, float]:
    return {"equal_groups_share": share, "reward_std": deviation, "reward": 0.5, "groups": 8}


def test_it_counts_steps_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    watch = NothingToLearn("group")
    alike = [watch.add(step, metrics(1.0, 0.5)) for step in range(WARN_STEPS)]
    assert alike[:-1] == [""] * (WARN_STEPS - 1)
    assert "nothing to learn for 4 steps (up to step 3): within each group all rewards are equal; the mean" in alike[-1]
    assert watch.add(4, metrics(0.9, 0.5)) == "" and watch.add(5, metrics(1.0, 0.5)) == ""
    assert len(caplog.records) == 1
    for step in range(6, 30):
        watch.add(step, metrics(1.0, 0.5))
    assert len(caplog.records) == 1 + 3  # after 4, 8 and 16
    batch = NothingToLearn("gae")
    assert not any(batch.add(step, metrics(1.0, 0.5)) for step in range(9))  # groups differ from one another
    of_tenths = float(np.std([0.1] * 3))
    assert of_tenths > 0 and "within the batch" in [batch.add(step, metrics(1.0, of_tenths)) for step in range(9)][-1]


def test_advantages_that_are_all_zero_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = NothingToLearn("mine.zero")
    for step in range(9):
        watch.add(step, metrics(0.0, 0.5), 0.0 if step else 0.3)
    assert [each.partition(":")[0] for each in caplog.messages] == ["step 1", "step 2", "step 4", "step 8"]
    assert "all advantages are zero (8 such steps so far)" in caplog.messages[-1]
    assert "algorithm.advantages=mine.zero" in caplog.messages[-1]


def test_steps_of_which_everything_is_rejected_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = NothingToLearn("group")
    for step in range(9):
        watch.add(step, metrics(0.0, 0.5) | {"rejected_share": 1.0 if step else 0.99})
    assert [each.partition(":")[0] for each in caplog.messages] == ["step 1", "step 2", "step 4", "step 8"]
    assert "rejected every token (8 such steps so far), so the step taught nothing" in caplog.messages[-1]


def test_advantages_that_contradict_rewards_are_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    def watch(*correlations: float) -> list[str]:
        caplog.clear()
        watching = NothingToLearn("mine.own")
        for step, correlation in enumerate(correlations):
            watching.add(step, metrics(0.0, 0.5) | {"advantage_reward_correlation": correlation})
            watching.add(step, metrics(0.0, 0.5))  # a step whose rewards do not differ says nothing
        return list(caplog.messages)

    [warning] = watch(*[-0.3, 0.2, -0.1, 0.0] * 3)
    assert warning.startswith("step 3: advantages contradict rewards: within groups their correlation was -0.05")
    assert "algorithm.advantages=mine.own" in warning
    assert watch(*[0.9] * 9) == [] and watch(-0.5, -0.5, -0.5) == []


def test_a_run_whose_rewards_are_all_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(9)))
    (tmp_path / "config.yaml").write_text(
        f"experiment: e\nroot: {tmp_path}/runs\nmodel: {{path: {tmp_path}/model}}\n"
        f"data: {{path: {tmp_path}/prompts.jsonl}}\n"
        "rollout: {reward: tests.loop.test_nothing_to_learn.always, batch_groups: 2, n_samples: 2}\n"
        "sampling: {max_new_tokens: 3}\ntraining: {steps: 5}\nlaunch: {threads: 1, mode: inline}\n"
    )
    config = configuration.load(tmp_path / "config.yaml")
    seen: list[str] = []

    def look(step: int, summary: object) -> None:
        until = time.monotonic() + 10  # the trainer writes its status once a second
        while step == 4 and time.monotonic() < until and "nothing to learn for 5 steps" not in "".join(seen):
            terminal = io.StringIO()
            Console(width=120, file=terminal).print(status_table(RunDirectory(config.run_path)))
            seen.append(terminal.getvalue())
            time.sleep(0.1)

    with caplog.at_level(logging.WARNING, "clew.trainer"):
        learn_inline(config, look)
    (record,) = [each for each in caplog.records if "nothing to learn" in each.getMessage()]
    assert (
        "for 4 steps (up to step 3): within each group all rewards are equal; the mean of the last batch is 0.25"
        in (record.getMessage())
    )
    assert "nothing to learn for 5 steps" in " ".join(seen[-1].split())
    kept = warnings_in_words(read_warnings(RunDirectory(config.run_path).warnings_path)[0])
    zero, equal = (" ".join(each.split()) for each in kept)
    assert zero.startswith("trainer, steps 0 to 1, 2 times: all advantages are zero (2 such steps so far)")
    assert equal.startswith("trainer, step 3: nothing to learn for 4 steps")
