"""Splits a model's output into reasoning, content and tool calls.

If the tokenizer has a response template, transformers' `parse_response` does this. Otherwise, this module reads the two
forms that most open models write:

Qwen, Hermes    <think>reasoning</think> content <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
Llama           {"name": "f", "parameters": {...}}, with no other text; semicolons between several calls
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPENS, THINK_CLOSES = "<think>", "</think>"
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An output split into its parts."""

    content: str
    reasoning: str = ""
    calls: Sequence[Call] = ()
    begins: int | None = None
    """Position of the content in the output, in characters; None if there is no content, or a template parsed it."""
    unparsed: str | None = None
    """Text that looks like a tool call but cannot be read, or the reason why a template failed."""
    left_out: str = ""
    """Words after a tool call, and later calls that cannot be read: they are not part of the content."""


def parse_output(
    tokenizer: PreTrainedTokenizerBase, text: str, raw: str, prompt: str, tools: list[dict[str, Any]]
) -> Parsed:
    """Split an output into reasoning, content and tool calls.

    Args:
        text: Output without special tokens and without the stop string.
        raw: Output with special tokens.
        prompt: Text that the output continues; the chat template may end it with the output's start, such as <think>.
        tools: Tools that the model may call; if there are none, nothing is read as a call.
    """
    if has_template(tokenizer):
        return _by_template(tokenizer, raw, prompt, tools)
    reader = Reader(prompt, tools)
    parts = list(reader.feed(text, final=True))
    return Parsed(
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        calls=[part.call for part in parts if part.call is not None],
        begins=reader.begins,
        unparsed=reader.unparsed,
        left_out=reader.left_out,
    )


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has a response template, which can split an output only when it is complete."""
    return getattr(tokenizer, "response_template", None) is not None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some reasoning, some content, or a tool call."""

    reasoning: str = ""
    content: str = ""
    call: Call | None = None


class Reader:
    """Splits an output while it arrives, in time that is linear in its length.

    The pieces in which the output arrives do not matter: text that could still turn out to be something else is held
    back. Each state in this diagram is a method:

    ::

        beginning ──► thought ──► after the thought ──┐       ┌► words ◄──► call       Qwen, Hermes
            └─────────────────────────────────────────┴► opening ──► calls or content  Llama
                                                              └► plain                 no tools

    The content ends where the first call begins: a reply is its reasoning, then its content, then its calls.
    """

    def __init__(self, prompt: str | None, tools: Sequence[dict[str, Any]]) -> None:
        """Start at the beginning of an output; see `parse_output`. Without a prompt, everything is content."""
        self.begins: int | None = None
        """Place in the output where the content begins; None before it begins."""
        self.unparsed: str | None = None
        self.left_out = ""
        self._tools = bool(tools)
        self._fed = 0
        self._held = ""
        """End of the text fed so far that is not decided yet."""
        self._looked = 0
        """Number of held characters that have already been searched, in vain, for the end of a call."""
        self._thinks = self._calls = False
        """True once there was reasoning (`_thinks`), or a call (`_calls`)."""
        if prompt is None:
            self._state = self._plain
        else:
            self._state = self._thought if opens_thought(prompt) else self._beginning

    def feed(self, text: str, *, final: bool = False) -> Iterator[Part]:
        """Take the next text, and yield the parts that have become certain. `final`: no more text will come."""
        self._fed += len(text)
        self._held += text
        before = None
        while before != self._state:  # a state that does not switch to another one waits for more text
            before = self._state
            yield from before(final)

    def _go(self, state: Callable[[bool], Iterator[Part]], used: int) -> None:
        """Switch to a state, after using that number of the held characters."""
        self._state = state
        self._held = self._held[used:]
        self._looked = 0

    def _beginning(self, final: bool) -> Iterator[Part]:
        """Wait until it is clear whether the output begins with <think>, possibly after spaces."""
        stripped = self._held.lstrip()
        if stripped.startswith(THINK_OPENS):
            self._go(self._thought, len(self._held) - len(stripped) + len(THINK_OPENS))
        elif final or not THINK_OPENS.startswith(stripped):
            self._go(self._opening, 0)
        yield from ()  # makes this a generator, as all states are

    def _thought(self, final: bool) -> Iterator[Part]:
        """Yield reasoning up to </think>."""
        thought, closes, _ = self._held.partition(THINK_CLOSES)
        if not (closes or final):
            thought = without_beginning(thought, THINK_CLOSES)
        # Line breaks at both ends of the reasoning belong to the template, and are dropped. Those at the end of the
        # text so far are held back, because more reasoning may follow.
        inside = thought if self._thinks else thought.lstrip("\n")
        said = inside.rstrip("\n")
        if said:
            self._thinks = True
            yield Part(reasoning=said)
        if closes or final:
            self._go(self._after_thought, len(thought) + len(closes))
        else:
            self._go(self._thought, len(thought) - len(inside) + len(said))

    def _after_thought(self, final: bool) -> Iterator[Part]:
        words = self._held.lstrip("\n")
        if words or final:
            self._go(self._opening, len(self._held) - len(words))
        yield from ()

    def _opening(self, final: bool) -> Iterator[Part]:
        """Choose the state for the rest of the output by its beginning: after a {, it may be calls in Llama's form."""
        stripped = self._held.lstrip()
        after = stripped.removeprefix(PYTHON_TAG).lstrip()
        if not self._tools:
            self._state = self._plain
        elif after.startswith("{"):
            self._state = self._calls_or_content
        elif final or not (after == "" or PYTHON_TAG.startswith(stripped)):
            self._state = self._words
        yield from ()

    def _plain(self, final: bool) -> Iterator[Part]:
        yield from self._say(len(self._held))

    def _calls_or_content(self, final: bool) -> Iterator[Part]:
        """Hold back an output that begins with {: only its end shows whether it is calls in Llama's form or content."""
        if not final:
            return
        if CALL_OPENS in self._held:  # a call in Qwen's form after all; the text before it happens to begin with {
            self._state = self._words
            return
        calls, self.unparsed = _llama(self._held)
        for call in calls:
            yield Part(call=call)
        if calls:
            self._held = ""
        yield from self._say(len(self._held))

    def _words(self, final: bool) -> Iterator[Part]:
        """Yield content up to the next <tool_call>."""
        words, opens, _ = self._held.partition(CALL_OPENS)
        if not (opens or final):
            words = without_beginning(words, CALL_OPENS)
        # Spaces before a call are not content. So spaces at the end of the text wait until it is clear what follows.
        yield from self._say(len(words) if final and not opens else len(words.rstrip()))
        if opens:
            self._state = self._call

    def _call(self, final: bool) -> Iterator[Part]:
        """Hold a call back until </tool_call> or the end. If it cannot be read, treat it as words."""
        place = self._held.find(CALL_CLOSES, self._looked)
        if place < 0 and not final:
            self._looked = max(0, len(self._held) - len(CALL_CLOSES))
            return
        whole = self._held[: place + len(CALL_CLOSES)] if place >= 0 else self._held
        text = whole.lstrip().removeprefix(CALL_OPENS).removesuffix(CALL_CLOSES)
        call = _call_of(text, "arguments")
        if call is not None:
            self._calls = True
            yield Part(call=call)
            self._go(self._words, len(whole))
            return
        self.unparsed = self.unparsed or text.strip()  # the first one is enough for a warning
        yield from self._say(len(whole))
        self._go(self._words, 0)

    def _say(self, length: int) -> Iterator[Part]:
        """Yield the first `length` held characters as content. After a call, move them to `left_out` instead."""
        said, self._held = self._held[:length], self._held[length:]
        if self._calls:
            self.left_out += said
        elif said:
            if self.begins is None:
                self.begins = self._fed - len(said) - len(self._held)
            yield Part(content=said)


