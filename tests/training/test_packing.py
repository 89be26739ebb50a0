"""Packed rows give the same logprobs, values and gradients as the same rows padded, in many architectures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV4Config,
    FalconH1Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    RecurrentGemmaConfig,
)

from clew.errors import ModelError
from clew.models.loading import load_value_model
from clew.training.engine import TrainEngine
from clew.training.isolation import check_causal, keeps_rows_apart, prepare_for_packing
from clew.training.packing import WASTE, Packed, bucket_by_length
from clew.training.scoring import ValueModel, score
from clew.training.sharding import blocks_of, checkpoint_activations
from tests.models import ATTENTION_FAMILIES, tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config, make_sequence

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}
THREE: dict[str, Any] = SMALL | {"num_hidden_layers": 3}
PADDED = {
    "recurrent and attention in parallel": FalconH1Config(
        **SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
    ),
    "recurrent and attention alternating": RecurrentGemmaConfig(**THREE, lru_width=32),
    "convolutions": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "keys that stand for many tokens": DeepseekV4Config(
        **SMALL,
        layer_types=["heavily_compressed_attention"] * 2,
        q_lora_rank=16,
        head_dim=8,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "positions within attention (ALiBi)": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}


def packed_of(lengths: list[int]) -> Packed:
    return Packed.of(lengths, CPU)


def test_by_hand() -> None:
    packed = packed_of([2, 100, 90])
    assert packed.starts_R.tolist() == [0, 2, 102] and packed.longest == 100
    assert packed.positions_P[:4].tolist() == [0, 1, 0, 1] and packed.positions_P[102:].tolist() == list(range(90))
    assert packed.shapes == [(2, 100), (1, 2)]  # 100² - 90² wasted pairs are allowed; 100² - 2² more are not
    assert packed.padding.tolist() == list(range(190, 200))
    assert packed.tokens_of_slots[:3].tolist() == [2, 3, 4] and packed.tokens_of_slots[200:].tolist() == [0, 1]


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_every_token_has_a_slot_and_little_is_wasted(lengths: list[int]) -> None:
    packed = packed_of(lengths)
    assert torch.equal(packed.tokens_of_slots[packed.slots_of_tokens_P], torch.arange(sum(lengths)))
    slots = sum(rows * length for rows, length in packed.shapes)
    assert sorted([*packed.slots_of_tokens_P.tolist(), *packed.padding.tolist()]) == list(range(slots))
    buckets = bucket_by_length(lengths)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        longest = max(lengths[row] for row in bucket)
        assert sum(longest**2 - lengths[row] ** 2 for row in bucket) <= WASTE


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_spreading_and_gathering_have_autograds_gradients(lengths: list[int], seed: int) -> None:
    """Compare with indexing, whose gradients torch derives: values in padding have no effect and get no gradient."""
    packed, generator = packed_of(lengths), torch.Generator().manual_seed(seed)
    tokens = torch.randn(1, 2, sum(lengths), 3, generator=generator, requires_grad=True)
    factors = [torch.randn(*shape, 2, 3, generator=generator) for shape in packed.shapes]
    parts = packed.spread(tokens)
    found = packed.gather([part.transpose(1, 2) * factor for part, factor in zip(parts, factors, strict=True)])
    (gradient,) = torch.autograd.grad(found.square().sum(), tokens)

    slots = tokens[0].transpose(0, 1)[packed.tokens_of_slots] * torch.cat([f.flatten(0, 1) for f in factors])
    expected = slots[packed.slots_of_tokens_P][None]
    (right,) = torch.autograd.grad(expected.square().sum(), tokens)
    assert torch.equal(found, expected) and torch.allclose(gradient, right)


def logprobs_and_gradient(
    model: Any, rows: list[torch.Tensor], *, packed: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs and then the entropies of all tokens but the first of each row, [2N], and a gradient.

    The gradient is that of the mean squared logprob by all trained parameters, flattened and normalized to length 1.
    """
    lengths = [len(row) for row in rows]
    ids_BT = torch.cat(rows)[None] if packed else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    rows_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths) - 1)
    columns_N = torch.cat([torch.arange(1, length) for length in lengths])
    temperatures_N = torch.linspace(0.5, 1.5, len(rows_N))
    where = packed_of(lengths) if packed else None
    scores = score(model, ids_BT, rows_N, columns_N, temperatures_N, where, **options)
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradient = torch.autograd.grad(scores.logprobs_N.square().mean(), parameters, allow_unused=True)
    flat = torch.cat([each.flatten() for each in gradient if each is not None])
    return torch.cat([scores.logprobs_N.detach(), scores.entropies_N]), flat / flat.norm()


