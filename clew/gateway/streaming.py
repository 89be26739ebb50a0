"""Streaming of a reply while the model is still generating it.

::

    engine ── token ──► Transcript ── text ──► Draft ── parts, by a Reader ──► Speech ──► each stream of the request

Only text that is final, whatever the model generates next, is sent. Half a character is held back, and so is text that
may be the beginning of a stop string or the end of reasoning; a tool call is sent once it is whole. The record knows
nothing of this; it has the tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from clew.gateway.dialect import Delta, Reply, Token, ToolCall, pieces
from clew.gateway.episode_engine import plain_text
from clew.gateway.output_parser import Part, Reader, without_beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Decoder:
    """Decoder that takes tokens one by one. The texts that `add` returns, joined, are a prefix of the whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """Tokens of the last text, and those after it. The former are kept because the first token of a
        text may lose the space before it."""
        self._done = 0
        """Number of these tokens that made the last text."""

    def add(self, token: int) -> str:
        """Return the text that the token completes: "" for special tokens, and while a character is incomplete."""
        self._ids.append(token)
        before, text = plain_text(self._tokenizer, self._ids[: self._done]), plain_text(self._tokenizer, self._ids)
        if len(text) <= len(before) or text.endswith("\ufffd"):  # stands for a character that is incomplete
            return ""
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        return text[len(before) :]


class Transcript:
    """Text of a reply as its tokens make it, with the tokens that made each character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begin: str, *, logprobs: bool) -> None:
        """Start with `begin`, a prefilled beginning. Tokens are kept for `take` only if `logprobs` is True."""
        self._tokenizer = tokenizer
        self._decoder = Decoder(tokenizer)
        self._length = len(begin)
        self._special = set(tokenizer.all_special_ids)
        self._logprobs = logprobs
        self._unfinished: list[Token] = []
        """Tokens of a character that is still incomplete."""
        self._finished: deque[tuple[Token, int, int]] = deque()
        """Tokens not taken yet, each with the start and end, in the text, of the characters that it helps to make."""

    def add(self, token: int, logprob: float) -> str:
        """Return the text that the token completes."""
        new = self._decoder.add(token)
        if self._logprobs and token not in self._special:
            self._unfinished.append(Token(text=plain_text(self._tokenizer, [token]), logprob=logprob))
        if new:
            self._finish(len(new))
        return new

    def end(self) -> None:
        """Finish the transcript: no further token will come, and a character that is incomplete stays so."""
        self._finish(1)

    def _finish(self, length: int) -> None:
        begin, self._length = self._length, self._length + length
        self._finished += [(token, begin, self._length) for token in self._unfinished]
        self._unfinished = []

    def take(self, begin: int, end: int) -> list[Token]:
        """Return the tokens of the characters from `begin` to `end`, each once, and forget those before them."""
        taken: list[Token] = []
        while self._finished and self._finished[0][1] < end:
            token, _, until = self._finished.popleft()
            if until > begin:
                taken.append(token)
        return taken


class Speech:
    """Deltas of a request's replies so far. Any number of streams can follow them, each from the beginning."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def end(self) -> None:
        """Mark the end: nothing more will be told."""
        self._ended = True
        self._news.set()

    async def begun(self) -> None:
        """Wait until something is told, or nothing ever will be."""
        while not self._deltas and not self._ended:
            await self._next()

    async def follow(self) -> AsyncIterator[Delta]:
        """Yield all deltas, from the beginning to the end."""
        place = 0
        while True:
            while place < len(self._deltas):
                yield self._deltas[place]
                place += 1
            if self._ended:
                return
            await self._next()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()


