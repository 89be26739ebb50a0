"""Decoding steps as CUDA graphs: one launch in place of some hundreds, which take most of a small model's step.

A graph repeats the very same operations on the very same memory. So what is captured is a `FixedStep`: it has a padded
number of rows, sees all columns of the cache through a mask, and reads the column and the starts of the rows from
tensors that are written before each replay. A graph works as long as the cache keeps its storage.

A captured step may go wrong in some models. So the first result of each graph is compared with that of the ordinary
step. If the capture fails or the two differ, the ordinary step serves from then on, and the log says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from clew.inference.cache import FixedStep, RowCache
from clew.inference.core import PROBE_TOLERANCE

log = logging.getLogger("clew.inference")

Work = Callable[[], Tensor]

WORTH = 16
"""Number of ordinary steps of one size before its graph is captured; a capture takes about as long as they do."""


def padded(rows: int, capacity: int) -> int:
    """Return the number of rows of the graph that serves `rows`: the next power of two, but at most the capacity."""
    return min(1 << (rows - 1).bit_length(), capacity)


def on_cuda(work: Work) -> Work:
    """Capture `work` as a CUDA graph with memory of its own, and return the function that replays it."""
    before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        work()  # libraries allocate at their first call, which a capture forbids
    before.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class DecodeGraphs:
    """Computes a decoding step with a graph if one fits, else in the ordinary way."""

    def __init__(
        self,
        ordinary: Callable[[RowCache], Tensor],
        fixed: Callable[[FixedStep], Tensor],
        capture: Callable[[Work], Work],
        *,
        worth: int = WORTH,
    ) -> None:
        """Create it without graphs.

        Args:
            ordinary: Computes a step in the ordinary way and returns logits [rows, vocab].
            fixed: Computes a step in shapes that do not change, and returns the same.
            capture: Turns `fixed` into a function that replays it.
            worth: Ordinary steps before a graph is captured, see `WORTH`.
        """
        self._ordinary = ordinary
        self._fixed = fixed
        self._capture = capture
        self._worth = worth
        self._layout = -1
        self._steps: Counter[int] = Counter()
        self._graphs: dict[int, tuple[FixedStep, Work]] = {}
        self._off = False

    def forget(self) -> None:
        """Free the graphs, before the cache's storage is freed."""
        self._graphs.clear()
        self._steps.clear()

    def decode(self, cache: RowCache) -> Tensor:
        """Feed each row's token at `column` to the model; return logits [rows, vocab], valid until the next call."""
        if self._off:
            return self._ordinary(cache)
        if cache.layout != self._layout:
            self.forget()
            self._layout = cache.layout
        size = padded(cache.rows, cache.tokens.shape[0])
        if size in self._graphs:
            step, replay = self._graphs[size]
            step.set(cache)
            return replay()[: cache.rows]
        logits = self._ordinary(cache)
        self._steps[size] += 1
        if self._steps[size] == self._worth:
            self._make(size, cache, logits)
        return logits

    def _make(self, size: int, cache: RowCache, expected: Tensor) -> None:
        """Capture the step that was just taken, and compare the results. Repeating that step changes nothing."""
        step = FixedStep(cache, size)
        step.set(cache)
        try:
            replay = self._capture(lambda: self._fixed(step))
            problem = _difference(expected, replay()[: cache.rows])
        except RuntimeError as error:  # torch's, for whatever cannot be captured
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem is None:
            self._graphs[size] = step, replay
        else:
            log.warning("decoding goes on without CUDA graphs: with %d rows, %s", size, problem)
            self._off = True
            self.forget()


def _difference(expected: Tensor, found: Tensor) -> str | None:
    """Return what is wrong with these logits, or None; the logprob of each row's likeliest token is compared."""
    tolerance = 10 * PROBE_TOLERANCE.get(expected.dtype, 0.1)
    likeliest = expected.argmax(-1, keepdim=True)
    one, other = (torch.log_softmax(each.float(), -1).gather(-1, likeliest) for each in (expected, found))
    gap = (one - other).abs().max().item()
    return None if gap <= tolerance else f"a captured step's logprobs are {gap:g} off (tolerance {tolerance:g})"
