"""Streaming of a reply while the model is still generating it.

::

    engine ── token ──► Transcript ── text ──► Draft ── parts, by a Reader ──► Speech ──► each stream of the request

Only text that is final, whatever the model generates next, is sent. Half a character is held back, and so is text that
may be the beginning of a stop string or the end of reasoning; a tool call is sent once it is whole. The record does
not depend on any of this, because it has the tokens.

All positions in this module count the characters of one text: the prefilled beginning of the reply, if there is one,
followed by what the generated tokens make.
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
    """Decodes tokens one by one. The texts that `add` returns, joined, are a prefix of the whole text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._decoded: list[int] = []
        """Tokens of the text that was returned last. The next ones are decoded after them, because the first token of
        a text may lose the space before it."""
        self._pending: list[int] = []  # tokens since then

    def add(self, token: int) -> str:
        """Return the text that the token completes: "" for special tokens, and while a character is incomplete."""
        self._pending.append(token)
        before = plain_text(self._tokenizer, self._decoded)
        text = plain_text(self._tokenizer, self._decoded + self._pending)
        if len(text) <= len(before) or text.endswith("\ufffd"):  # U+FFFD: the last character is incomplete
            return ""
        self._decoded, self._pending = self._pending, []
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
        """Tokens not taken yet, each with the start and end of the characters that it helps to make."""

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
        self._finish(1)  # the whole text ends with a replacement character in its place

    def _finish(self, length: int) -> None:
        start, self._length = self._length, self._length + length
        self._finished += [(token, start, self._length) for token in self._unfinished]
        self._unfinished = []

    def take(self, start: int, end: int) -> list[Token]:
        """Return the tokens of the characters from `start` to `end`, each once, and forget those before them."""
        taken: list[Token] = []
        while self._finished and self._finished[0][1] < end:
            token, _, token_end = self._finished.popleft()
            if token_end > start:
                taken.append(token)
        return taken


class Speech:
    """Deltas of a request's replies so far. Any number of streams can follow them, each from the beginning."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._ended = False
        self._news = asyncio.Event()

    def send(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def end(self) -> None:
        """Mark the end: nothing more will be sent."""
        self._ended = True
        self._news.set()

    async def begun(self) -> None:
        """Wait until the first delta is sent, or until the end if there is none."""
        while not self._deltas and not self._ended:
            await self._change()

    async def follow(self) -> AsyncIterator[Delta]:
        """Yield all deltas, from the beginning to the end."""
        followed = 0
        while True:
            while followed < len(self._deltas):
                yield self._deltas[followed]
                followed += 1
            if self._ended:
                return
            await self._change()

    async def _change(self) -> None:
        self._news.clear()
        await self._news.wait()


class Draft:
    """Turns the tokens of one reply into deltas, and sends each delta as soon as it is certain.

    Joined, the deltas are the reply's reasoning, content, tokens and tool calls. The time that this takes is linear in
    the length of the reply.
    """

    def __init__(
        self,
        index: int,
        send: Callable[[Delta], None],
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
            send: Called with each delta.
            reader: Reader that splits the text; None if nothing is certain before the end.
            begin: Prefilled beginning.
            stops: Strings that the reply may end at.
        """
        self._index = index
        self._send = send
        self._id = id
        self._transcript = transcript
        self._reader = reader
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._stopped = False
        self._content_end: int | None = None
        """Position at which the content sent so far ends; None before there is content."""
        self._sent: list[Delta] = []
        self._read(begin)

    def add(self, token: int, logprob: float) -> None:
        """Take a token, and send the text that has become certain."""
        if new := self._transcript.add(token, logprob):
            self._read(self._before_stop(new))

    def finish(self, reply: Reply) -> None:
        """Send the rest of the reply.

        Raises:
            ValueError: The reply does not begin with what was sent already, because the tokenizer changes the text of
                earlier tokens when more follow. Only the remaining calls are then sent.
        """
        reasoning = "".join(delta.reasoning for delta in self._sent)
        content = "".join(delta.content for delta in self._sent)
        calls = [delta.call for delta in self._sent if delta.call is not None]
        tokens = sum(len(delta.tokens) for delta in self._sent)
        goes_on = reply.reasoning.startswith(reasoning) and reply.content.startswith(content)
        if goes_on and calls == list(reply.tool_calls[: len(calls)]):
            sent = {"reasoning": len(reasoning), "content": len(content), "tokens": tokens, "calls": len(calls)}
            for delta in deltas_of(reply, self._index, **sent):
                self._send(delta)
            return
        for call in reply.tool_calls[len(calls) :]:
            self._send(Delta(index=self._index, call=call))
        words, whole = reasoning + content, reply.reasoning + reply.content
        raise ValueError(
            f"it sent {words!r:.300} and {len(calls)} calls, the reply is {whole!r:.300} with {len(reply.tool_calls)} "
            f"calls"
        )

    def _read(self, text: str) -> None:
        """Send the parts of the reply that become certain with this text."""
        for part in self._reader.feed(text) if self._reader is not None else ():
            delta = self._delta(part)
            self._sent.append(delta)
            self._send(delta)

    def _before_stop(self, new: str) -> str:
        """Return the text that is certain to come before the first stop string; hold back the rest."""
        if self._stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self._stopped = bool(found)
        certain = min(found or [len(without_beginning(text, stop)) for stop in self._stops], default=len(text))
        self._held = text[certain:]
        return text[:certain]

    def _delta(self, part: Part) -> Delta:
        if part.call is not None:
            number = sum(delta.call is not None for delta in self._sent)
            return Delta(index=self._index, call=ToolCall.of(self._id, number, *part.call))
        if part.reasoning:
            return Delta(index=self._index, reasoning=part.reasoning)
        if self._content_end is None:
            assert self._reader is not None and self._reader.begins is not None
            self._content_end = self._reader.begins
        start, self._content_end = self._content_end, self._content_end + len(part.content)
        tokens = self._transcript.take(start, self._content_end)
        return Delta(index=self._index, content=part.content, tokens=tokens)


def deltas_of(
    reply: Reply, index: int = 0, *, reasoning: int = 0, content: int = 0, tokens: int = 0, calls: int = 0
) -> Iterator[Delta]:
    """Yield the rest of a reply as a stream sends it, after the given numbers of characters, tokens and calls.

    Text is sent word by word. Content with tokens is sent token by token, or in one piece if its tokens do not add up
    to it.
    """
    for piece in pieces(reply.reasoning[reasoning:]):
        yield Delta(index=index, reasoning=piece)
    words, tokens_left = reply.content[content:], reply.tokens[tokens:]
    if "".join(token.text for token in tokens_left) == words:
        for token in tokens_left:
            yield Delta(index=index, content=token.text, tokens=[token])
    elif tokens_left:
        yield Delta(index=index, content=words, tokens=tokens_left)
    else:
        for piece in pieces(words):
            yield Delta(index=index, content=piece)
    for call in reply.tool_calls[calls:]:
        yield Delta(index=index, call=call)
