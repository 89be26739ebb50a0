"""The critic: what its values mean, that its updates are the formula's, that it is kept, and whom it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from clew.algorithms.value_loss import value_loss
from clew.errors import ModelError, RecordError, TrainingError
from clew.models.loading import load_value_model
from clew.training import checkpoint
from clew.training.engine import TrainEngine
from tests.models import VOCAB, tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", scale=0.2)
    return tmp_path / "model"


@pytest.fixture
def scorer(tmp_path: Path, model: Path) -> Path:
    """A reward model of other weights, as transformers writes it."""
    folder = tmp_path / "scorer"
    tiny_tokenizer(folder)
    tiny_model(folder, scale=0.2, seed=5, layers=1)
    inner = load_value_model(str(folder), "float32", CPU, "model.path")
    torch.manual_seed(1)
    torch.nn.init.normal_(inner.get_parameter("score.weight"))
    inner.save_pretrained(folder)
    return folder


def engine_of(model: Path, dtype: str = "float32", training: Any = None, **algorithm: Any) -> TrainEngine:
    options = {"advantages": "gae", "minibatches": 2, **algorithm}
    return TrainEngine(make_config(model, dtype=dtype, algorithm=options, training=training or {}))


def test_a_value_is_of_the_state_before_its_token(model: Path, scorer: Path):
    engine, batch = engine_of(model, critic=str(scorer)), make_batch()
    values = engine.train_step(batch).stages["values"]
    plain: Any = AutoModelForSequenceClassification.from_pretrained(scorer, num_labels=1)
    for row, found in zip(batch, values, strict=True):
        for at in range(len(row.input_ids)):
            if row.loss_mask[at]:  # transformers scores the last token of what it is given
                before = torch.from_numpy(row.input_ids[:at]).long()[None]
                assert found[at] == pytest.approx(plain(input_ids=before).logits.item(), abs=1e-5)
            else:
                assert found[at] == 0


@pytest.mark.parametrize("packs", [True, False])
def test_the_value_after_the_last_token_of_episodes_that_were_cut_off(model: Path, scorer: Path, packs: bool):
    batch = make_batch()
    batch = [replace(row, finish_reason="length") if place % 3 == 0 else row for place, row in enumerate(batch)]
    engine = engine_of(model, critic=str(scorer), bootstrap_truncated=True, gamma=0.5, gae_lambda=0.0)
    engine.policy.packs = packs
    stages = engine.train_step(batch).stages
    plain: Any = AutoModelForSequenceClassification.from_pretrained(scorer, num_labels=1)
    for place, row in enumerate(batch):
        found, last = stages["bootstrap_values"][place], 0.0
        if place % 3 == 0:
            last = plain(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits.item()
        assert found[-1] == pytest.approx(last, abs=1e-5) and not found[:-1].any()
        assert stages["returns"][place][-1] == pytest.approx(row.reward + 0.5 * last, abs=1e-5)
    same = engine_of(model, critic=str(scorer), gamma=0.5, gae_lambda=0.0).train_step(batch).stages
    assert "bootstrap_values" not in same
    for ours, theirs in zip(stages["values"], same["values"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_critic_that_begins_with_the_policy_s_weights_begins_with_values_of_zero(model: Path):
    engine = engine_of(model, gae_lambda=1.0)
    result = engine.train_step(make_batch())
    assert not np.concatenate(result.stages["values"]).any()
    for row, returns in zip(make_batch(), result.stages["returns"], strict=True):
        assert (returns[row.loss_mask] == row.reward).all()
    assert np.concatenate(engine.train_step(make_batch()).stages["values"]).any()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_its_updates_equal_a_plain_loop(model: Path, scorer: Path, clip: float | None):
    """Two updates on half the groups each, without micro-batches."""
    training = {"warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0, "lr": 1e-4}
    engine = engine_of(model, critic=str(scorer), critic_lr=3e-3, value_clip=clip, training=training)
    batch = make_batch()
    result = engine.train_step(batch)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(scorer, num_labels=1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    norms, total, count = [], 0.0, 0
    for minibatch in result.plan:
        losses = []
        for number in sorted(row for rows in minibatch for row in rows):
            row, mask = batch[number], torch.from_numpy(batch[number].loss_mask)
            hidden = plain.model(input_ids=torch.from_numpy(row.input_ids).long()[None]).last_hidden_state[0]
            values = plain.score(hidden)[:-1, 0][mask[1:]]
            old, returns = (torch.from_numpy(result.stages[name][number])[mask] for name in ("values", "returns"))
            losses.append(value_loss(values, old, returns, clip))
        loss = torch.cat(losses)
        loss.mean().backward()
        total, count = total + float(loss.detach().sum()), count + len(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert result.metrics["critic/loss"] == pytest.approx(total / count, rel=1e-3)
    assert result.metrics["critic/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    assert engine.critic is not None
    for name, parameter in plain.named_parameters():
        apart = (engine.critic.inner.get_parameter(name) - parameter).abs() > 1e-4
        assert apart.float().mean() < 0.01, name


def test_its_rows_are_packed_with_the_policy_s(model: Path, scorer: Path):
    found = []
    for packs in (True, False):
        engine = engine_of(model, critic=str(scorer), minibatches=1)
        assert engine.policy.packs
        engine.policy.packs = packs
        done = engine.train_step(make_batch())
        found.append((np.concatenate(done.stages["values"]), done.metrics["critic/grad_norm"]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5) and found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_micro_batches_do_not_change_it(model: Path, scorer: Path):
    found = []
    for budget in (20, 10_000):
        engine = engine_of(model, critic=str(scorer), training={"micro_batch_tokens": budget})
        metrics = engine.train_step(make_batch()).metrics
        found.append([metrics[name] for name in ("critic/loss", "critic/grad_norm", "critic/explained_variance")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, model: Path, scorer: Path, dtype: str):
    engine = engine_of(model, dtype, critic=str(scorer))
    for seed in range(3):
        engine.train_step(make_batch(seed=seed))
    checkpoint.save(engine, tmp_path / "step-000003")
    ahead = [engine.train_step(make_batch(seed=seed)) for seed in (3, 4)]
    again = engine_of(model, dtype)  # its critic begins with other weights, and another architecture
    with pytest.raises(ModelError, match=r"another model .*critic\.model\.layers\.1\..* is absent in the checkpoint"):
        checkpoint.load(again, tmp_path / "step-000003")
    again = engine_of(model, dtype, critic=str(scorer))
    checkpoint.load(again, tmp_path / "step-000003")
    assert [again.train_step(make_batch(seed=seed)).digests for seed in (3, 4)] == [each.digests for each in ahead]
    assert any(name.startswith("critic.model.layers.0") for name in again.parameter_names)


def test_the_critic_lies_apart_from_the_policy_s_weights(tmp_path: Path, model: Path, scorer: Path):
    engine = engine_of(model, critic=str(scorer))
    engine.train_step(make_batch())
    folder = tmp_path / "step-000001"
    checkpoint.save(engine, folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    AutoModelForCausalLM.from_pretrained(folder)
    read = AutoModelForSequenceClassification.from_pretrained(folder / "trainer" / "critic")
    assert engine.critic is not None
    assert torch.equal(read.score.weight, engine.critic.inner.get_parameter("score.weight"))
    (folder / "trainer" / "critic" / "model.safetensors").write_bytes(b"x" * 1000)
    with pytest.raises(RecordError, match="step-000001 was altered"):
        checkpoint.load(engine, folder)
    plain = TrainEngine(make_config(model))
    checkpoint.save(plain, tmp_path / "step-000000")
    with pytest.raises(RecordError, match=r"has no critic \(trainer/critic\), which algorithm.advantages=gae needs"):
        checkpoint.load(engine, tmp_path / "step-000000")


def test_a_critic_of_another_vocabulary_is_named(tmp_path: Path, model: Path):
    small, other = tmp_path / "small", tmp_path / "other"
    tiny_model(small, vocab=VOCAB - 3)  # without a tokenizer
    with pytest.raises(ModelError, match=rf"critic in .*small has another vocabulary .*: {VOCAB - 3} embeddings and"):
        engine_of(model, critic=str(small))
    tiny_model(other)
    tokenizer = (model / "tokenizer.json").read_text()
    tiny_tokenizer(other)
    (other / "tokenizer.json").write_text(tokenizer.replace('"a":', '"é":'))
    with pytest.raises(ModelError, match=r"'a' is token \d+ of the policy and none of the critic"):
        engine_of(model, critic=str(other))
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere. algorithm.critic takes a folder"):
        engine_of(model, critic=str(tmp_path / "nowhere"))
    tiny_model(tmp_path / "mamba", "mamba")
    with pytest.raises(ModelError, match=r"no sequence classifier of mamba, .*\(algorithm.critic\)"):
        engine_of(model, critic=str(tmp_path / "mamba"))


@pytest.mark.parametrize("what", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_changes_no_critic(model: Path, scorer: Path, what: str):
    engine = engine_of(model, critic=str(scorer), training={"on_bad_gradient": what})
    assert engine.critic is not None
    before = engine.critic.inner.get_parameter("score.weight").clone()
    step = engine.prepare(make_batch())
    zeros_S = np.zeros_like(step.advantages_S)
    plan = [[list(range(len(step.tokens.ids)))]]
    step = replace(step, plan=plan, values_S=zeros_S, returns_S=zeros_S + np.inf)
    if what == "stop":
        with pytest.raises(TrainingError, match=r"step 3: the norm of the critic's gradient is (nan|inf)"):
            engine.critic.fit(step, 3)
    else:
        assert engine.critic.fit(step, 3).skipped == 1
    assert torch.equal(engine.critic.inner.get_parameter("score.weight"), before)
