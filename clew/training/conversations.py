"""Conversations as training data: the tokens of chat messages, and which of them the assistant wrote.

The chat template decides both. A template that marks the assistant's words with ``{% generation %}`` gives the mask
itself. For any other template, the text of the assistant's turn is the difference between two renderings: of the
messages before it, with the generation prompt, and of the messages up to and including it::

    <|user|>1+1=<|assistant|>              messages before the turn, with generation prompt
    <|user|>1+1=<|assistant|>2<eos>        messages up to the turn: the turn is "2<eos>"
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from jinja2 import TemplateError

from clew.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]

REFUSES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Errors of a chat template that does not take the messages."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(messages: list[Any], tools: Any, tokenizer: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a conversation, [T] int32, and the mask of the assistant's among them, [T] bool.

    The mask includes the token that ends each turn of the assistant, but not white space after this token.

    Args:
        messages: Messages in OpenAI's form.
        tools: Definitions of the tools, which templates show to the model; None: no tools.
        where: File, row and column, for errors.

    Raises:
        DataError: A message is invalid, or the assistant's tokens cannot be found.
    """
    clean = [_for_template(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1)]
    if not any(message["role"] == "assistant" for message in clean):
        raise DataError(f"{where}: no message has the role assistant, so there is nothing to train on.")
    try:
        if _GENERATION.search(tokenizer.get_chat_template(None, tools)):
            encoded = tokenizer.apply_chat_template(
                clean, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], np.bool_)
        else:
            ids, mask = _by_prefixes(clean, tools, tokenizer, where)
    except REFUSES as error:
        raise DataError(f"{where}: the chat template does not take these messages: {error}") from None
    if not mask.any():
        raise DataError(f"{where}: the chat template writes nothing for the assistant's messages.")
    return ids, mask


def _by_prefixes(messages: list[Message], tools: Any, tokenizer: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the mask, found by the text that each turn adds to the rendered messages before it."""

    def render(some: list[Message], *, generation: bool) -> str:
        return tokenizer.apply_chat_template(some, tools=tools, add_generation_prompt=generation, tokenize=False)

    conversation = render(messages, generation=False)
    encoded = tokenizer(conversation, add_special_tokens=False, return_offsets_mapping=True)
    starts_T = np.array([start for start, _ in encoded["offset_mapping"]])
    mask_T = np.zeros(len(starts_T), np.bool_)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if place == 0:
            raise DataError(f"{where}: message 1 is the assistant's. Put the user's message before it.")
        before = render(messages[:place], generation=True)
        after = conversation if place + 1 == len(messages) else render(messages[: place + 1], generation=False)
        if not (after.startswith(before) and conversation.startswith(after)):
            raise DataError(
                f"{where}: message {place + 1}: cannot find this turn's tokens, because the chat template renders the "
                f"turn differently once the conversation continues (it may drop earlier reasoning). End the row with "
                f"this turn, or mark the assistant's words in the template with {{% generation %}}."
            )
        end = len(before) + len(_without_space(after[len(before) :], tokenizer))
        mask_T |= (starts_T >= len(before)) & (starts_T < end)
    return np.array(encoded["input_ids"], np.int32), mask_T


def _without_space(turn: str, tokenizer: Any) -> str:
    """Return the text of a turn without white space after its end token: templates write that, the model does not."""
    text = turn.rstrip()
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return text if text.endswith(tuple(special)) else turn


def _for_template(message: Any, where: str) -> Message:
    """Return a message as chat templates take it: without empty fields, and with the arguments of calls as objects."""
    if not isinstance(message, dict):
        raise DataError(f"{where} is {type(message).__name__}; expected an object with role and content.")
    # Parquet gives every message all fields that any message has, filled with null.
    clean = {name: value for name, value in message.items() if value is not None}
    if clean.get("role") not in ROLES:
        raise DataError(f"{where} has the role {clean.get('role')!r}; expected {', '.join(ROLES)}.")
    calls = clean.get("tool_calls") or []
    if calls and clean["role"] != "assistant":
        raise DataError(f"{where}: only assistant messages may have tool_calls; this one's role is {clean['role']!r}.")
    content = clean.setdefault("content", "" if calls else None)
    if not isinstance(content, str):
        raise DataError(f"{where}: 'content' is {type(content).__name__}; expected text.")
    if calls:
        clean["tool_calls"] = [_call_for_template(call, where) for call in calls]
    return clean


def _call_for_template(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call has no function with a name.")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise DataError(f"{where}: the arguments of {function['name']!r} are not JSON ({error}).") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
