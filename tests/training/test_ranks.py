"""Several ranks train as one does: real processes over gloo, each with a slice of the model (FSDP2), and groups of them
with a share of each block (tensor parallelism)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from clew.errors import LaunchError, ModelError
from clew.launch.ranks import rank_variables
from clew.processes import free_port
from clew.training.batching import deal
from clew.training.ranks import ALONE, Ranks
from clew.training.sharding import _check_dtypes, blocks_of
from clew.training.tensor_parallel import check_plan
from tests.forked import Forked
from tests.models import seeing_model, tiny_model, tiny_tokenizer
from tests.training.on_ranks import listen, work
from tests.training.sequences import make_config


class Group:
    """Ranks that wait for requests; see `tests.training.on_ranks`."""

    def __init__(self, ranks: int) -> None:
        port = free_port()
        self._children = [Forked(listen, variables=rank_variables(rank, ranks, port)) for rank in range(ranks)]

    def __call__(self, request: dict[str, Any]) -> None:
        for child in self._children:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        for child in self._children:
            if child.stdout.readline() != "done\n":
                for each in self._children:
                    each.kill()  # those that wait for the failed one, too
                raise AssertionError("a rank failed:\n" + "\n".join(each.stderr.read() for each in self._children))

    def close(self) -> None:
        for child in self._children:
            child.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Callable[[dict[str, Any]], None]]]:
    """Functions that train with 1, 2 and 4 ranks."""
    several = {ranks: Group(ranks) for ranks in (2, 4)}
    yield {1: lambda request: work(request, ALONE), **several}
    for group in several.values():
        group.close()


@pytest.fixture
def on_ranks(groups, tmp_path):
    """Train on that number of ranks, in groups of `tp`; returns what the steps said, and the weights."""

    def run(
        ranks: int, *, tp: int = 1, options: dict[str, Any] | None = None, **request: Any
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        out.mkdir()
        options = {"launch": {"ranks": ranks}, **(options or {})}
        options["training"] = {"tp": tp, **options.get("training", {})}
        groups[ranks]({"options": options, "batch": {}, "steps": 3, "out": str(out), **request})
        return json.loads((out / "said.json").read_text()), torch.load(out / "weights.pt", weights_only=True)

    return run


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    return str(tmp_path / "model")


FULL = {
    "algorithm": {"minibatches": 2, "kl_coef": 0.1},
    "training": {"micro_batch_tokens": 40, "lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5},
}
"""Reference model, several updates and micro-batches, clipping, decay."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "steps", "losses", "weights"), [("float64", 10, 1e-9, 1e-9), ("float32", 3, 1e-5, 1e-4)]
)
def test_one_two_and_four_ranks_give_the_same_run(on_ranks, tmp_path, model, dtype, steps, losses, weights):
    asked = {"model": model, "options": {**FULL, "dtype": dtype}, "batch": {"groups": 5}, "steps": steps}
    (alone, kept), *others = (on_ranks(ranks, **asked) for ranks in (1, 2, 4))
    for said, found in others:
        for one, several in zip(alone, said, strict=True):
            for name, value in one["metrics"].items():
                if name != "padding_share":
                    assert several["metrics"][name] == pytest.approx(value, rel=losses, abs=losses), name
        for name, tensor in kept.items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=weights), name
    assert len({json.dumps(said[0]["plan"]) for said, _ in (others[0], others[1])}) == 2, "the ranks shared no work"


