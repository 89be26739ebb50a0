"""The engine: what a step computes, that it repeats, and what it refuses."""

import dataclasses
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch

from clew.errors import ModelError, RecordError, TrainingError
from clew.inference.embedded import build_engine
from clew.inference.protocol import GenerateRequest, RequestTooLong, SamplingParams
from clew.models.loading import load_model
from clew.record.rows import ALIGNED
from clew.record.weights import read_digests
from clew.training.engine import TrainEngine
from clew.training.gradient_checks import ENOUGH_NORMS
from clew.training.published_weights import write_weights
from clew.training.sequence_gradients import first_not_finite
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config, make_sequence, score


@pytest.fixture
def model(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", scale=0.2)
    return tmp_path / "model"


def on_policy(engine, batch):
    """The batch as if the engine's present weights had sampled it."""
    return [
        dataclasses.replace(row, logprobs=logprobs, versions=np.where(row.loss_mask, engine.version, np.int32(-1)))
        for row, logprobs in zip(batch, score(engine.policy, batch), strict=True)
    ]


def test_two_engines_take_the_same_steps_bit_for_bit(model):
    config = make_config(model, algorithm={"minibatches": 2, "kl_coef": 0.1})
    engines = [TrainEngine(config), TrainEngine(config)]
    before = engines[0].weights_digest()
    for seed in range(3):
        one, two = (engine.train_step(make_batch(seed=seed)) for engine in engines)
        assert one.digests == two.digests and len(one.digests["gradients"]) == 2
        assert one.metrics == two.metrics and one.plan == two.plan
        for name in one.stages:
            assert all(np.array_equal(a, b) for a, b in zip(one.stages[name], two.stages[name], strict=True))
    assert engines[0].version == 3 and engines[0].optimizer.updates == 6
    assert engines[0].weights_digest() != before


def noisy(logprobs_N, advantages_N):
    kept_N = torch.rand_like(advantages_N) < 0.5
    return torch.where(kept_N, -logprobs_N * advantages_N, 0 * logprobs_N), {}


def test_what_is_random_in_a_loss_follows_from_seed_and_step(model):
    def losses(seed, first=0):
        engine = TrainEngine(make_config(model, algorithm={"loss": f"{__name__}.noisy"}, seed=seed))
        engine.restored(first)
        torch.rand(first + 1)
        return [np.concatenate(engine.train_step(make_batch()).stages["loss"]).tolist() for _ in range(2)]

    first, second = losses(1)
    assert losses(1) == [first, second] and first != second
    assert losses(1, first=1)[0] != first and losses(2)[0] != first


def test_a_sequence_that_the_model_has_no_embeddings_for_is_named(model, tmp_path):
    engine = TrainEngine(make_config(model))
    batch = make_batch()
    for token in (1000, -1):
        ids = batch[1].input_ids.copy()
        ids[2] = token
        batch[1] = dataclasses.replace(batch[1], input_ids=ids)
        with pytest.raises(TrainingError, match=rf"token 2 of g0\.e1\.s0 is {token}; the model has embeddings for the"):
            engine.train_step(batch)
    long = make_sequence("g0.e7.s0", prompt=10, response=250)
    assert engine.train_step([*make_batch(), long]).metrics["loss"]  # rotary positions go on
    tiny_model(model, "gpt2", scale=0.2)
    engine = TrainEngine(make_config(model))
    with pytest.raises(
        TrainingError, match=r"g0\.e7\.s0: it has 260 tokens, and the model takes at most 256 \(max_pos"
    ):
        engine.train_step([*make_batch(), long])
    tiny_model(tmp_path / "short", "gpt2", scale=0.2, context=12)
    tiny_tokenizer(tmp_path / "short")
    engine = TrainEngine(make_config(model, algorithm={"preset": "ppo", "critic": str(tmp_path / "short")}))
    with pytest.raises(TrainingError, match=r", and the critic takes at most 12 \(max_position_embeddings\)"):
        engine.train_step(make_batch())


def test_positions_that_change_with_the_longest_row_are_not_computed(tmp_path):
    """Longrope, as of Phi-3 with a context of 128k: the frequencies of all rows follow from the longest."""
    tiny_tokenizer(tmp_path / "model")
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40}
    rope |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 9.0, 16.0]}
    tiny_model(tmp_path / "model", "phi3", more={"rope_parameters": rope, "original_max_position_embeddings": 40})
    engine = TrainEngine(make_config(tmp_path / "model"))
    batch = [make_sequence(f"g0.e{i}.s0", response=length - 3, reward=i) for i, length in enumerate((9, 40, 14))]
    packed = score(engine.policy, batch)
    for row, logprobs in zip(batch, packed, strict=True):
        assert score(engine.policy, [row])[0] == pytest.approx(logprobs, abs=1e-5)
    with pytest.raises(TrainingError, match=r"has 41 tokens, and the model takes at most 40 \(original_max"):
        engine.train_step([*batch, make_sequence("g0.e7.s0", response=38)])
    served = build_engine(load_model(str(tmp_path / "model"), "float32", torch.device("cpu")), None, max_running=4)
    with pytest.raises(RequestTooLong, match=r"context \(original_max_position_embeddings of longrope\) is 40"):
        served.check(GenerateRequest(list(range(6, 47)), SamplingParams()))


