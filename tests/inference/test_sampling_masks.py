"""Sampling masks: what top_p, top_k and min_p left, from the engine through the record to the trainer's scores."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clew.gateway.interactions import Interaction
from clew.gateway.sequences import aligned, reported
from clew.inference.local import LocalEngine
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams, Span
from clew.inference.retries import generate_through_aborts
from clew.inference.sampling import RowParams, choose
from clew.models.loading import load_model
from clew.record import rows
from clew.record.batch_digest import digest_rows
from clew.record.rows import Sequence
from clew.training.scoring import score
from clew.training.tokens import MicroBatch, Tokens
from clew.view.episode import sampled_by
from tests.inference.test_embedded import engines, folder_with

PROMPT = [7, 8, 9]
CUTS = [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.8, "temperature": 1.3}]


def test_by_hand() -> None:
    """top_k=2 leaves two of 0.5, 0.3, 0.2: 0.5 / 0.8 and 0.3 / 0.8."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    row = RowParams.stack([SamplingParams(top_k=2)], 3, torch.device("cpu"))
    drawn = choose(logits, row, torch.tensor([0.9]))
    assert drawn.ids_R.tolist() == [1] and drawn.logprobs_R.item() == pytest.approx(np.log(0.3))
    assert [each.tolist() for each in drawn.masks([0])] == [[0, 1]]
    assert drawn.logprobs_R.item() == pytest.approx(np.log(0.3 / 0.8), abs=1e-6)


def sequence_of(completion: Completion, params: SamplingParams) -> Sequence:
    known = {"index": 0, "input_ids": PROMPT, "text": "", "params": params, "prompt": "", "started_at": 0.0}
    interaction = Interaction(**vars(completion), id="g000000.e0.i0", finished_at=0.0, **known)
    names = {"id": "g000000.e0.s0", "group_id": "g000000", "episode_id": "g000000.e0", "reward": 1.0}
    return Sequence(**names, **aligned([interaction]), **reported([interaction]))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("fast", [True, False])
def test_engine_and_trainer_renormalise_over_the_same_tokens(tmp_path: Path, cut: dict[str, float], fast: bool) -> None:
    core = engines(folder_with(tmp_path))[int(fast)]
    model = load_model(str(tmp_path), "float32", torch.device("cpu"))
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(), seed=3, **cut)  # pyright: ignore[reportArgumentType]
    request = GenerateRequest(PROMPT, params, sampling_mask=True)
    completion = asyncio.run(LocalEngine(core).generate(request))
    masks = completion.sampling_mask
    assert masks is not None and all(token in mask for token, mask in zip(completion.output_ids, masks, strict=True))
    assert 1 < max(map(len, masks)) < core.vocab
    row = sequence_of(completion, params)
    [row] = rows.from_table(rows.to_table([row]))
    micro = MicroBatch.of(Tokens.of([row, row]), [1], torch.device("cpu"))  # the second: the places in the batch count
    for limit in (None, 5 * core.vocab):  # all at once, and in chunks
        scores = score(
            model, micro.input_ids_BT, micro.rows_N, micro.columns_N, micro.temperatures_N, masks=micro.masks,
            max_logits=limit, entropy_gradient=True,
        )  # fmt: skip
        with torch.no_grad():  # transformers: logits masked, then log_softmax
            logits = model(micro.input_ids_BT).logits[0, len(PROMPT) - 1 : -1] / params.temperature
            for place, mask in enumerate(masks):
                kept = torch.full_like(logits[place], -torch.inf)
                kept[mask] = logits[place][mask]
                expected = torch.log_softmax(kept, -1)
                assert scores.logprobs_N[place].item() == pytest.approx(
                    float(expected[row.input_ids[3 + place]]), abs=1e-5
                )
                entropy = -(expected.exp() * expected)[mask].sum()
                assert scores.entropies_N[place].item() == pytest.approx(float(entropy), abs=1e-4)
        np.testing.assert_allclose(scores.logprobs_N.detach().numpy(), row.logprobs[3:], atol=1e-5)
        (scores.logprobs_N.sum() + scores.entropies_N.sum()).backward()
        assert all(each.grad is None or bool(each.grad.isfinite().all()) for each in model.parameters())


