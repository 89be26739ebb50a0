"""Decoding in fixed shapes, as CUDA graphs repeat it. On the CPU a trace stands in for the graph: it too repeats the
same operations on the same tensors, whatever Python would do differently at the next step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from clew.inference.embedded import EmbeddedEngine
from clew.inference.graphs import DecodeGraphs, Work, padded
from clew.inference.protocol import SamplingParams
from tests.inference.test_embedded import Asked, assert_equal, engines, folder_with, run


class Traces:
    """Captures work as a trace; counts captures and repetitions."""

    def __init__(self) -> None:
        self.captured = self.repeated = 0

    def __call__(self, work: Work) -> Work:
        trace = make_fx(work)()
        self.captured += 1

        def repeat() -> Tensor:
            self.repeated += 1
            return trace()

        return repeat


def graphed(path: Path, capture: Callable[[Work], Work], worth: int = 1, **kwargs: Any) -> tuple[Any, EmbeddedEngine]:
    """The reference, and an engine that takes its steps by what `capture` makes."""
    reference, engine = engines(path, **kwargs)
    assert isinstance(engine, EmbeddedEngine) and engine.graphs is None
    engine.graphs = DecodeGraphs(engine._decode, engine._decode_fixed, capture, worth=worth)
    return reference, engine


def asked(count: int) -> Asked:
    """Prompts and answers of many lengths, beyond the sliding windows and one width of the cache."""
    rng = random.Random(0)
    return [
        (
            [rng.randrange(6, 100) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_new_tokens=rng.choice([3, 20, 100]), seed=index, stop_token_ids=()),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2"])  # fused; with a window; transformers' forward
def test_fixed_shapes_give_the_same(tmp_path: Path, family: str) -> None:
    """Rows come, go and move meanwhile; the cache moves to the left, and to larger storage."""
    traces = Traces()
    reference, engine = graphed(folder_with(tmp_path, family), traces, max_running=5)
    requests = asked(6)
    for expected, found in zip(run(reference, requests), run(engine, requests), strict=True):
        assert_equal(expected, found)
    assert 3 <= traces.captured < 20 and traces.repeated > 100


def test_rows_are_padded_to_powers_of_two() -> None:
    assert [padded(rows, 100) for rows in (1, 2, 3, 4, 5, 64, 65, 100)] == [1, 2, 4, 4, 8, 64, 100, 100]


def test_graphs_go_with_the_cache(tmp_path: Path) -> None:
    traces = Traces()
    reference, engine = graphed(folder_with(tmp_path), traces, worth=4)
    requests = asked(3)
    captured = []
    for _ in range(2):
        for expected, found in zip(run(reference, requests), run(engine, requests), strict=True):
            assert_equal(expected, found)
        captured.append(traces.captured)
        engine.release_memory()
        assert engine.graphs is not None and not engine.graphs._graphs
    assert captured[1] == 2 * captured[0] > 0


def wrong(work: Work) -> Work:
    logits = work()
    return lambda: logits.flip(-1)


@pytest.mark.parametrize(
    ("family", "capture", "words"),
    [
        ("gpt2", Traces(), "RuntimeError: "),  # it looks at its ids, to warn of padding
        ("qwen2", wrong, "a captured step's logprobs are "),
    ],
)
def test_what_cannot_be_captured_is_decoded_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, capture: Callable[[Work], Work], words: str
) -> None:
    reference, engine = graphed(folder_with(tmp_path, family), capture)
    requests = asked(4)
    for expected, found in zip(run(reference, requests), run(engine, requests), strict=True):
        assert_equal(expected, found)
    [said] = [record.message for record in caplog.records if record.name == "clew.inference"]
    assert said.startswith("decoding goes on without CUDA graphs: with 4 rows, " + words)