def test_one_update_equals_a_plain_loop(model):
    """Against ten lines without micro-batches, plan or record: same loss, same gradient norm, same weights."""
    config = make_config(model, training={"warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0})
    engine = TrainEngine(config)
    batch = on_policy(engine, make_batch())
    result = engine.train_step(batch)

    plain = load_model(str(model), "float32", torch.device("cpu"))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=config.training.betas, weight_decay=0.0)
    losses = []
    for row, advantages in zip(batch, result.stages["advantages"], strict=True):
        ids = torch.from_numpy(row.input_ids).long()
        logprobs = plain(input_ids=ids[None]).logits[0].log_softmax(-1)
        for i in np.flatnonzero(row.loss_mask):
            losses.append(-float(advantages[i]) * torch.exp(logprobs[i - 1, ids[i]] - float(row.logprobs[i])))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.training.max_grad_norm)
    optimizer.step()
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in plain.named_parameters():
        # Adam's first step is the sign of the gradient: where that is nearly zero, rounding decides
        apart = (engine.policy.model.get_parameter(name) - parameter).abs() > 1e-5
        assert apart.float().mean() < 0.01, name


def test_micro_batches_do_not_change_the_gradient(model):
    norms, losses = set(), set()
    for budget in (20, 60, 10_000):
        engine = TrainEngine(make_config(model, training={"micro_batch_tokens": budget}))
        metrics = engine.train_step(make_batch()).metrics
        norms.add(round(metrics["grad_norm"], 5))
        losses.add(round(metrics["loss"], 5))
    assert len(norms) == len(losses) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "gspo"},
        {"preset": "dr_grpo", "importance": "sequence_mask", "importance_cap": 50},
        {"loss_mean": "sequence", "overlong_filter": True},
    ],
)
def test_options_of_whole_sequences_do_not_depend_on_micro_batches(model, options):
    batch = make_batch()
    batch = [*batch[:4], dataclasses.replace(batch[4], finish_reason="length"), *batch[5:]]
    found = []
    for budget in (20, 10_000):
        training = {"micro_batch_tokens": budget, "warmup_steps": 0}
        config = make_config(model, training=training, algorithm={"minibatches": 2, **options})
        engine = TrainEngine(config)
        metrics = engine.train_step(on_policy(engine, batch)).metrics
        found.append([metrics[name] for name in ("loss", "grad_norm", "importance_weight")])
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-7) and found[0][1] > 0


def test_the_mean_within_sequences_equals_a_plain_one(model):
    """loss_mean=sequence on policy: the mean over sequences of minus the advantage; one has no tokens."""
    engine = TrainEngine(make_config(model, algorithm={"loss_mean": "sequence"}))
    batch = [*on_policy(engine, make_batch()), make_sequence("g0.e0.s1", response=0)]
    result = engine.train_step(batch)
    advantages = [
        values[row.loss_mask][0]
        for row, values in zip(batch, result.stages["advantages"], strict=True)
        if row.loss_mask.any()
    ]
    assert result.metrics["loss"] == pytest.approx(-np.mean(advantages), abs=1e-5)
    totals = [-values.sum() for values in result.stages["loss"]]
    assert totals[:-1] == pytest.approx(
        np.array(advantages) * result.metrics["tokens_trained"] / 12, rel=1e-4, abs=1e-5
    )


