"""TRL's GRPOTrainer leaves a Clew run directory: examples/trl/record_with_clew.py, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clew.algorithms import grpo
from clew.diagnose.blame import blame
from clew.diagnose.rerun import Options, rerun
from clew.record import Writer
from clew.record.run import open_run
from tests.models import tiny_model, tiny_tokenizer

PROMPTS = [f"{i}+{i + 1}=" for i in range(8)]


def digits(completions: list[str], **columns: Any) -> list[float | None]:
    return [sum(character.isdigit() for character in completion) / 8 for completion in completions]


def train(folder: Path, steps: int, **changes: Any) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig

    from examples.trl.record_with_clew import RecordedGRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        temperature=0.7,
        beta=0.0,
        learning_rate=1e-3,
        save_strategy="no",
        max_steps=steps,
        logging_steps=1,
        disable_tqdm=True,
        **changes,
    )
    with Writer(folder / "run", arguments.to_dict(), trainer="trl") as writer:
        RecordedGRPOTrainer(
            writer,
            model=tiny_model(folder / "model"),
            reward_funcs=digits,
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(str(folder / "model"), padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        ).train()


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_leaves_a_run_of_clew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model", chat=False)
    train(tmp_path, 2)
    train(tmp_path, 1)  # it goes on where the record ends

    run = open_run(tmp_path / "run")
    assert run.steps.count() == 3 and run.facts()["trainer"] == "trl"
    assert [entry["groups"] for entry in run.steps.index()] == [
        [f"g{2 * step:06d}", f"g{2 * step + 1:06d}"] for step in range(3)
    ]
    for step in range(3):
        batch = run.steps.read_data(step)
        stages = run.steps.read_stages(step).arrays
        summary = run.steps.read(step)
        assert len(batch) == 8 and summary["versions"] == [step, step]
        assert {"loss", "grad_norm", "reward", "entropy"} <= summary["metrics"].keys()
        assert summary["metrics"]["reward"] == pytest.approx(np.mean([row.reward for row in batch]), abs=1e-6)
        advantages = dict(zip((row.id for row in batch), grpo.advantages(batch), strict=True))
        for row in batch:
            prompt = row.input_ids[: int(row.loss_mask.argmax())]
            assert str(tokenizer.decode(prompt)) == row.data["prompt"]
            text = tokenizer.decode(row.input_ids[row.loss_mask], skip_special_tokens=True)
            assert row.reward == pytest.approx(sum(character.isdigit() for character in text) / 8)
            assert (row.logprobs[row.loss_mask] < 0).all() and not row.logprobs[~row.loss_mask].any()
            assert np.array_equal(stages["logprobs"][row.id], row.logprobs)  # one update: the same weights sampled them
            assert set(row.temperatures[row.loss_mask]) == {np.float32(0.7)}
            there = stages["advantages"][row.id]
            assert there[row.loss_mask] == pytest.approx(advantages[row.id], rel=1e-2, abs=1e-3)
    capsys.readouterr()
    blame(run.path, 2, top=3, tokens=2, by=None)
    lines = capsys.readouterr().out.splitlines()
    pulls = {  # of one update: the weights are those that sampled, and nothing is clipped
        row.id: np.sum(np.abs(stages["advantages"][row.id]) * (1 - np.exp(row.logprobs))) for row in batch
    }
    assert [line.split()[0] for line in lines[3:6]] == sorted(pulls, key=lambda name: -pulls[name])[:3]
    assert rerun(run.path, Options(stages="advantages", overrides=["algorithm.advantages=group"]))
