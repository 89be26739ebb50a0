"""Small architectures learn through the whole of Clew in one process, and trainer and engine agree on every token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clew.record import rows
from tests.end_to_end.project import USER_CODE, Project
from tests.models import tiny_model, tiny_tokenizer

CODE = """
from clew.rollout.workflows import SingleTurn

def trl(prompts, completions, answer, **columns):
    assert isinstance(answer, list) and len(prompts) == 1
    return [sum(c.isdigit() for c in (done if isinstance(done, str) else done[0]["content"])) / 8
            for done in completions]

async def patient(completion, data):
    await asyncio.sleep(0.001)
    return {"digits": digits(completion, data), "short": -0.01 * len(completion)}

def sevens(completion, data):
    return completion.count("7") / 8

class Twice:
    def __init__(self, times: int = 2):
        self.times = times

    async def run_episode(self, engine, data):
        tokens, total = engine.tokenizer(data["prompt"])["input_ids"], 0.0
        for _ in range(self.times):
            answer = await engine.generate(tokens, max_new_tokens=4)
            tokens = answer.all_ids + engine.tokenizer("=")["input_ids"]
            total += await engine.reward(answer.text, data)
        return total / self.times
"""


def metrics(project: Project, *overrides: str) -> list[dict[str, float]]:
    """Train; the metrics of each step."""
    ended = project.inline(*overrides)
    assert ended.code == 0, ended.output
    return [project.run.steps.read(entry["step"])["metrics"] for entry in project.run.steps.index()]


def trained_rows(project: Project, step: int = 0) -> list[Any]:
    return project.run.steps.read_data(step)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_family_trains_and_agrees_with_the_engine(project: Project, family: str, tie: bool) -> None:
    tiny_model(project.folder / "model", family, tie=tie)
    steps = metrics(project)
    assert len(steps) == 3
    for step in steps:
        assert step["behaviour_gap_max"] < 1e-4 and step["lag_max"] == 0, step
        assert step["grad_norm"] > 0
    digests = [digest["weights"] for digest in project.digests()]
    assert len(set(digests)) == 3
    saved = project.path / "checkpoints" / "step-000003"
    assert ("lm_head.weight" in _tensors(saved)) is not tie


def _tensors(folder: Any) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        return set(file.keys())


def test_a_reward_that_can_be_learnt_is_learnt(project: Project) -> None:
    project.code(USER_CODE + CODE)
    tiny_model(project.folder / "model", "qwen3", scale=0.05)
    project.set(
        rollout={"reward": "mine.sevens", "batch_groups": 4, "n_samples": 8}, training={"steps": 25, "lr": 1e-2}
    )
    rewards = [step["reward"] for step in metrics(project)]
    assert sum(rewards[:3]) / 3 < 0.1 and sum(rewards[-3:]) / 3 > 0.5, rewards


@pytest.mark.parametrize(
    ("chat", "reward"), [(True, "mine.digits"), (True, "mine.trl"), (False, "mine.trl"), (False, "mine.patient")]
)
def test_prompts_and_rewards(project: Project, chat: bool, reward: str) -> None:
    project.code(USER_CODE + CODE)
    if chat:
        rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i)} for i in range(8)]
        project.prompts(rows)
    (step, _) = metrics(project, f"rollout.reward={reward}", "training.steps=2")
    assert step["behaviour_gap_max"] < 1e-4
    row = trained_rows(project)[0]
    (interaction,) = row.interactions
    assert isinstance(interaction["prompt"], list if chat else str)
    text = str(tiny_tokenizer(project.folder / "model").decode(row.input_ids))
    assert text.startswith("<|user|>") is chat and ("<|assistant|>" in text) is chat
    assert set(row.rewards) == ({"digits", "short"} if reward == "mine.patient" else {"reward"})


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_retries_extend_the_exact_tokens(project: Project, chat: bool) -> None:
    project.set(
        rollout={
            "workflow": "clew.rollout.workflows.MultiTurnRetry",
            "workflow_kwargs": {"max_turns": 3, "threshold": 0.3, "chat": chat, "discount": 0.5},
        }
    )
    steps = metrics(project)
    assert all(step["behaviour_gap_max"] < 1e-4 for step in steps)
    retried = [row for row in trained_rows(project) if len(row.interactions) > 1]
    assert retried, "no answer was wrong"
    for row in retried:
        assert max(row.turn_ids) == len(row.interactions) - 1  # one sequence holds all turns
        generated = sum(interaction["output_tokens"] for interaction in row.interactions)
        assert row.loss_mask.sum() == generated


def test_a_workflow_from_the_current_directory(project: Project) -> None:
    project.code(USER_CODE + CODE)
    project.set(rollout={"workflow": "mine.Twice", "workflow_kwargs": {"times": 3}})
    assert all(step["behaviour_gap_max"] < 1e-4 for step in metrics(project))
    assert {len(row.interactions) for row in trained_rows(project)} == {3}


def test_a_workflow_that_cannot_be_meant(project: Project) -> None:
    project.code(USER_CODE + CODE)
    for overrides, words in (
        (["rollout.workflow=mine.Twise"], ["mine.py has no 'Twise'", "Did you mean 'Twice'?"]),
        (["rollout.workflow=mine.Twice", "rollout.workflow_kwargs.tims=2"], ["takes no argument 'tims'", "'times'"]),
        (["rollout.reward=mime.digits"], ["there is no module 'mime'", "Did you mean 'mine'?"]),
        (["rollout.n_samples=1"], ["rollout.n_samples is 1", "Use at least 2"]),
    ):
        ended = project.inline(*overrides)
        assert ended.code == 2, ended.output
        for word in words:
            assert word in ended.error


def test_lag_minibatches_and_kl_together(project: Project) -> None:
    project.set(
        rollout={"max_lag": 2, "batch_groups": 2},
        algorithm={"minibatches": 2, "kl_coef": 0.1},
        training={"steps": 6},
        eval={"path": "prompts.jsonl", "every_steps": 3, "n_samples": 2, "temperature": 1.0},
    )
    steps = metrics(project)
    assert len(steps) == 6 and steps[-1]["lag_max"] <= 2
    evaluations = project.run.evals.read_all()
    assert [each["version"] for each in evaluations] == [0, 3, 6] and "pass@2" in evaluations[0]
    assert json.loads((project.path / "run.json").read_text())["clew_format"] == rows.FORMAT