def test_a_sequence_that_was_cut_off_has_no_part_in_the_loss(model):
    config = make_config(model, algorithm={"overlong_filter": True, "advantages": "none"})
    batch = make_batch()
    cut = [dataclasses.replace(batch[0], finish_reason="length"), *batch[1:]]
    without, filtered = TrainEngine(config).train_step(batch[1:]), TrainEngine(config).train_step(cut)
    assert filtered.metrics["grad_norm"] == pytest.approx(without.metrics["grad_norm"], rel=1e-5)
    assert filtered.metrics["loss"] == pytest.approx(without.metrics["loss"], rel=1e-5)
    assert not filtered.stages["loss"][0].any() and filtered.stages["advantages"][0].any()


def test_a_divergence_in_the_reward_lowers_the_advantage_of_what_the_first_model_finds_unlikely(model):
    config = make_config(
        model, algorithm={"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "advantages": "none"}
    )
    engine = TrainEngine(config)
    batch = on_policy(engine, make_batch())
    result = engine.train_step(batch)
    assert [values.sum() for values in result.stages["advantages"]] == pytest.approx(
        [row.reward * row.loss_mask.sum() for row in batch], abs=1e-3
    )
    batch = on_policy(engine, batch)
    result = engine.train_step(batch)
    for row, advantages, reference in zip(
        batch, result.stages["advantages"], result.stages["reference_logprobs"], strict=True
    ):
        mask = row.loss_mask
        assert advantages[mask] == pytest.approx(row.reward - 0.5 * (row.logprobs - reference)[mask].sum(), rel=1e-4)
    assert result.metrics["kl"] != 0


def not_finite(logprobs_N, advantages_N):
    return logprobs_N * advantages_N / 0.0, {}


def too_much(stage, scope) -> None:
    """Take as much memory as a model's activations may take."""
    torch.zeros(2**50)


def test_a_step_that_does_not_fit_into_memory_says_what_to_lower(model):
    engine = TrainEngine(make_config(model))
    engine.watch = too_much
    with pytest.raises(TrainingError, match=r"step 0 does not fit into the memory of cpu: .*micro_batch_tokens \(60\)"):
        engine.train_step(make_batch())


def test_a_loss_of_the_users_own_that_is_not_finite_is_named(model):
    engine = TrainEngine(make_config(model, algorithm={"loss": "tests.training.test_engine.not_finite"}))
    before = engine.weights_digest()
    with pytest.raises(TrainingError, match=r"is (nan|-?inf) .*algorithm.loss=tests\..*not_finite returned this loss"):
        engine.train_step(make_batch())
    assert engine.weights_digest() == before


def test_proximal_logprobs_have_the_bits_of_the_loss_s_own(model):
    """Nothing has changed yet in the first mini-batch, so the extra forward must agree exactly."""
    engine = TrainEngine(make_config(model, algorithm={"minibatches": 2}))
    result = engine.train_step(make_batch())
    first, second = ([row for rows in minibatch for row in rows] for minibatch in result.plan)
    stages = result.stages
    assert all(np.array_equal(stages["proximal_logprobs"][row], stages["logprobs"][row]) for row in first)
    assert not all(np.array_equal(stages["proximal_logprobs"][row], stages["logprobs"][row]) for row in second)


def test_metrics_by_hand(model):
    rows = [
        make_sequence("g0.e0.s0", prompt=3, response=4, reward=1.0, version=1),
        make_sequence("g0.e0.s1", prompt=4, response=2, reward=1.0, version=2),
        dataclasses.replace(make_sequence("g0.e1.s0", prompt=3, response=3, reward=0.0), finish_reason="length"),
    ]
    engine = TrainEngine(make_config(model, training={"micro_batch_tokens": 1000}))
    engine.restored(3)
    metrics = engine.train_step(rows).metrics
    expected = {
        "reward": 0.5,
        "reward_std": 0.5,
        "reward/match": 0.5,
        "groups": 1,
        "equal_groups_share": 0,
        "episodes": 2,
        "sequences": 3,
        "response_length": 4.5,
        "response_length_max": 6,
        "truncated_share": 0.5,
        "lag_mean": (4 * 2 + 2 * 1 + 3 * 3) / 9,
        "lag_max": 3,
        "tokens": 19,
        "tokens_trained": 9,
        "padding_share": 0,
        "clip_share": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "kl" not in metrics


def test_without_lag_the_engine_agrees_with_what_was_sampled(model):
    engine = TrainEngine(make_config(model))
    metrics = engine.train_step(on_policy(engine, make_batch())).metrics
    assert metrics["behaviour_gap_max"] < 1e-5 and metrics["behaviour_k3"] < 1e-9
    assert metrics["importance_weight"] == pytest.approx(1, abs=1e-5) and metrics["lag_max"] == 0


def test_kl_to_the_first_model_grows_from_zero(model):
    engine = TrainEngine(make_config(model, algorithm={"kl_coef": 0.05}))
    first, *_, last = (engine.train_step(make_batch(seed=seed)) for seed in range(4))
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-6) and last.metrics["kl"] > 1e-3
    assert "reference_logprobs" in first.stages


def test_temperature_divides_the_logits(model):
    engine = TrainEngine(make_config(model))
    (row,) = [make_sequence("g0.e0.s0", temperature=0.5)]
    ids = torch.from_numpy(row.input_ids).long()
    logprobs = (engine.policy.model(input_ids=ids[None]).logits[0] / 0.5).log_softmax(-1).tolist()
    expected = [logprobs[i - 1][ids[i]] if i >= 3 else 0.0 for i in range(7)]
    assert score(engine.policy, [row])[0] == pytest.approx(expected, abs=1e-5)


def test_a_sequence_without_trained_tokens_changes_nothing(model):
    config = make_config(model)
    batch = make_batch()
    empty = make_sequence("g0.e0.s1", prompt=9, response=0, reward=batch[0].reward)
    alone, beside = TrainEngine(config).train_step(batch), TrainEngine(config).train_step([*batch, empty])
    assert beside.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-5)
    assert len(beside.stages["loss"][-1]) == 9 and not beside.stages["loss"][-1].any()


