"""Taking a model's output apart: reasoning, content, tool calls.

The tokenizer's own response template does it where there is one (transformers' `parse_response`); otherwise the two
forms that most open models write:

Qwen, Hermes    <think>reasoning</think> content <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
Llama           {"name": "f", "parameters": {...}}, alone, several separated by semicolons
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPENS, THINK_CLOSES = "<think>", "</think>"
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An output, taken apart."""

    content: str
    reasoning: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    """Names and arguments of tools."""
    unparsed: str | None = None
    """What looks like a tool call and is none; it stays in the content."""


def parse_output(
    tokenizer: PreTrainedTokenizerBase, text: str, raw: str, prompt: str, tools: list[dict[str, Any]]
) -> Parsed:
    """text: the output without special tokens, and without the stop string. raw: with them.
    prompt: what it continues, whose template may have begun the model's words. tools: what the model may call; without
    any, everything is content."""
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_template(tokenizer, raw, prompt, tools)
    reasoning, content = split_reasoning(text, prompt)
    if not tools:
        return Parsed(content=content, reasoning=reasoning)
    parsed = _hermes(content) if CALL_OPENS in content else _llama(content)
    return Parsed(content=parsed.content, reasoning=reasoning, calls=parsed.calls, unparsed=parsed.unparsed)


def split_reasoning(text: str, prompt: str = "") -> tuple[str, str]:
    """(reasoning, the rest). The prompt may have opened the reasoning; an end may be missing, where the output was cut
    short."""
    opened = prompt.rstrip().endswith(THINK_OPENS)
    if not opened and not text.lstrip().startswith(THINK_OPENS):
        return "", text
    inside = text if opened else text.lstrip().removeprefix(THINK_OPENS)
    reasoning, _, rest = inside.partition(THINK_CLOSES)
    return reasoning.strip("\n"), rest.lstrip("\n")


def settled(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """What of (reasoning, content) `parse_output` will give, whatever follows this text. All that a template's own
    parser decides, it decides at the end."""
    if getattr(tokenizer, "response_template", None) is not None:
        return "", ""
    opened = prompt.rstrip().endswith(THINK_OPENS)
    begins = text.lstrip()
    if not opened and THINK_OPENS.startswith(begins):
        return "", ""
    if not opened and not begins.startswith(THINK_OPENS):
        return "", _settled_content(text, tools)
    if THINK_CLOSES not in text:
        return split_reasoning(without_beginning(text, THINK_CLOSES), prompt)[0], ""
    reasoning, content = split_reasoning(text, prompt)
    return reasoning, _settled_content(content, tools)


def _settled_content(content: str, tools: list[dict[str, Any]]) -> str:
    if not tools:
        return content
    begins = content.lstrip()
    if PYTHON_TAG.startswith(begins) or begins.removeprefix(PYTHON_TAG).lstrip()[:1] in ("", "{"):
        return ""  # perhaps a call of Llama's form
    return without_beginning(content.partition(CALL_OPENS)[0], CALL_OPENS).rstrip()


def without_beginning(text: str, mark: str) -> str:
    """The text without what it ends with, if the mark begins so."""
    longest = min(len(text), len(mark) - 1)
    cut = next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
    return text[: len(text) - cut]


def _by_template(tokenizer: PreTrainedTokenizerBase, raw: str, prompt: str, tools: list[dict[str, Any]]) -> Parsed:
    try:
        message = tokenizer.parse_response(raw, prefix=prompt, tools=tools or None)  # pyright: ignore[reportArgumentType]
    except (ValueError, KeyError, TypeError) as error:
        return Parsed(content=raw, unparsed=f"the tokenizer's response template does not take it ({error})")
    assert isinstance(message, dict)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_object(arguments)
        calls.append((str(function["name"]), arguments or {}))
    reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or ""
    return Parsed(content=message.get("content") or "", reasoning=reasoning, calls=calls)


def _hermes(content: str) -> Parsed:
    calls: list[tuple[str, dict[str, Any]]] = []
    for found in _CALL.findall(content):
        call = _call_of(found, "arguments")
        if call is None:
            return Parsed(content=content, unparsed=found.strip())
        calls.append(call)
    return Parsed(content=_CALL.sub("", content), calls=calls)


def _llama(content: str) -> Parsed:
    body = content.strip().removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return Parsed(content=content)
    decoder, calls, place = json.JSONDecoder(), [], 0
    while place < len(body):
        try:
            _, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            return Parsed(content=content, unparsed=body if '"name"' in body else None)
        call = _call_of(body[place:end], "parameters")
        if call is None:
            return Parsed(content=content)
        calls.append(call)
        place = end
        while place < len(body) and (body[place] == ";" or body[place].isspace()):
            place += 1
    return Parsed(content="", calls=calls)


def _call_of(text: str, arguments: str) -> tuple[str, dict[str, Any]] | None:
    """A call in JSON; both forms' names of the arguments are taken, as models mix them."""
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
    except (ValueError, RecursionError):  # a model may write brackets without end
        return None
    return value if isinstance(value, dict) else None