def opens_thought(prompt: str) -> bool:
    """Return whether the prompt ends with <think>, so that the output begins with reasoning."""
    return prompt.rstrip().endswith(THINK_OPENS)


def without_beginning(text: str, mark: str) -> str:
    """Return the text without its end, if that may be the start of the mark: "abc</th" becomes "abc" for </think>."""
    longest = min(len(text), len(mark) - 1)
    cut = next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
    return text[: len(text) - cut]


def _by_template(tokenizer: PreTrainedTokenizerBase, raw: str, prompt: str, tools: list[dict[str, Any]]) -> Parsed:
    try:
        message = tokenizer.parse_response(raw, prefix=prompt, tools=tools or None)  # pyright: ignore[reportArgumentType]
        json.dumps(message, allow_nan=False)
        assert isinstance(message, dict)
        calls = [_call_in(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except (AssertionError, AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Parsed(content=raw, unparsed=f"the tokenizer's response template cannot parse it ({error})")
    reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or ""
    return Parsed(content=message.get("content") or "", reasoning=reasoning, calls=calls)


def _call_in(function: Mapping[str, Any]) -> Call:
    """Return a call that a response template found. Raises an error that `_by_template` catches if it is malformed."""
    arguments = function.get("arguments") or {}
    given = _json_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, dict):
        raise ValueError(f"the arguments are not a JSON object: {arguments!r:.60}")
    if not isinstance(function["name"], str):
        raise ValueError(f"the name is not a string: {function['name']!r:.60}")
    return function["name"], given


def _llama(content: str) -> tuple[list[Call], str | None]:
    """Return the calls in Llama's form. If the text looks like calls but cannot be read, return [] and the text."""
    body = content.strip().removeprefix(PYTHON_TAG).strip()
    decoder, calls, place = json.JSONDecoder(), [], 0
    while place < len(body):
        try:
            _, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            return [], body if '"name"' in body else None
        call = _call_of(body[place:end], "parameters")
        if call is None:
            return [], None
        calls.append(call)
        place = end
        while place < len(body) and (body[place] == ";" or body[place].isspace()):
            place += 1
    return calls, None


def _call_of(text: str, arguments: str) -> Call | None:
    """Return the call in a JSON text; None if there is none.

    `arguments` is the usual key of the arguments. The keys of both forms are tried after it, because models mix them.
    """
    call = _json_object(text)
    if call is None or not isinstance(call.get("name"), str):
        return None
    given = call.get(arguments, call.get("arguments", call.get("parameters", {})))
    if isinstance(given, str):
        given = _json_object(given)
    return (call["name"], given) if isinstance(given, dict) else None


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # Python reads NaN, Infinity and 1e999, which are not JSON
    except (ValueError, RecursionError):  # a model may write brackets without end
        return None
    return value if isinstance(value, dict) else None


def arguments_of(text: str) -> dict[str, Any] | str:
    """Return a tool call's arguments as chat templates take them: an object, or the text itself if it is not one."""
    arguments = _json_object(text)
    return text if arguments is None else arguments