def test_a_batch_without_any_trained_token_leaves_the_weights(model):
    engine = TrainEngine(make_config(model))
    before = engine.weights_digest()
    rows = [make_sequence(f"g0.e{i}.s0", response=0, reward=float(i)) for i in range(2)]
    result = engine.train_step(rows)
    assert result.digests["weights"] == before and result.metrics["grad_norm"] == 0 and engine.version == 1


def test_infinity_stops_before_the_weights_change_and_names_the_sequence(model):
    engine = TrainEngine(make_config(model))
    batch = make_batch()
    engine.train_step(batch)
    before = engine.weights_digest()
    bad = batch[5]
    logprobs = bad.logprobs.copy()
    logprobs[-1] = np.nan
    broken = [*batch[:5], dataclasses.replace(bad, logprobs=logprobs), *batch[6:]]
    with pytest.raises(TrainingError, match=rf"step 1: the loss of token {len(logprobs) - 1} of g1\.e2\.s0 is nan"):
        engine.train_step(broken)
    engine.restored(1)
    assert engine.weights_digest() == before and engine.version == 1
    engine.train_step(batch)  # nothing of the broken step is left behind


def test_infinity_in_the_record_is_the_place_that_blame_finds(model):
    engine = TrainEngine(make_config(model))
    batch = make_batch()
    batch[5].logprobs[[0, -1]] = np.nan  # the first token is not trained on, so that its logprob is no input
    token = len(batch[5].logprobs) - 1
    found = first_not_finite(engine, engine.prepare(batch), 5)
    assert found == f"the behaviour logprob of token {token} of g1.e2.s0 (1 tokens)"


def test_demonstrations_load_no_reference(model):
    config = make_config(model, algorithm={"preset": "grpo"})
    assert TrainEngine(config).policy.reference is not None
    engine = TrainEngine(config, supervised=True)
    engine.configure(config.training, config.algorithm)
    assert engine.policy.reference is None and engine.train_step(make_batch()).metrics["loss"] > 0


