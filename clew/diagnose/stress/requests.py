"""What the agent's episodes asked the model: taken down where the engine is called, whichever engine it is, or where
requests are passed on to a provider."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clew.inference.protocol import Completion, Engine, OnToken, SamplingParams
from clew.record.weights import WeightRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to the model and its answer."""

    episode: str
    asked: str
    """The whole prompt."""
    answered: str
    came: float
    """time.monotonic()"""
    done: float
    id: str = ""
    """Of the answer, by which an agent may name it in its rewards."""
    refused: str = ""
    """Why there is no answer, in the provider's words."""


class Requests:
    """Those since the last look. May be written in one thread and read in another."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._open: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()
        self.moved = time.monotonic()
        """When the last request came, or was answered."""

    def note(self, request: Request) -> None:
        self._requests.append(request)

    @contextmanager
    def asking(self, episode: str) -> Iterator[None]:
        """While it is entered, the model has a request of this episode."""
        number, self.moved = next(self._numbers), time.monotonic()
        self._open[number] = episode, self.moved
        try:
            yield
        finally:
            del self._open[number]
            self.moved = time.monotonic()

    def with_the_model(self) -> dict[str, float]:
        """Episode to the seconds for which the model had requests of it, of those that have one there now or had."""
        now, seconds = time.monotonic(), defaultdict[str, float](float)
        for request in list(self._requests):
            seconds[request.episode] += request.done - request.came
        for episode, came in list(self._open.values()):
            seconds[episode] += now - came
        return seconds

    def now_asking(self) -> set[str]:
        """Episodes of which the model has a request now."""
        return {episode for episode, _ in list(self._open.values())}

    def take(self) -> list[Request]:
        """All so far, in the order in which they came; they are forgotten here."""
        taken, self._requests = self._requests, []
        return sorted(taken, key=lambda request: request.came)


class Noted:
    """An engine whose requests are noted. Their IDs are `<episode>.i<number>`, as a gateway's session gives them."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, requests: Requests) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests = requests

    async def generate(
        self,
        input_ids: list[int],
        params: SamplingParams,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        on_token: OnToken | None = None,
    ) -> Completion:
        came = time.monotonic()
        with self._requests.asking(request_id.rpartition(".i")[0]):
            completion = await self._engine.generate(
                input_ids, params, images=images, request_id=request_id, on_token=on_token
            )
        done = time.monotonic()
        self._requests.note(
            Request(
                episode=request_id.rpartition(".i")[0],
                asked=str(self._tokenizer.decode(input_ids)),
                answered=str(self._tokenizer.decode(completion.output_ids, skip_special_tokens=True)),
                came=came,
                done=done,
                id=request_id,
            )
        )
        return completion

    async def load_weights(self, ref: WeightRef) -> None:
        await self._engine.load_weights(ref)

    async def abort(self, request_id: str | None = None) -> None:
        await self._engine.abort(request_id)

    async def version(self) -> int:
        return await self._engine.version()