def test_nobody_who_did_not_ask_gets_other_logprobs(tmp_path: Path) -> None:
    engine = LocalEngine(engines(folder_with(tmp_path))[1])
    params = SamplingParams(max_new_tokens=5, top_k=2, stop_token_ids=())
    plain = asyncio.run(engine.generate(GenerateRequest(PROMPT, params)))
    asked = asyncio.run(engine.generate(GenerateRequest(PROMPT, params, sampling_mask=True)))
    assert plain.sampling_mask is None and plain.output_ids == asked.output_ids
    assert all(before < after for before, after in zip(plain.logprobs, asked.logprobs, strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_a_top_k_that_cuts_nothing_off_has_no_mask_and_stops_no_engine(tmp_path: Path, fast: bool) -> None:
    core = engines(folder_with(tmp_path))[int(fast)]
    plain = SamplingParams(max_new_tokens=5, stop_token_ids=(), seed=3)
    same = [replace(plain, top_k=top_k) for top_k in (core.vocab, 2**31, 2**64)]
    cut = [replace(plain, top_k=top_k, top_p=0.5) for top_k in (0, 2**64)]

    async def complete() -> list[Completion]:
        requests = [GenerateRequest(PROMPT, params, sampling_mask=True) for params in (plain, *same, *cut)]
        engine = LocalEngine(core)
        return await asyncio.gather(*map(engine.generate, requests))

    whole, *others, alone, both = asyncio.run(complete())
    assert all(other.sampling_mask is None and other == whole for other in others)
    assert both.sampling_mask is not None and both == alone


def span(start: int, end: int, server: str) -> Span:
    return Span(start=start, end=end, server=server, version="7")


class Interrupted:
    """An engine that aborts after two tokens, and goes on elsewhere."""

    def __init__(self, *parts: Completion) -> None:
        self.parts = list(parts)

    async def generate(self, request: GenerateRequest) -> Completion:
        return self.parts.pop(0)

    async def version(self) -> int:
        return 0


def part(ids: list[int], server: str, reason: str = "abort", masked: bool = True) -> Completion:
    return Completion(
        output_ids=ids, logprobs=[-1.0] * len(ids), versions=[7] * len(ids), finish_reason=reason,  # type: ignore[arg-type]
        sampling_mask=[[each, 50] for each in ids] if masked else None, sampled_by=[span(0, len(ids), server)],
    )  # fmt: skip


def test_masks_and_servers_of_a_completion_that_went_on_elsewhere() -> None:
    params = SamplingParams(max_new_tokens=4, top_k=2)
    request = GenerateRequest(PROMPT, params, sampling_mask=True)
    whole = asyncio.run(generate_through_aborts(Interrupted(part([4, 5], "a"), part([6], "b", "stop")), request))
    assert whole.sampling_mask == [[4, 50], [5, 50], [6, 50]]
    row = sequence_of(whole, params)
    assert row.sampled_by == [span(3, 5, "a"), span(5, 6, "b")]
    assert row.sampling_mask_counts is not None and row.sampling_mask_counts.tolist() == [0, 0, 0, 2, 2, 2]
    half = Interrupted(part([4, 5], "a"), part([6], "b", "stop", masked=False))
    assert "only one of two servers" in asyncio.run(generate_through_aborts(half, request)).wrong_logprobs


def test_routed_experts_are_those_that_each_token_went_on_from() -> None:
    def experts(count: int, value: int) -> np.ndarray:
        return np.full((count, 2, 1), value, np.uint8)

    first = replace(part([4, 5], "a"), routed_experts=experts(4, 1))
    whole = first.followed_by(replace(part([6], "b", "stop"), routed_experts=experts(5, 2)))
    row = sequence_of(whole, SamplingParams(top_k=2))
    [back] = rows.from_table(rows.to_table([row]))
    assert back.routed_experts is not None and back.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2]


def test_columns_of_which_nothing_was_reported_are_absent_and_change_no_digest() -> None:
    params = SamplingParams(max_new_tokens=4)
    plain = sequence_of(replace(part([4, 5], "a", masked=False), sampled_by=[]), params)
    named = sequence_of(part([4, 5], "a", masked=False), params)
    masked = sequence_of(part([4, 5], "a"), params)
    assert set(rows.to_table([plain]).column_names) == set(rows.SCHEMA.names)
    both = rows.concatenated([rows.to_table([plain]), rows.to_table([masked])])
    first, second = rows.from_table(both)
    assert first.sampling_mask_ids is None and second.sampling_mask_ids is not None
    assert second.sampling_mask_ids.tolist() == [4, 50, 5, 50]
    digests = [digest_rows([row])[row.id] for row in (plain, named, masked)]
    assert digests[0] == digests[1] and digests[0].data != digests[2].data


def test_show_says_when_the_engine_names_other_weights() -> None:
    row = sequence_of(part([4, 5], "vLLM here"), SamplingParams(top_k=2))
    assert sampled_by(row) == "vLLM here (2 tokens)"
    wrong = sampled_by(replace(row, versions=row.versions + np.int32(1)))
    assert "NOT AS LABELLED: tokens 3 to 4 were made by its version 7" in wrong


def test_a_token_that_its_mask_does_not_hold_is_refused() -> None:
    row = sequence_of(part([4, 5], "a"), SamplingParams(top_k=2))
    assert row.sampling_mask_ids is not None
    wrong = replace(row, sampling_mask_ids=row.sampling_mask_ids + np.int32(1))
    with pytest.raises(rows.RecordError, match="mask of token 3"):
        rows.checked(Path("x"), rows.to_table([wrong]))