class Draft:
    """One reply, from its first token to its last, in time that is linear in its length.

    The deltas that it tells, joined, are the reply's reasoning, content, tokens and tool calls.
    """

    def __init__(
        self,
        index: int,
        tell: Callable[[Delta], None],
        *,
        id: str,
        transcript: Transcript,
        reader: Reader | None,
        begin: str,
        stops: Sequence[str],
    ) -> None:
        """Start a reply of the interaction `id`.

        Args:
            index: Index of the reply among those of its request.
            tell: Called with each delta.
            reader: Reader that splits the text; None if nothing is certain before the end.
            begin: Prefilled beginning.
            stops: Strings that the reply may end at.
        """
        self._index = index
        self._tell = tell
        self._id = id
        self._transcript = transcript
        self._reader = reader
        self._stops = stops
        self._kept = ""
        """Held-back text that may be the beginning of a stop string."""
        self._stopped = False
        self._place: int | None = None
        """End of the content told so far, as a place in the text."""
        self._deltas: list[Delta] = []
        self._read(begin)

    def add(self, token: int, logprob: float) -> None:
        """Take a token, and tell the text that has become certain."""
        if new := self._transcript.add(token, logprob):
            self._read(self._before_stop(new))

    def finish(self, reply: Reply) -> None:
        """Tell the rest of the reply.

        Raises:
            ValueError: The reply does not begin with what was told already, because the tokenizer changes the text of
                earlier tokens when more follow. Only the remaining calls are then told.
        """
        reasoning = "".join(delta.reasoning for delta in self._deltas)
        content = "".join(delta.content for delta in self._deltas)
        calls = [delta.call for delta in self._deltas if delta.call is not None]
        tokens = sum(len(delta.tokens) for delta in self._deltas)
        begins = reply.reasoning.startswith(reasoning) and reply.content.startswith(content)
        if begins and calls == list(reply.tool_calls[: len(calls)]):
            told = {"reasoning": len(reasoning), "content": len(content), "tokens": tokens, "calls": len(calls)}
            for delta in deltas_of(reply, self._index, **told):
                self._tell(delta)
            return
        for call in reply.tool_calls[len(calls) :]:
            self._tell(Delta(index=self._index, call=call))
        words, whole = reasoning + content, reply.reasoning + reply.content
        raise ValueError(
            f"it sent {words!r:.300} and {len(calls)} calls, the reply is {whole!r:.300} with {len(reply.tool_calls)} "
            f"calls"
        )

    def _read(self, text: str) -> None:
        for part in self._reader.feed(text) if self._reader is not None else ():
            self._deltas.append(delta := self._delta(part))
            self._tell(delta)

    def _before_stop(self, new: str) -> str:
        """Return the text that is certain to come before the first stop string."""
        if self._stopped:
            return ""
        kept = self._kept + new
        found = [place for stop in self._stops if (place := kept.find(stop)) >= 0]
        self._stopped = bool(found)
        certain = min(found or [len(without_beginning(kept, stop)) for stop in self._stops], default=len(kept))
        self._kept = kept[certain:]
        return kept[:certain]

    def _delta(self, part: Part) -> Delta:
        if part.call is not None:
            number = sum(delta.call is not None for delta in self._deltas)
            return Delta(index=self._index, call=ToolCall.of(self._id, number, *part.call))
        if part.reasoning:
            return Delta(index=self._index, reasoning=part.reasoning)
        if self._place is None:
            assert self._reader is not None and self._reader.begins is not None
            self._place = self._reader.begins
        begin, self._place = self._place, self._place + len(part.content)
        tokens = self._transcript.take(begin, self._place)
        return Delta(index=self._index, content=part.content, tokens=tokens)


def deltas_of(
    reply: Reply, index: int = 0, *, reasoning: int = 0, content: int = 0, tokens: int = 0, calls: int = 0
) -> Iterator[Delta]:
    """Yield the rest of a reply as a stream tells it, after the given numbers of characters, tokens and calls.

    It goes a word at a time. Content with tokens goes a token at a time, or in one piece if they do not add up to it.
    """
    for piece in pieces(reply.reasoning[reasoning:]):
        yield Delta(index=index, reasoning=piece)
    words, left = reply.content[content:], reply.tokens[tokens:]
    if "".join(token.text for token in left) == words:
        for token in left:
            yield Delta(index=index, content=token.text, tokens=[token])
    elif left:
        yield Delta(index=index, content=words, tokens=left)
    else:
        for piece in pieces(words):
            yield Delta(index=index, content=piece)
    for call in reply.tool_calls[calls:]:
        yield Delta(index=index, call=call)
