"""Scoring against a slow reference: one sequence, no padding, all logits, float64 softmax."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from clew.training.scoring import score
from tests.models import ATTENTION_FAMILIES, tiny_model


def reference(model, ids, column, temperature):
    """(logprob of token `column` given those before, entropy of its distribution)"""
    logits = model(input_ids=ids[None, :column]).logits[0, -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    return float(logprobs[ids[column]]), float(-(logprobs.exp() * logprobs).sum())


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
@torch.no_grad()
def test_padded_rows_score_as_if_alone(tmp_path, family, tie):
    model = tiny_model(tmp_path, family, tie=tie)
    torch.manual_seed(1)
    lengths = [11, 24, 3]
    rows = [torch.randint(2, 90, (length,)) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    where = [(0, 1), (0, 10), (1, 5), (1, 6), (1, 23), (2, 2)]
    temperatures = [1.0, 0.5, 2.0, 1.0, 0.7, 1.3]
    rows_N, columns_N = torch.tensor(where).T
    scores = score(model, ids, rows_N, columns_N, torch.tensor(temperatures))
    expected = [reference(model, rows[r], c, t) for (r, c), t in zip(where, temperatures, strict=True)]
    torch.testing.assert_close(scores.logprobs_N, torch.tensor([e[0] for e in expected]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies_N, torch.tensor([e[1] for e in expected]), rtol=1e-4, atol=1e-4)


def test_the_first_token_is_predicted_by_nothing(tmp_path):
    model = tiny_model(tmp_path)
    zero = torch.tensor([0])
    with pytest.raises(AssertionError, match="first token"):
        score(model, torch.ones(1, 3, dtype=torch.long), zero, zero, torch.ones(1))


def test_the_model_is_left_as_it_was(tmp_path):
    model = tiny_model(tmp_path)
    ids = torch.randint(2, 90, (2, 5))
    before = model(input_ids=ids).logits
    one = torch.tensor([1])
    score(model, ids, one, one, torch.ones(1))
    assert torch.equal(model(input_ids=ids).logits, before)


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HEADS = {
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "soft-capped": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "multiplied": CohereConfig(**SMALL, logit_scale=0.25),
    "divided": GraniteConfig(**SMALL, logits_scaling=3.0),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, initializer_range=0.4),
}


class Masked(Qwen2ForCausalLM):
    """Assigns into its logits, as Chameleon does for its image tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        assert returned.logits is not None
        returned.logits[..., 3:9] = -4.0
        return returned


@given(
    head=st.sampled_from([*HEADS, "masked"]),
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    logits=st.integers(1, 1500),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_logits_in_chunks_give_what_all_at_once_give(head, lengths, logits, seed):
    """Logprobs, entropies and gradients; of less than a token's logits each token is a chunk."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(HEADS[head]) if head in HEADS else Masked(HEADS["untied"])
    model.eval()
    ids_BT = torch.randint(2, 50, (len(lengths), max(lengths)))
    rows_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) - 1)
    columns_N = torch.cat([torch.arange(1, length) for length in lengths])
    temperatures_N, weights_N = torch.rand(2, len(rows_N)) + 0.5

    def scored(logits):
        scores = score(model, ids_BT, rows_N, columns_N, temperatures_N, max_logits=logits)
        gradient = torch.autograd.grad((weights_N * scores.logprobs_N).sum(), list(model.parameters()))
        return scores.logprobs_N, scores.entropies_N, torch.cat([each.flatten() for each in gradient])

    for found, whole in zip(scored(logits), scored(10**6), strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_chunk_of_logits_is_all_that_is_held():
    """Hold the logits of 40 of 200 tokens at a time: seen by whatever tensor the forward or backward pass makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        tokens = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (50,):
                self.tokens = max(self.tokens, result.numel() // 50)
            return result

    model = AutoModelForCausalLM.from_config(HEADS["soft-capped"]).eval()
    ids_BT = torch.randint(2, 50, (1, 201))
    columns_N = torch.arange(1, 201)
    found = {}
    for logits in (2000, 10**6):
        with Largest() as largest:
            zeros_N = torch.zeros_like(columns_N)
            scores = score(model, ids_BT, zeros_N, columns_N, torch.ones(200), max_logits=logits)
            scores.logprobs_N.sum().backward()
        found[logits] = largest.tokens
    assert found == {2000: 40, 10**6: 200}