@pytest.mark.parametrize("rate", ["training.lr", "algorithm.critic_lr"])
def test_weights_that_are_not_finite_name_the_learning_rate_that_made_them(model, rate):
    section, field = rate.split(".")
    sections = {"algorithm": {"preset": "ppo"}, "training": {"warmup_steps": 0}}
    sections[section][field] = 1e38
    with pytest.raises(TrainingError, match=rf"after the update, .* has NaN .* with a lower {rate}\."):
        TrainEngine(make_config(model, **sections)).train_step(make_batch())


def test_weights_that_were_not_finite_before_the_step_blame_no_update(model):
    engine = TrainEngine(make_config(model, training={"on_bad_gradient": "skip"}))
    next(iter(dict(engine.policy.parameters(trained=True)).values())).data.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"step 0: .* had NaN or infinity before this step already"):
        engine.train_step(make_batch())


def test_images_for_a_critic(model):
    batch = make_batch()
    batch[5] = dataclasses.replace(batch[5], images=["a" * 64])
    with pytest.raises(TrainingError, match=r"Cannot train on g1\.e2\.s0: it shows images, which critics do not take"):
        TrainEngine(make_config(model, algorithm={"preset": "ppo"})).train_step(batch)


def test_images_for_a_model_that_takes_none(model):
    engine = TrainEngine(make_config(model))
    batch = make_batch()
    batch[5] = dataclasses.replace(batch[5], images=["a" * 64])
    with pytest.raises(TrainingError, match=r"Cannot train on g1\.e2\.s0: it shows images, and .* takes none\. Use"):
        engine.train_step(batch)


def test_a_critic_that_cannot_be_added_leaves_the_settings(model):
    engine = TrainEngine(make_config(model))
    before = engine.config
    other = make_config(model, algorithm={"preset": "ppo", "kl_coef": 0.1})
    with pytest.raises(
        ModelError, match=r"Cannot continue version 0 with algorithm\.advantages=gae: it needs a critic"
    ):
        engine.configure(other.training, other.algorithm)
    assert engine.config is engine.policy.config is before and engine.policy.reference is None