# The norms of Gemma 2 and Mamba's scan compute in float32. Mixtral has experts.
@pytest.mark.parametrize(("family", "close"), [("gpt2", 1e-9), ("gemma2", 1e-6), ("mamba", 1e-6), ("mixtral", 1e-6)])
def test_other_architectures_and_supervised_steps(on_ranks, tmp_path, family, close):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", family)
    asked = {"model": str(tmp_path / "model"), "options": {"dtype": "float64"}, "supervised": True}
    (alone, kept), (said, found) = (on_ranks(ranks, **asked) for ranks in (1, 2))
    assert said[-1]["metrics"]["loss"] == pytest.approx(alone[-1]["metrics"]["loss"], abs=close)
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=close) for name, tensor in kept.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "supervised", "close"),
    [
        ({"algorithm": {"preset": "ppo", "minibatches": 2, "entropy_coef": 0.01}}, False, 1e-9),
        ({"algorithm": {"kl_coef": 0.1}, "training": {"lora_rank": 4}}, False, 1e-9),
        ({"algorithm": {"reject": {"by": "ratio", "over": "sequence_mean", "low": 0.21}, "veto": 0.12}}, False, 1e-9),
        ({"training": {"objective": "dpo"}}, True, 1e-9),
        ({"training": {"objective": "reward_model"}}, True, 1e-9),
    ],
    ids=["ppo", "lora", "rejection", "dpo", "reward_model"],
)
def test_critics_adapters_and_preferences(on_ranks, tmp_path, model, options, supervised, close):
    """Resume over a checkpoint, too, that another number of ranks wrote."""
    training = {"micro_batch_tokens": 40, "lr": 1e-3, **options.pop("training", {})}
    folder = tmp_path / "step-000002"
    asked = {"model": model, "options": {"dtype": "float64", "training": training, **options}, "supervised": supervised}
    asked["batch"] = {"samples": 4}
    alone, kept = on_ranks(1, **asked, steps=4)
    said, found = on_ranks(4, tp=1 if "lora_rank" in training else 2, **asked, steps=4)
    before, _ = on_ranks(2, **asked, steps=2, save=str(folder))
    after, resumed = on_ranks(4, **asked, steps=2, load=str(folder))
    for one, *several in zip(alone, said, [*before, *after], strict=True):
        for other in several:
            for name, value in one["metrics"].items():
                if name != "padding_share":
                    assert other["metrics"][name] == pytest.approx(value, rel=close, abs=close), name
    for name, tensor in kept.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=close), name
        assert torch.allclose(resumed[name], tensor, rtol=0, atol=close), name


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_logits_in_chunks_and_activations_that_are_computed_again(on_ranks, tmp_path, tie):
    """Chunks reach for spread parameters after the forward pass, checkpointing in the backward pass."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", tie=tie)
    asked = {"model": str(tmp_path / "model"), "batch": {"groups": 5}}
    alone, kept = on_ranks(1, options={**FULL, "dtype": "float64"}, **asked)
    saving = {**FULL, "training": {**FULL["training"], "activation_checkpointing": True}, "dtype": "float64"}
    said, found = on_ranks(2, options=saving, logits=300, **asked)
    assert said[-1]["metrics"]["loss"] == pytest.approx(alone[-1]["metrics"]["loss"], abs=1e-9)
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in kept.items())


def test_a_mini_batch_without_a_trained_token_changes_nothing(on_ranks, model):
    training = {"micro_batch_tokens": 40, "lr": 1e-3, "weight_decay": 0.1}
    options = {"dtype": "float64", "algorithm": {"minibatches": 3}, "training": training}
    (_, kept), (_, found) = (
        on_ranks(ranks, model=model, options=options, batch={"groups": 3}, untrained="g1") for ranks in (1, 2)
    )
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in kept.items())


def test_parameters_of_several_dtypes_in_one_block_are_refused():
    block = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"0\.bias in bfloat16, 1\.bias in float32.*model\.dtype=float32"):
        _check_dtypes([block])
    _check_dtypes([block[0], block[1], block])  # sharded apart


def test_bfloat16_has_its_masters_and_sums_in_float32(on_ranks, tmp_path, model):
    asked = {"model": model, "options": {"dtype": "bfloat16"}, "save": str(tmp_path / "step-000003")}
    (alone, _), (said, found) = (on_ranks(ranks, **asked) for ranks in (1, 2))
    assert said[-1]["metrics"]["loss"] == pytest.approx(alone[-1]["metrics"]["loss"], abs=0.05)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_checkpoint_of_any_number_of_ranks_loads_into_any_other(on_ranks, tmp_path, model):
    options = {**FULL, "dtype": "float64"}
    for saving, loading in ((2, 1), (1, 2), (2, 4)):
        folder = tmp_path / f"step-{saving}-{loading}"
        straight, ahead = on_ranks(saving, model=model, options=options, steps=4)
        on_ranks(saving, model=model, options=options, steps=2, save=str(folder))
        said, resumed = on_ranks(loading, model=model, options=options, steps=2, load=str(folder))
        assert said[-1]["metrics"]["loss"] == pytest.approx(straight[-1]["metrics"]["loss"], abs=1e-9)
        assert all(torch.allclose(resumed[name], tensor, rtol=0, atol=1e-9) for name, tensor in ahead.items())
        AutoModelForCausalLM.from_pretrained(folder)


def test_two_ranks_repeat_bit_for_bit_and_resume_so(on_ranks, tmp_path, model):
    folder = tmp_path / "step-000002"
    first, kept = on_ranks(2, model=model, options=FULL, steps=4)
    again, _ = on_ranks(2, model=model, options=FULL, steps=2, save=str(folder))
    resumed, found = on_ranks(2, model=model, options=FULL, steps=2, load=str(folder))
    assert [each["digests"] for each in [*again, *resumed]] == [each["digests"] for each in first]
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


def test_published_weights_are_whole(on_ranks, tmp_path, model):
    _, kept = on_ranks(2, model=model, publish=str(tmp_path / "published"))
    from safetensors.torch import load_file

    published = load_file(tmp_path / "published" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in published.items())


def test_adapters_are_published_as_one_model(on_ranks, tmp_path, model):
    from safetensors.torch import load_file

    options = {"dtype": "float64", "training": {"lora_rank": 4}}
    for ranks in (1, 2):
        on_ranks(ranks, model=model, options=options, publish=str(tmp_path / f"by-{ranks}"))
    one, two = (load_file(tmp_path / f"by-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert one.keys() == two.keys() and not any("lora" in name or "base_layer" in name for name in one)
    assert all(torch.allclose(two[name], tensor, rtol=0, atol=1e-9) for name, tensor in one.items())


def test_ranks_compute_images_together(on_ranks, tmp_path):
    """Ranks with text, or with nothing left to compute, beside one with an image gather its parameters, too."""
    seeing_model(tmp_path / "model")
    options = {"algorithm": {"kl_coef": 0.1}, "training": {"micro_batch_tokens": 1}, "dtype": "float64"}
    asked = {"model": str(tmp_path / "model"), "options": options, "media": str(tmp_path / "media")}
    asked["batch"] = {"groups": 1, "samples": 5, "vocab": 90}
    (alone, kept), *others = (on_ranks(ranks, **asked) for ranks in (1, 2, 4))
    for said, found in others:
        assert said[-1]["metrics"]["loss"] == pytest.approx(alone[-1]["metrics"]["loss"], abs=1e-9)
        assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in kept.items())


def test_more_ranks_than_rows(on_ranks, tmp_path, model):
    asked = {"model": model, "options": {"dtype": "float64"}, "batch": {"groups": 1, "samples": 2}}
    (alone, _), (said, _) = (on_ranks(ranks, **asked) for ranks in (1, 4))
    assert said[-1]["metrics"]["loss"] == pytest.approx(alone[-1]["metrics"]["loss"], abs=1e-9)


SPLIT = {**FULL, "training": {**FULL["training"], "micro_batch_tokens": 200}}
"""Use fewer micro-batches: ranks that split the blocks talk in each layer."""


ONE, GROUP, GROUPS = (1, 1, 1), (2, 2, 2), (4, 2, 1)
"""Ranks, tp, and steps."""


@pytest.mark.parametrize(
    ("family", "legs"),
    [
        ("qwen2", (ONE, GROUP, GROUPS, ONE)),  # biases
        pytest.param("qwen3", (ONE, GROUP, GROUPS), marks=pytest.mark.slow),  # norms of heads
        ("llama", (ONE, GROUP, ONE)),
    ],
)
def test_ranks_that_split_the_blocks_give_the_same_run(on_ranks, tmp_path, family, legs):
    """A relay, over checkpoints: one rank begins, a group of two goes on, then two groups, then one rank."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", family, tie=family == "qwen2")
    asked = {"model": str(tmp_path / "model"), "options": {**SPLIT, "dtype": "float64"}}
    alone, kept = on_ranks(1, **asked, steps=sum(steps for _, _, steps in legs))
    relay: list[dict[str, Any]] = []
    for leg, (ranks, tp, steps) in enumerate(legs):
        before = {"load": str(tmp_path / f"after-{leg - 1}")} if leg else {}
        said, found = on_ranks(ranks, tp=tp, steps=steps, save=str(tmp_path / f"after-{leg}"), **before, **asked)
        relay += said
    for one, other in zip(alone, relay, strict=True):
        for name, value in one["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in kept.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "after-1")


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_split_blocks_in_less_than_float64(on_ranks, model, dtype, close):
    asked = {"model": model, "options": {"dtype": dtype, "training": SPLIT["training"]}, "steps": 2}
    (alone, _), (said, _), (again, _) = (on_ranks(tp, tp=tp, **asked) for tp in (1, 2, 2))
    for one, several in zip(alone, said, strict=True):
        assert several["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], abs=close)
    assert [each["digests"] for each in again] == [each["digests"] for each in said], "not bit for bit"


def test_a_plan_that_lacks_a_sum_is_refused(on_ranks, tmp_path):
    """Qwen3's without its norms of heads: each rank would follow its own heads' gradients."""
    tiny_tokenizer(tmp_path / "model")
    plan = tiny_model(tmp_path / "model", "qwen3").config.base_model_tp_plan or {}
    path = tmp_path / "model" / "config.json"
    lacking = {name: style for name, style in plan.items() if "norm" not in name}
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_tp_plan": lacking}))
    said, _ = on_ranks(2, tp=2, model=str(tmp_path / "model"), refused=True)
    assert "different gradients of model.layers.0.self_attn.q_norm.weight on different ranks" in said[0]["refused"]


@pytest.mark.parametrize(
    ("family", "tp", "said"),
    [
        (
            "qwen2",
            4,
            "Qwen2ForCausalLM has num_key_value_heads=2, which 4 ranks cannot share evenly. Use training.tp=2",
        ),
        ("gpt2", 2, "transformers has no tensor-parallel plan (tp_plan) for GPT2LMHeadModel"),
        ("gemma4", 4, "Gemma4ForCausalLM has num_key_value_heads=2, which 4 ranks"),  # each layer says for itself
        ("mixtral", 2, "splits model.layers.0.mlp.experts (MixtralExperts) as 'moe_tp_experts', which Clew"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(tmp_path, family, tp, said):
    model = tiny_model(tmp_path / "model", family)
    with pytest.raises(ModelError, match=f"Cannot use training.tp={tp}: .*{re.escape(said)}"):
        check_plan(model, blocks_of(model), tp)


def test_groups_of_unequal_size_are_refused(tmp_path, model):
    with pytest.raises(ValidationError, match=r"training.tp is 4, which does not divide launch.ranks \(6\).*=2"):
        make_config(model, launch={"ranks": 6}, training={"tp": 4})


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 500),
    st.integers(1, 64),
    st.booleans(),
)
def test_rows_are_dealt_evenly(lengths: list[int], ranks: int, budget: int, width: int, packed: bool) -> None:
    dealt = deal(lengths, range(len(lengths)), budget=budget, packed=packed, ranks=ranks, width=width)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    assert len(dealt) % ranks == 0
    for rows in dealt:
        taken = [lengths[row] for row in rows]
        assert len(rows) <= 1 or (sum(taken) if packed else len(rows) * max(taken)) <= budget
    cost = [length * (12 * width + length) for length in lengths]
    shares = [sum(cost[row] for rows in dealt[rank::ranks] for row in rows) for rank in range(ranks)]
    assert max(shares) - min(shares) <= max(cost), "one rank waits for the others longer than it has to"


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match=r"rank 3 has no GPU: it needs GPU 1 .* and torch sees 1"), Ranks.joined():
        pass
