"""A reply while the model is still speaking: what of it can be told already, and to whom.

::

    engine ── token ──► Decoder ── text ──► Draft ── what stays as it is ──► Speech ──► each stream of the request

Only what stays as it is, whatever the model goes on to write, is told: not half a character, not what may be the
beginning of a stop string, a tool call or the end of reasoning. The record knows nothing of this; it has the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from clew.rollout.gateway.chat import Delta, Reply, pieces
from clew.rollout.gateway.tools import without_beginning
from clew.rollout.session import plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Settle = Callable[[str], tuple[str, str]]
"""What of (reasoning, content) stays as it is, given the text so far."""


class Decoder:
    """Tokens to text, one by one. Joined, what `add` returns is how the text begins that all tokens make together."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """Those since the last text but one: some tokenizers write a first token without its space."""
        self._told = 0
        """How many of them made that text."""

    def add(self, token: int) -> str:
        """The text that it completes: "" for special tokens, and while a character is incomplete."""
        self._ids.append(token)
        before, text = plain_text(self._tokenizer, self._ids[: self._told]), plain_text(self._tokenizer, self._ids)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        return text[len(before) :]


class Speech:
    """What has been told of a request's replies; any number of streams follow it, each from the beginning."""

    def __init__(self) -> None:
        self._told: list[Delta] = []
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, delta: Delta) -> None:
        self._told.append(delta)
        self._news.set()

    def end(self) -> None:
        """Nothing more will be told."""
        self._ended = True
        self._news.set()

    async def begun(self) -> None:
        """Until something is told, or nothing ever will be."""
        while not self._told and not self._ended:
            await self._next()

    async def follow(self) -> AsyncIterator[Delta]:
        """From the beginning to the end."""
        place = 0
        while True:
            while place < len(self._told):
                yield self._told[place]
                place += 1
            if self._ended:
                return
            await self._next()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()


class Draft:
    """One reply, from its first token to its last. What it tells, joined, is the reply's reasoning and content."""

    def __init__(
        self,
        index: int,
        tell: Callable[[Delta], None],
        *,
        tokenizer: PreTrainedTokenizerBase,
        begin: str,
        stops: Sequence[str],
        settle: Settle,
    ) -> None:
        """index: of the reply among those of its request. begin: words put into the model's mouth. stops: the strings
        that the reply may end at."""
        self._index = index
        self._tell = tell
        self._decoder = Decoder(tokenizer)
        self._text = begin
        self._stops = stops
        self._settle = settle
        self._reasoning = self._content = ""
        """As told."""

    def add(self, token: int, logprob: float) -> None:
        """Tell what is certain with this token."""
        new = self._decoder.add(token)
        if not new:
            return
        self._text += new
        reasoning, content = self._settle(before_stop(self._text, self._stops))
        if len(reasoning) > len(self._reasoning):
            self._tell(Delta(index=self._index, reasoning=reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        if len(content) > len(self._content):
            self._tell(Delta(index=self._index, content=content[len(self._content) :]))
            self._content = content

    def finish(self, reply: Reply) -> None:
        """Tell the rest. Raises ValueError where what was told is not how the reply begins: a tokenizer whose text of
        some tokens is not how the text of more tokens begins."""
        for told, whole in ((self._reasoning, reply.reasoning), (self._content, reply.content)):
            if not whole.startswith(told):
                raise ValueError(f"the stream told {told[:200]!r}, and the reply is {whole[:200]!r}")
        for delta in deltas_of(reply, self._index, reasoning=len(self._reasoning), content=len(self._content)):
            self._tell(delta)


def deltas_of(reply: Reply, index: int = 0, *, reasoning: int = 0, content: int = 0) -> Iterator[Delta]:
    """A reply as a stream tells it, after so many characters of each: a word at a time, or with its tokens."""
    for piece in pieces(reply.reasoning[reasoning:]):
        yield Delta(index=index, reasoning=piece)
    if reply.tokens and reply.content:
        yield Delta(index=index, content=reply.content, tokens=reply.tokens)
        return
    for piece in pieces(reply.content[content:]):
        yield Delta(index=index, content=piece)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it, or before what may become one."""
    for stop in stops:
        text = without_beginning(text.partition(stop)[0], stop)
    return text