def random_rows(lengths: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(2, 60, (length,)) for length in lengths]


@pytest.mark.parametrize("lengths", [[11, 2, 24, 3, 10], [168, 20, 133]], ids=["short", "long"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", [*ATTENTION_FAMILIES, "gpt_neox", "qwen3_moe"])
def test_packed_equals_padded(tmp_path: Any, family: str, tie: bool, lengths: list[int]) -> None:
    """Some rows are longer than the sliding windows (8 tokens), some are shorter."""
    model = tiny_model(tmp_path, family, tie=tie, scale=0.2)
    rows = random_rows(lengths)
    apart = logprobs_and_gradient(model, rows, packed=False)
    prepare_for_packing(model)
    assert keeps_rows_apart(model)
    for found, right in zip(logprobs_and_gradient(model, rows, packed=True), apart, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", [name for name in ATTENTION_FAMILIES if name != "gemma4"])
def test_values_of_packed_rows_equal_those_of_padded_ones(tmp_path: Any, family: str) -> None:
    """Excludes gemma4, for which transformers has no sequence classifier."""
    tiny_model(tmp_path, family, scale=0.2)
    inner = load_value_model(str(tmp_path), "float32", CPU, "model.path")
    torch.nn.init.normal_(inner.get_parameter("score.weight"))
    rows = random_rows([11, 2, 24, 3, 10])
    rows_N = torch.repeat_interleave(torch.arange(5), torch.tensor([len(row) for row in rows]))
    columns_N = torch.cat([torch.arange(len(row)) for row in rows])
    padded = ValueModel(inner)(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), rows_N, columns_N)
    parameters = list(inner.parameters())
    right = torch.autograd.grad(padded.square().mean(), parameters, allow_unused=True)
    prepare_for_packing(inner)
    assert keeps_rows_apart(inner)
    packed = ValueModel(inner)(torch.cat(rows)[None], rows_N, columns_N, packed_of([len(row) for row in rows]))
    found = torch.autograd.grad(packed.square().mean(), parameters, allow_unused=True)
    scale = float(padded.detach().abs().max())
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5 * scale)
    largest = max(float(each.abs().max()) for each in right if each is not None)
    for here, there in zip(found, right, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5 * largest)


class ValuesIgnorePositions(GPT2ForSequenceClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner = self.transformer.forward
        self.transformer.forward = lambda position_ids=None, **kwargs: inner(**kwargs)  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_value_model_that_mixes_packed_rows_is_detected(dtype: torch.dtype, caplog: Any) -> None:
    """The value head is zero, so the values are all 0 and cannot show the mixing; hidden states can."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_labels": 1}
    models: list[Any] = [kind(GPT2Config(**shape)) for kind in (GPT2ForSequenceClassification, ValuesIgnorePositions)]
    for model in models:
        model.to(dtype).eval()
        torch.nn.init.zeros_(model.score.weight)
        prepare_for_packing(model)
    assert keeps_rows_apart(models[0]) and not keeps_rows_apart(models[1])
    assert "ValuesIgnorePositions does not keep packed rows apart" in caplog.text


def test_a_model_in_float64_is_scored_in_float64(tmp_path: Any) -> None:
    model = tiny_model(tmp_path, "gemma3", dtype=torch.float64)
    prepare_for_packing(model)
    assert keeps_rows_apart(model)
    rows = random_rows([30, 9, 17])
    for found, right in zip(
        *(logprobs_and_gradient(model, rows, packed=packed) for packed in (True, False)), strict=True
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)


def test_a_row_has_the_same_bits_whatever_is_packed_beside_it(tmp_path: Any) -> None:
    model = tiny_model(tmp_path, "gemma2")
    prepare_for_packing(model)
    first, second, other = random_rows([19, 12, 19])
    (one, _), (two, _) = (logprobs_and_gradient(model, [row, second], packed=True) for row in (first, other))
    assert torch.equal(one[18:29], two[18:29]) and not torch.equal(one[:18], two[:18])


def test_learned_positions_restart_with_each_row(tmp_path: Any) -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, init_std=0.4
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    prepare_for_packing(model)
    assert keeps_rows_apart(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("why", PADDED)
def test_an_architecture_that_mixes_packed_rows_is_detected(why: str, dtype: torch.dtype, caplog: Any) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(PADDED[why]).to(dtype).eval()
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, "clew.training"):
        prepare_for_packing(model)
    assert not keeps_rows_apart(model) and model.config._attn_implementation == before
    (line,) = [record.getMessage() for record in caplog.records if record.name == "clew.training"]
    assert type(model).__name__ in line and "rows are padded" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_that_sees_later_tokens_is_refused(dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {**SMALL, "initializer_range": 1.0}
    del shape["num_key_value_heads"]
    models = []
    for decodes in (True, False):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(BertConfig(**shape, is_decoder=decodes)).to(dtype).eval())
    causal, sees_all = models
    check_causal(causal)
    with pytest.raises(ModelError, match=r'BertLMHeadModel is not causal.*"is_decoder": true'):
        check_causal(sees_all)


def test_a_context_shorter_than_the_rows_of_the_check_passes_it() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=8)
    check_causal(AutoModelForCausalLM.from_config(config).eval())


class WithoutPositions(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, use_cache: bool = False) -> Any:  # pyright: ignore
        return super().forward(input_ids=input_ids, use_cache=use_cache)


class IgnorePositions(GPT2LMHeadModel):
    def forward(self, position_ids: Any = None, **kwargs: Any) -> Any:  # pyright: ignore
        return super().forward(**kwargs)


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        (WithoutPositions, LlamaConfig(**SMALL), "fails on packed rows (TypeError at module.py:"),
        (IgnorePositions, GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4), "does not keep packed rows apart"),
    ],
)
def test_a_forward_without_positions_is_detected(architecture: Any, config: Any, words: str, caplog: Any) -> None:
    torch.manual_seed(0)
    model = architecture(config).eval()
    prepare_for_packing(model)
    assert not keeps_rows_apart(model) and words in caplog.text


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_of_transformers_is_refused_for_packed_rows(tmp_path: Any) -> None:
    """Repeating such a forward in the backward pass would let rows see each other, without any error."""
    model: Any = tiny_model(tmp_path, "llama")
    prepare_for_packing(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(AssertionError, match="are recomputed as padded ones"):
        logprobs_and_gradient(model, random_rows([5, 9]), packed=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_recomputed_activations_of_packed_rows_have_the_same_bits(tmp_path: Any, family: str) -> None:
    model = tiny_model(tmp_path, family)
    prepare_for_packing(model)
    rows = random_rows([5, 19, 9])
    kept = logprobs_and_gradient(model, rows, packed=True)
    checkpoint_activations(blocks_of(model))
    for found, right in zip(logprobs_and_gradient(model, rows, packed=True), kept, strict=True):
        assert torch.equal(found, right)


def test_a_step_of_packed_rows_equals_one_of_padded_rows(tmp_path: Any) -> None:
    """Packing long-tailed lengths also needs no padding and fewer micro-batches."""
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, "gemma3", scale=0.2)
    tail = [120, 60, 40, *range(4, 30)]
    batch = [make_sequence(f"g{i % 4}.e{i}.s0", response=length, reward=float(i % 3)) for i, length in enumerate(tail)]
    results = []
    for packs in (True, False):
        config = make_config(
            tmp_path, training={"micro_batch_tokens": 250}, algorithm={"minibatches": 2, "kl_coef": 0.1}
        )
        engine = TrainEngine(config)
        assert engine.policy.packs
        engine.policy.packs = packs
        results.append(engine.train_step(batch))
    packed, padded = results
    assert packed.metrics["padding_share"] == 0 < 0.05 < padded.metrics["padding_share"]
    assert sum(map(len, packed.plan)) < sum(map(len, padded.plan))
    for name in ("loss", "grad_norm", "kl", "entropy"):
        assert packed.metrics[name] == pytest.approx(padded.metrics[name], rel=1e-4, abs=1e-6), name
    first = [row for rows in packed.plan[0] for row in rows]
    for row in first:
        assert packed.stages["logprobs"][row] == pytest.approx(padded.stages["logprobs"][row], abs=1e-5)
        assert (packed.stages["logprobs"][row] == packed.stages["proximal_logprobs"][row]).all()


def test_an_engine_pads_if_its_model_cannot_pack(tmp_path: Any) -> None:
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, "mamba")
    engine = TrainEngine(make_config(tmp_path))
    metrics = engine.train_step(make_batch()).metrics
    assert not engine.policy.packs and metrics["padding_share"] > 0 and metrics["grad_norm"] > 0