def test_bfloat16_computes_as_inference_does_and_loses_no_small_update(model):
    config = make_config(model, dtype="bfloat16", training={"lr": 1e-5, "warmup_steps": 0})
    engine = TrainEngine(config)
    for seed in range(5):
        engine.train_step(make_batch(seed=seed))
    assert {p.dtype for p in engine.policy.model.parameters()} == {torch.bfloat16}
    for name, parameter in engine.policy.model.named_parameters():
        master = engine.optimizer.masters[name]
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16())
    weight = engine.optimizer.masters["model.embed_tokens.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gpt_neox", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tie", [True, False])
def test_published_weights_load_in_the_inference_engine(tmp_path, family, tie):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", family, tie=tie, scale=0.2)
    engine = TrainEngine(make_config(tmp_path / "model"))
    core = build_engine(load_model(str(tmp_path / "model"), "float32", torch.device("cpu")), engine.policy.tokenizer)
    batch = make_batch()
    engine.train_step(batch)
    core.load_weights(write_weights(engine, tmp_path / "version-000001", engine.version))
    row = batch[0]
    last = float(score(engine.policy, [row])[0][-1])
    assert core.version == 1 and core.score(row.input_ids.tolist()) == pytest.approx(last, abs=1e-5)


def test_an_old_copy_is_not_published_for_new_weights(tmp_path, monkeypatch):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    engine = TrainEngine(make_config(tmp_path / "model", inference={"backend": "vllm"}))
    old = {name: tensor.clone() for name, tensor in engine.policy.published_state().items()}
    write_weights(engine, tmp_path / "version-000000", 0)
    monkeypatch.setattr(engine.policy, "published_state", lambda: old)
    write_weights(engine, tmp_path / "version-000000", 0)  # the same weights again: nothing has changed
    engine.train_step(make_batch())
    with pytest.raises(TrainingError, match=r"version 1: \d+ of \d+ tensors to send are not those"):
        write_weights(engine, tmp_path / "version-000001", 1)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a small tmpfs needs root")
@pytest.mark.parametrize("lora_rank", [None, 32])
def test_a_disk_that_is_full_in_mid_update(model, tmp_path, lora_rank):
    """inference.weights is often a small tmpfs: the version before stays whole, and the next one is whole or absent."""
    engine = TrainEngine(make_config(model, inference={"backend": "vllm"}, training={"lora_rank": lora_rank}))
    write_weights(engine, tmp_path / "sized", 0)
    size = sum(path.stat().st_size for path in (tmp_path / "sized").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", disk]).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        first = write_weights(engine, disk / "version-000000", 0)
        engine.train_step(make_batch())
        with pytest.raises(RecordError, match=r"Cannot write .*version-000001: no space left .*lost: free"):
            write_weights(engine, disk / "version-000001", 1)
        assert [path.name for path in disk.iterdir()] == ["version-000000"]
        assert read_digests(first), "it can still be read"
        subprocess.run(["mount", "-o", f"remount,size={size * 3}", disk], check=True)
        assert write_weights(engine, disk / "version-000001", 1).exists()
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("tie", [True, False])
def test_published_weights_load_in_transformers_and_answer_the_probe(tmp_path, family, tie):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", family, tie=tie)
    engine = TrainEngine(make_config(tmp_path / "model"))
    engine.train_step(make_batch())
    for _ in range(2):  # publishing again replaces
        ref = write_weights(engine, tmp_path / "weights" / "version-000001", engine.version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["version-000001"]
    loaded = load_model(ref.path, "float32", torch.device("cpu"))
    for name, parameter in engine.policy.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    logprobs = loaded(input_ids=torch.tensor([ref.probe_ids])).logits[0, -2].log_softmax(-1).tolist()
    assert logprobs[ref.probe_ids[-1]] == pytest.approx(ref.probe_logprob, abs=1e-5)
    assert ref.version == 1 and ref.digest == engine.weights_digest()


@pytest.mark.parametrize(("context", "length"), [(9, 2), (32, 24), (256, 32)])
def test_the_probe_leaves_room_in_the_context(tmp_path, context, length):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", context=context)
    ref = write_weights(TrainEngine(make_config(tmp_path / "model")), tmp_path / "version-000000", 0)
    assert len(ref.probe_ids) == length


def test_the_first_gradient_after_steps_without_one_is_no_spike(model):
    engine = TrainEngine(make_config(model, training={"spike_factor": 5.0}))
    for seed in range(ENOUGH_NORMS):
        engine.train_step([dataclasses.replace(row, reward=0.5) for row in make_batch(seed=seed)])
    before = engine.weights_digest()
    engine.train_step(make_batch(seed=99))
    assert engine.weights_digest() != before


@pytest.mark.parametrize("what", ["nan", "spike"])
def test_a_bad_update_is_left_out_or_stops_the_run(model, what, caplog):
    options = {"on_bad_gradient": "skip", "spike_factor": 3.0}
    engine = TrainEngine(make_config(model, training=options))
    for seed in range(ENOUGH_NORMS):
        engine.train_step(make_batch(seed=seed))
    norms = list(engine.recent_norms)
    before, updates = engine.weights_digest(), engine.optimizer.updates
    batch = make_batch(seed=99)
    if what == "nan":
        batch[4].logprobs[-1] = np.nan
    else:
        for row in batch:  # proximal over behaviour is capped at 2: every token counts twice, and with one sign
            row.logprobs[row.loss_mask] = -40.0
        batch = [dataclasses.replace(row, **longer(row)) for row in batch]
    stopping = TrainEngine(make_config(model, training=options | {"on_bad_gradient": "stop"}))
    stopping.policy.model.load_state_dict(engine.policy.model.state_dict())
    stopping.restored(engine.version, norms)
    result = engine.train_step(batch)
    assert result.metrics["updates_skipped"] == 1 and engine.weights_digest() == before
    assert (
        engine.optimizer.updates == updates and list(engine.recent_norms) == norms and engine.version == len(norms) + 1
    )
    said = "is nan" if what == "nan" else "over training.spike_factor=3 times the median of the last 8 updates"
    assert said in caplog.text and "clew blame RUN --step 8" in caplog.text
    with pytest.raises(TrainingError, match="This update was not made"):
        stopping.train_step(batch)
    assert stopping.weights_digest() == before
    assert engine.train_step(make_batch(seed=100)).metrics["updates_skipped"] == 0


def longer(row):
    """The columns of a row whose last token is repeated."""
    return {name: np.concatenate([getattr(row, name), np.repeat(getattr(row, name)[-1:], 60)]) for name in ALIGNED}
