"""Token capture: which tokens a request's messages stand for, and whether they extend an earlier turn's.

::

    turn 0   rendered ............|output|
    turn 1   rendered ............ output as the template writes it .|tail.....|          messages, as text
             input_ids of turn 0  |exact output ids                  |ids(tail)|          tokens

A request extends a turn when its messages go on from that turn's, the message after them stands for what the model
wrote, and the template still renders all of it. Then its tokens are that turn's exact tokens, and only the tail is
tokenized: nothing that the model wrote is decoded and tokenized again. Otherwise a new sequence starts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from clew.errors import ImageError
from clew.rollout.gateway.chat import Ask, Message, Refusal, Reply
from clew.rollout.gateway.images import shown_in
from clew.vision import Sight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WORDS: list[Message] = [{"role": "assistant", "content": word} for word in ("clew0", "clew1")]
"""Two messages whose last characters differ: what their renderings end with alike follows the words."""


_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags that transformers adds to Jinja's, around what the model writes."""

LOOKED_AT = 16
"""Characters a token of the context, of a prompt that may be too long."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request that was answered."""

    ask: Ask
    rendered: str
    """The text that the template made of the request, up to where the model began."""
    reply: Reply
    raw: str
    """What the model wrote, special tokens included."""

    @property
    def all_ids(self) -> list[int]:
        return self.reply.interaction.all_ids


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a request asks the model to continue."""

    input_ids: list[int]
    rendered: str
    extends: Turn | None = None
    rewritten: Turn | None = None
    """A turn that the messages go on from, and whose tokens they do not keep: a new sequence starts."""
    advice: str = ""
    """Why they do not; also where they go on from a turn otherwise than the model went."""


class Turns:
    """The turns of one session, and the template that renders them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: int | None = None, vision: Sight | None = None
    ) -> None:
        """context: of the model, in tokens. vision: of a model that takes images."""
        self._tokenizer = tokenizer
        self._context = context
        self._vision = vision
        self._turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)

    def find(self, id: str) -> Turn | None:
        """The turn with the reply of that ID."""
        return next((turn for turn in self._turns if turn.reply.id == id), None)

    def prompt(self, ask: Ask, begin: str = "") -> Prompt:
        """The tokens of a request. Raises Refusal when the template does not take its messages.

        begin: words put into the model's mouth; they count as the prompt's."""
        if ask.text is not None:
            self._refuse_what_never_fits(ask.text, "prompt")
            return Prompt(input_ids=self._encode(ask.text, special=True), rendered=ask.text)
        if ask.images and self._vision is None:
            raise Refusal(400, "the model is handed tokens, and takes no images.", param="messages")
        images = shown_in(ask.messages) if ask.images else []
        rendered = self._render(ask, ask.messages) + begin
        self._refuse_what_never_fits(rendered, "messages")
        rewritten: Turn | None = None
        advice, reworded = "", 0
        for turn in sorted(self._turns, key=lambda turn: -len(turn.ask.messages)):
            place = len(turn.ask.messages)
            if turn.ask.text is not None or place >= len(ask.messages):
                continue
            shown = shown_in(turn.ask.messages) if turn.ask.images else []
            if images[: len(shown)] != shown:  # their tokens may be the same
                continue
            message = ask.messages[place]
            stands = stands_for(message, turn.reply)
            tail_ids = self._tail_ids(ask, rendered, turn) if stands or goes_on_in(message, turn.reply) else None
            if tail_ids is not None:
                advice = advice if reworded > place else ""  # at the same place it is another answer to the same
                return Prompt(input_ids=turn.all_ids + tail_ids, rendered=rendered, extends=turn, advice=advice)
            if ask.messages[:place] != turn.ask.messages or message.get("role") != "assistant":
                continue
            if stands and rewritten is None:
                rewritten, advice = turn, _why_rewritten(ask, turn)
            elif not advice:
                advice = f"the client does not send {turn.reply.id} back as the model said it: a new sequence starts"
                reworded = place
        return Prompt(input_ids=self._encode(rendered), rendered=rendered, rewritten=rewritten, advice=advice)

    def _refuse_what_never_fits(self, text: str, param: str) -> None:
        """Without making tokens of all of it: a beginning that has twice as many as the context takes is enough."""
        if self._context is None or len(text) <= LOOKED_AT * self._context:
            return
        beginning = text[: LOOKED_AT * self._context]
        if len(tokens := self._encode(beginning)) > 2 * self._context:
            raise Refusal(
                400,
                f"the prompt has {len(text)} characters, the first {len(beginning)} of which alone are {len(tokens)} "
                f"tokens; the model's context is {self._context}. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )

    def _tail_ids(self, ask: Ask, rendered: str, turn: Turn) -> list[int] | None:
        """The tokens after the turn's own; None when the rendered text does not hold the turn as it was."""
        if not rendered.startswith(turn.rendered):
            return None
        last_id = turn.all_ids[-1]
        if rendered.startswith(turn.rendered + turn.raw):
            return self._encode_after(last_id, rendered[len(turn.rendered) + len(turn.raw) :])
        if not stands_for(ask.messages[len(turn.ask.messages)], turn.reply):
            return None
        # The template writes it otherwise: trimmed, or the JSON of a tool's arguments spaced in its own way.
        tail = self._after_words(ask, len(turn.ask.messages))
        if tail is None or not rendered.endswith(tail):
            return None
        kept = rendered[len(turn.rendered) : len(rendered) - len(tail)]
        words = [turn.reply.content, turn.reply.reasoning, *(call.name for call in turn.reply.tool_calls)]
        if not all(word.strip() in kept for word in words):
            return None
        if last_id in self._special_ids:  # the model ended its turn itself, perhaps with another token
            tail = tail.removeprefix(self._end_of_turn)
        return self._encode_after(last_id, tail)

    def _after_words(self, ask: Ask, place: int) -> str | None:
        """What the template writes after the words of the message at `place`, an assistant's."""
        before, after = ask.messages[:place], ask.messages[place + 1 :]
        try:
            texts = [self._render(ask, [*before, message, *after]) for message in _WORDS]
        except Refusal:  # a tool's result may not follow a message without a call
            return None
        return common_suffix(texts)

    @cached_property
    def _special_ids(self) -> set[int]:
        return set(self._tokenizer.all_special_ids)

    @cached_property
    def _end_of_turn(self) -> str:
        """The special token that the template writes after an assistant's words; "" when it writes none there."""
        user = {"role": "user", "content": "clew"}
        asks = [Ask(model="", messages=[user, message]) for message in _WORDS]
        ids = self._encode(common_suffix([self._render(ask, ask.messages, generation=False) for ask in asks]))
        special = ids and ids[0] in self._special_ids
        return str(self._tokenizer.decode(ids[:1], skip_special_tokens=False)) if special else ""

    def _encode_after(self, last_id: int, text: str) -> list[int]:
        """The tokens of a text that follows a token. (Some tokenizers put a space before a text's first word.)"""
        last = self._tokenizer.decode([last_id], skip_special_tokens=False)
        together = self._encode(f"{last}{text}")
        return together[1:] if together[:1] == [last_id] else self._encode(text)

    @cached_property
    def variables(self) -> set[str]:
        """What the chat template asks for, besides what it sets itself."""
        template = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        language = Environment(extensions=["jinja2.ext.loopcontrols"])
        return set().union(
            *(meta.find_undeclared_variables(language.parse(_GENERATION.sub("", text))) for text in texts)
        )

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(self._encode(text))

    def _render(self, ask: Ask, messages: Sequence[Message], *, generation: bool = True) -> str:
        if self._tokenizer.chat_template is None:
            raise Refusal(400, "the model's tokenizer has no chat template; /v1/completions takes plain text.")
        given = [_in_parts(message) for message in messages] if self._wants_parts else list(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                given,
                tools=ask.shown_tools or None,  # pyright: ignore[reportArgumentType]
                add_generation_prompt=generation,
                tokenize=False,
                **ask.template,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            if len(one := with_one_system(messages)) < len(messages):
                return self._render(ask, one, generation=generation)
            raise Refusal(400, f"the chat template does not take these messages: {error}", param="messages") from None
        if self._vision is None:
            return str(text)
        try:
            return self._vision.expanded(str(text), [ask.images[name] for name in shown_in(messages)])
        except ImageError as error:
            raise Refusal(400, str(error), param="messages") from None

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template takes a message's content as a list of parts alone, as some do of models that see."""
        if self._vision is None or self._tokenizer.chat_template is None:
            return False
        self.__dict__["_wants_parts"] = False  # while it is asked
        try:
            return "clew" not in self._render(Ask(model=""), [{"role": "user", "content": "clew"}])
        except Refusal:
            return True

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        # In a tool's arguments JSON may escape half a surrogate pair, which no tokenizer takes.
        valid = text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")
        encoded: Any = self._tokenizer(valid, add_special_tokens=special)
        return list(encoded["input_ids"])


def _in_parts(message: Message) -> Message:
    if not isinstance(said := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": said}]}


def stands_for(message: Message, reply: Reply) -> bool:
    """Whether a message of the client's is what the model said: the same words, the same tools with the same arguments
    as JSON. A client may leave the reasoning out; whether the template would have kept it shows in the text."""
    if message.get("role") != "assistant":
        return False
    said = message.get("content") or ""
    if not isinstance(said, str) or said.strip() != reply.content.strip():
        return False
    reasoning = message.get("reasoning_content")
    if reasoning and reasoning.strip() != reply.reasoning.strip():
        return False
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if len(calls) != len(reply.tool_calls):
        return False
    return all(
        call["name"] == wrote.name and call["arguments"] == json.loads(wrote.arguments)
        for call, wrote in zip(calls, reply.tool_calls, strict=True)
    )


def goes_on_in(message: Message, reply: Reply) -> bool:
    """Whether the client wrote on in the model's message, from where a stop string had ended it."""
    said = message.get("content") if message.get("role") == "assistant" else None
    return reply.stop_string is not None and str(said).startswith(reply.content + reply.stop_string)


def _why_rewritten(ask: Ask, turn: Turn) -> str:
    """Why the rendered text does not keep the tokens of a turn whose reply is among the messages."""
    why = f"the chat template does not keep {turn.reply.id} as the model wrote it"
    if ask.shown_tools != turn.ask.shown_tools:
        why = f"the client has other tools to offer after {turn.reply.id}"
    elif turn.reply.reasoning and not ask.messages[len(turn.ask.messages)].get("reasoning_content"):
        why += " (the client sends no reasoning back)"
    return f"{why}: a new sequence starts, and {len(turn.all_ids)} tokens are computed once more in training"


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """With the system messages at the beginning as one: many templates take no more, and some agents send several."""
    systems = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(systems) < 2 or shown_in(systems):
        return list(messages)
    said = "\n\n".join(message["content"] for message in systems)
    return [{"role": "system", "content": said}, *messages[len(systems) :]]


def common_suffix(texts: Sequence[str]) -> str:
    """The longest text that all of them end with."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, texts), strict=False))
    return "".join(letters[0] for letters in alike)[::-1]
