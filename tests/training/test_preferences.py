"""DPO and reward models: the engine's steps against plain loops, what transformers reads of them, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from clew.config import Config
from clew.errors import ConfigError, DataError
from clew.loop.sft import sft
from clew.loop.trainer_process import learn_inline
from clew.models.loading import load_model, load_tokenizer, load_value_model
from clew.record.rows import Sequence
from clew.training import checkpoint
from clew.training.demonstrations import Demonstrations
from clew.training.engine import TrainEngine
from clew.training.preferences import deal_pairs
from clew.training.tokens import Tokens
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_config

CPU = torch.device("cpu")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return keywords of make_config. The data are pairs: the prompt is a number, and its copy is chosen over another
    number."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", scale=0.1)
    rows = [{"prompt": f"{i:02d}>", "chosen": f"{i:02d}", "rejected": f"{(7 * i) % 50}?"} for i in range(1, 50)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    return {
        "model": tmp_path / "model",
        "root": str(tmp_path / "runs"),
        "data": {"path": str(tmp_path / "pairs.jsonl"), "completion": "chosen"},
        "training": {"steps": 40, "batch_size": 8, "lr": 3e-3, "warmup_steps": 0, "schedule": "constant"},
        "checkpoint": {"every_steps": 20},
        "launch": {"threads": 1},
    }


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configure(settings: dict[str, Any], objective: str, **training: Any) -> Config:
    return make_config(**settings | {"training": settings["training"] | {"objective": objective, **training}})


def batch_of(config: Config, step: int = 0) -> list[Sequence]:
    return Demonstrations(config, load_tokenizer(config.model.path), context=None).batch(step)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.integers(1, 200), st.integers(1, 3), st.booleans())
def test_pairs_stay_together_within_the_budget(lengths: list[int], budget: int, ranks: int, packed: bool):
    lengths = lengths[: len(lengths) // 2 * 2]
    dealt = deal_pairs(lengths, budget=budget, packed=packed, ranks=ranks)
    assert len(dealt) % ranks == 0
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    for rows in filter(None, dealt):
        assert rows[0::2] == [row - 1 for row in rows[1::2]] and all(row % 2 == 0 for row in rows[0::2])
        tokens = sum(lengths[row] for row in rows) if packed else len(rows) * max(lengths[row] for row in rows)
        assert len(rows) == 2 or tokens <= budget


def test_a_step_of_dpo_equals_a_plain_one(settings: dict[str, Any]):
    """Compare the second step, because in the first one policy and reference are still the same.

    The result must not depend on the size of micro-batches.
    """
    config = configure(settings, "dpo")
    assert config.algorithm.kl_coef == 0.1
    plain, reference = (load_model(str(settings["model"]), "float32", CPU) for _ in range(2))
    engine = TrainEngine(config, supervised=True)
    engine.train_step(batch_of(config, 0))
    second = batch_of(config, 1)
    plain.load_state_dict(engine.policy.model.state_dict())

    def logprob(model: Any, row: int) -> torch.Tensor:
        ids, mask = (torch.from_numpy(each) for each in (second[row].input_ids, second[row].loss_mask))
        logprobs = model(input_ids=ids.long()[None]).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, ids.long()[1:, None])[:, 0][mask[1:]].sum()

    margins = []
    for pair in range(8):
        now = logprob(plain, 2 * pair) - logprob(plain, 2 * pair + 1)
        with torch.no_grad():
            then = logprob(reference, 2 * pair) - logprob(reference, 2 * pair + 1)
        margins.append(0.1 * (now - then))
    loss = -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for budget in (10, 60, 10_000):
        again = TrainEngine(configure(settings, "dpo", micro_batch_tokens=budget), supervised=True)
        again.policy.model.load_state_dict(engine.policy.model.state_dict())
        metrics = again.train_step(second).metrics
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert metrics["preference/accuracy"] == pytest.approx(np.mean([each.item() > 0 for each in margins]))
        assert metrics["preference/margin"] == pytest.approx(torch.stack(margins).mean().item(), rel=1e-3, abs=1e-6)


def test_the_schedule_counts_one_update_a_step(settings: dict[str, Any]):
    """Supervised steps have no mini-batches, so algorithm.minibatches must not stretch the schedule."""
    plain, other = (configure(settings, "dpo", schedule="linear", steps=4, warmup_steps=0) for _ in range(2))
    other = other.model_copy(update={"algorithm": other.algorithm.model_copy(update={"minibatches": 4})})
    for config in (plain, other):
        engine = TrainEngine(config, supervised=True)
        rates = [engine.train_step(batch_of(config)).metrics["lr"] for _ in range(4)]
        assert rates == pytest.approx([config.training.lr * left for left in (1, 0.75, 0.5, 0.25)])


@pytest.mark.parametrize("lora", [None, 4])
def test_dpo_learns_what_was_chosen(settings: dict[str, Any], lora: int | None, capsys: pytest.CaptureFixture[str]):
    config = configure(settings, "dpo", lora_rank=lora)
    sft(config)
    last = capsys.readouterr().out.split("step 40/40")[1]
    assert "accuracy 100.0%" in last or "accuracy 87.5%" in last  # at most one of the 8 pairs is wrong
    before, after = (load_model(str(path), "float32", CPU) for path in (settings["model"], latest(config)))
    pair = Tokens.of(batch_of(config, 3))  # its first two rows: what was chosen, and what was rejected
    margins = [score_of(model, pair, 0) - score_of(model, pair, 1) for model in (before, after)]
    assert margins[1] > margins[0] + 1


def score_of(model: Any, tokens: Tokens, row: int) -> float:
    ids, mask = (torch.from_numpy(tokens.split(each)[row]) for each in (tokens.input_ids_S, tokens.loss_mask_S))
    with torch.no_grad():
        logprobs = model(input_ids=ids.long()[None]).logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, ids.long()[1:, None])[:, 0][mask[1:]].sum())


def latest(config: Config) -> Path:
    return config.run_path / "checkpoints" / "latest"


def test_a_text_of_one_token_is_refused_for_a_reward_model(settings: dict[str, Any]):
    """Its score would be read at the first token, which nothing can predict, where padding and end are the same."""
    file = settings["model"] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<eos>"}))
    write_rows(Path(settings["data"]["path"]), [{"prompt": "1", "chosen": "2", "rejected": ""}] * 8)
    with pytest.raises(DataError, match="row 1 has one token before the end, and a reward model needs two"):
        batch_of(configure(settings, "reward_model"))


@pytest.mark.parametrize("own_pad", [True, False])
def test_a_reward_model_is_one_that_transformers_reads(settings: dict[str, Any], own_pad: bool):
    """Its score of a text is the one that was trained, also where padding and end are the same token."""
    if not own_pad:
        file = settings["model"] / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<eos>"}))
    config = configure(settings, "reward_model")
    sft(config)
    model: Any = AutoModelForSequenceClassification.from_pretrained(latest(config))
    tokenizer: Any = AutoTokenizer.from_pretrained(latest(config))
    tokenizer.padding_side = "right"
    texts = [f"{i:02d}>{answer}<eos>" for i in range(11, 16) for answer in (f"{i:02d}", f"{(7 * i) % 50}?")]
    with torch.no_grad():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert (scores[0::2] > scores[1::2]).all()

    engine = TrainEngine(config, supervised=True)
    checkpoint.load(engine, latest(config))
    batch = batch_of(config, 5)
    trained, tokens = engine.train_step(batch).stages["logprobs"], Tokens.of(batch)
    for row, ids in enumerate(tokens.split(tokens.input_ids_S)[:4]):
        with torch.no_grad():
            alone = model(input_ids=torch.from_numpy(ids).long()[None]).logits.item()
        assert trained[row].sum() == pytest.approx(alone, abs=1e-4)
        assert tokens.split(tokens.loss_mask_S)[row].sum() == 1
    assert load_value_model(str(latest(config)), "float32", CPU, "algorithm.critic").get_parameter("score.weight").any()


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_training_resumes_from_a_checkpoint_bit_for_bit(settings: dict[str, Any], tmp_path: Path, objective: str):
    config = configure(settings, objective)
    engine, again = (TrainEngine(config, supervised=True) for _ in range(2))
    for step in range(3):
        engine.train_step(batch_of(config, step))
    checkpoint.save(engine, tmp_path / "step-000003")
    checkpoint.load(again, tmp_path / "step-000003")
    one, two = (each.train_step(batch_of(config, 3)) for each in (engine, again))
    assert one.digests == two.digests and one.metrics == two.metrics


def test_settings_and_rows_that_make_no_sense_are_refused(settings: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"training.objective is dpo, which `clew sft` trains"):
        learn_inline(configure(settings, "dpo"), lambda step, summary: None)
    with pytest.raises(ValueError, match="reward_model has a new head to train"):
        configure(settings, "reward_model", lora_rank=4)
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2"}])
    with pytest.raises(DataError, match="row 1 has no column 'rejected'; it has 'prompt', 'chosen'"):
        sft(configure(settings, "dpo"))
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3" * 300}])
    with pytest.raises(DataError, match="row 1 has 302 tokens, 301 of them to train on"):
        sft(configure(settings, "dpo"))
