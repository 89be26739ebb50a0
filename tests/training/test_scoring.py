"""Scoring against a slow reference: one sequence, no padding, all logits, float64 softmax."""

import pytest
import torch

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
