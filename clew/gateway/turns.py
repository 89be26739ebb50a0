"""Token capture: finds the tokens of a request's messages, and the earlier turn that they extend.

::

    turn 0   rendered ............|output|
    turn 1   rendered ............ output as the template writes it .|tail.....|          messages, as text
             input_ids of turn 0  |exact output ids                  |ids(tail)|          tokens

A request extends a turn if

1. its messages, as the template renders them, begin with that turn's,
2. the next message stands for the model's output, and
3. the template still renders all of that output.

The request then keeps that turn's exact tokens, and only the tail is tokenized: nothing that the model wrote is decoded
and tokenized again. Otherwise a new sequence starts. If the request should have continued a recorded conversation, that
is a branch, and `Turns.branch` says what differs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from clew.errors import ImageError
from clew.gateway.conversation_difference import Difference, excerpt, first_difference, key_of, stands_for
from clew.gateway.dialect import Message, ModelRequest, Refusal, Reply, message_of
from clew.gateway.images import image_names
from clew.gateway.output_parser import THINK_CLOSES, opens_thought
from clew.models.vision import ImageExpander
from clew.printing import common_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WORDS: list[Message] = [{"role": "assistant", "content": word} for word in ("clew0", "clew1")]
"""Two messages whose words end in different characters. The end that their renderings share is therefore what the
template writes after the words."""

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags that templates put around the model's words. Transformers understands them, plain Jinja does not."""

CHECKED_CHARACTERS = 16
"""Number of characters per token of the context. Of a prompt that is longer, only the beginning is tokenized at first:
a prompt that cannot fit is refused without tokenizing the rest."""

WORDS = 16
"""Number of characters of a completion that a plain text must repeat to count as its continuation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """A request that was answered."""

    request: ModelRequest
    rendered: str
    """Text that the model continued: a plain text, or the rendered messages and a prefilled beginning of the reply."""
    reply: Reply
    raw: str
    """Output of the model, special tokens included."""
    follows: Turn | None = None
    """Turn that the messages continue, if there is one."""

    @property
    def all_ids(self) -> list[int]:
        return self.reply.interaction.all_ids

    @cached_property
    def extends(self) -> bool:
        """Return whether this turn keeps the tokens of `follows`; if it does not, a new sequence starts."""
        mine = self.reply.interaction
        return self.follows is not None and self.follows.reply.interaction.is_extended_by(mine.input_ids, mine.images)

    @cached_property
    def conversation(self) -> list[Message]:
        """Return the messages of the request, and the reply."""
        return [*self.request.messages, message_of(self.reply)]

    @cached_property
    def keys(self) -> list[str]:
        """Return the keys of the conversation's messages; see `key_of`."""
        return [key_of(message) for message in self.conversation]

    def comes_after(self, turn: Turn) -> bool:
        """Return whether the messages continue that turn, directly or through others."""
        follows = self.follows
        while follows is not None and follows is not turn:
            follows = follows.follows
        return follows is turn


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A request that should have continued a recorded conversation, but does not keep its tokens."""

    of: Turn
    """Last turn of the recorded conversation."""
    kind: str
    """Kind of the branch; only a few warnings of one kind are shown."""
    message: int | None
    """Number of the request's first message that differs, counted from 1; None if no message differs."""
    why: str
    tokens: int
    """Number of tokens of the conversation that are processed again in training."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt of a request: the tokens that the model continues."""

    input_ids: list[int]
    rendered: str
    follows: Turn | None = None
    """Turn that the messages continue, whether its tokens are kept or not."""
    begin: str = ""
    """Prefilled beginning of the reply, with which `rendered` ends."""

    @property
    def before(self) -> str:
        """Return the rendered text without the prefilled beginning."""
        return self.rendered.removesuffix(self.begin)


class Turns:
    """The turns of one session, and the template that renders them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: int | None = None, vision: ImageExpander | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._vision = vision
        self._turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)

    def find(self, id: str) -> Turn:
        """Return the turn whose reply has this ID.

        Raises:
            Refusal: No reply has it.
        """
        for turn in self._turns:
            if turn.reply.id == id:
                return turn
        raise Refusal(404, f"there is no response {id!r} in this session.", code="previous_response_not_found")

    def followed(self) -> set[str]:
        """Return the IDs of the replies that a later turn continues."""
        return {turn.follows.reply.id for turn in self._turns if turn.follows is not None}

    def prompt(self, request: ModelRequest, begin: str = "") -> Prompt:
        """Return the prompt of a request, which ends with `begin`, a prefilled beginning of the reply.

        Raises:
            Refusal: The template does not take the messages, the model takes no images, or the prompt is far too long.
        """
        if request.text is not None:
            self._refuse_what_never_fits(request.text, "prompt")
            return self._prompt_of_text(request.text)
        if request.images and self._vision is None:
            message = "Cannot read the images: this model takes text only. Send no images."
            raise Refusal(400, message, param="messages")
        images = image_names(request.messages) if request.images else []
        rendered = self._render(request, request.messages)
        if begin and opens_thought(rendered):
            begin = f"\n{THINK_CLOSES}\n\n{begin}"  # a call inside the thought would be reasoning
        rendered += begin
        self._refuse_what_never_fits(rendered, "messages")
        rewritten: Turn | None = None
        for turn in sorted(self._turns, key=lambda turn: -len(turn.request.messages)):  # longest conversation first
            place = len(turn.request.messages)
            if turn.request.text is not None or place >= len(request.messages):
                continue
            message = request.messages[place]
            stands = stands_for(message, turn.conversation[-1])
            tail_ids = self._tail_ids(request, rendered, turn) if stands or goes_on_in(message, turn.reply) else None
            if tail_ids is not None:
                input_ids = turn.all_ids + tail_ids
                if turn.reply.interaction.is_extended_by(input_ids, images):
                    return Prompt(input_ids=input_ids, rendered=rendered, follows=turn, begin=begin)
            if stands and rewritten is None and request.messages[:place] == turn.request.messages:
                rewritten = turn
        return Prompt(input_ids=self._encode(rendered), rendered=rendered, follows=rewritten, begin=begin)

    def _prompt_of_text(self, text: str) -> Prompt:
        """Return the prompt of a plain text, which may go on after an earlier text and its completion."""
        earlier = [turn for turn in reversed(self._turns) if turn.request.text is not None]
        follows = max(
            (turn for turn in earlier if text.startswith(turn.rendered + (turn.reply.content or turn.raw))),
            key=lambda turn: (len(turn.rendered + turn.reply.content), text.startswith(turn.rendered + turn.raw)),
            default=None,
        )
        if follows is not None and text.startswith(whole := follows.rendered + follows.raw):
            tail_ids = self._encode_after(follows.all_ids[-1], text[len(whole) :])
            return Prompt(input_ids=follows.all_ids + tail_ids, rendered=text, follows=follows)
        # A client does not send the end token back. The tokens of an output that has one are not continued.
        rewritten = (turn for turn in earlier if _goes_on_after(text, turn))
        follows = follows or max(rewritten, key=lambda turn: len(turn.rendered), default=None)
        return Prompt(input_ids=self._encode(text, special=True), rendered=text, follows=follows)

    def branch(self, turn: Turn) -> Branch | None:
        """Return how a turn differs from the conversation that it should have continued; None if it is no branch."""
        if turn.request.text is not None:
            return self._branch_of_text(turn)
        sent = [key_of(message) for message in turn.request.messages]
        candidates = self._should_continue(turn, sent)
        if not candidates:
            return None
        counts = Counter(sent)

        def alike(other: Turn) -> tuple[int, bool]:
            """Return the number of messages in common, and whether the request begins with all of the other's."""
            return sum((counts & Counter(other.keys)).values()), sent[: len(other.keys)] == other.keys

        best = max(reversed(candidates), key=alike)  # the newest, if several are equally alike
        difference = first_difference(best.conversation, turn.request.messages)
        kind, why = (difference.kind, difference.what) if difference is not None else _why_rewritten(turn, best)
        tokens = self._processed_again(turn, best, sent, difference)
        message = difference.index + 1 if difference is not None else None
        return Branch(of=best, kind=kind, message=message, why=why, tokens=tokens)

    def _branch_of_text(self, turn: Turn) -> Branch | None:
        """Return how a plain text differs from the longest prompt and completion that it goes on after."""
        text, kept = turn.rendered, len(turn.follows.rendered) if turn.follows is not None and turn.extends else -1
        others = [
            other for other in self._turns if other.request is not turn.request and other.request.text is not None
        ]
        candidates = (other for other in others if len(other.rendered) > kept and _goes_on_after(text, other))
        best = max(candidates, key=lambda other: len(other.rendered), default=None)
        if best is None or any(other.rendered == text for other in others):
            return None
        whole, words = best.rendered + best.raw, best.reply.content.strip()
        place = text.find(words, len(best.rendered))
        repeated = place + len(words) if place >= 0 else common_length(whole, text)
        complete = text.startswith(best.rendered + best.reply.content) and best.all_ids[-1] in self._special_ids
        return Branch(
            of=best,
            kind="end token" if complete else "text",
            message=None,
            why=f"the text differs {excerpt(whole, text)}",
            tokens=len(turn.reply.interaction.input_ids) - len(self._encode(text[repeated:])),
        )

    def _should_continue(self, turn: Turn, sent: Sequence[str]) -> list[Turn]:
        """Return the turns that a turn should have continued, besides the one that it extends. `sent` are its keys.

        A request should continue a turn if the turn's reply is among its messages, or another message is in the place
        of the reply. A request with neither (from a sub-agent, say) is a conversation of its own. A request that was
        made before, and is made again for another answer, continues nothing either.
        """
        extended = turn.follows if turn.extends else None
        begin = 0 if extended is None else self._turns.index(extended) + 1  # only later turns can continue it
        others = [
            other for other in self._turns[begin:] if other.request is not turn.request and other.request.text is None
        ]
        if any(other.rendered == turn.rendered for other in others):
            return []
        if extended is not None:
            tail = set(sent[len(extended.keys) :])
            return [other for other in others if other.comes_after(extended) or other.keys[-1] in tail]
        recorded = {key for other in others for key in other.keys}
        new = (place for place, key in enumerate(sent) if key not in recorded)
        reworded = next((place for place in new if turn.request.messages[place]["role"] == "assistant"), 0)
        return [other for other in others if _goes_on_from(sent, reworded, other)]

    def _processed_again(self, turn: Turn, best: Turn, sent: Sequence[str], difference: Difference | None) -> int:
        """Return how many of a turn's prompt tokens repeat the recorded conversation, exactly or in another form.

        Only tokens after the last repeated message are new.
        """
        input_ids = turn.reply.interaction.input_ids
        same = common_length(input_ids, best.all_ids) if turn.extends else 0
        recorded = set(best.keys)
        last = max((place for place, key in enumerate(sent) if key in recorded), default=0)
        if difference is not None and turn.request.messages[difference.index]["role"] == "assistant":
            last = max(last, difference.index)  # a reworded reply
        tail = self._after_message(turn, last)
        new = len(self._encode(tail)) if tail and turn.rendered.endswith(tail) else 0
        return max(same, len(input_ids) - new)

    def _after_message(self, turn: Turn, place: int) -> str | None:
        """Return the rendered text after the request's message at `place`; None if the template does not show it."""
        request = turn.request
        if request.messages[place]["role"] == "assistant":
            return self._after_words(request, place)
        try:
            until = self._render(request, request.messages[: place + 1], generation=False)
        except Refusal:
            return None
        return turn.rendered[len(until) :] if until and turn.rendered.startswith(until) else None

    def _refuse_what_never_fits(self, text: str, param: str) -> None:
        """Refuse a text whose beginning (the only part tokenized) has more than twice as many tokens as the context."""
        if self._context is None or len(text) <= CHECKED_CHARACTERS * self._context:
            return
        beginning = text[: CHECKED_CHARACTERS * self._context]
        if len(tokens := self._encode(beginning)) > 2 * self._context:
            raise Refusal(
                400,
                f"the prompt has {len(text)} characters, the first {len(beginning)} of which alone are {len(tokens)} "
                f"tokens; the model's context is {self._context}. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )

    def _tail_ids(self, request: ModelRequest, rendered: str, turn: Turn) -> list[int] | None:
        """Return the tokens that follow the turn's own; None if the rendered text does not continue that turn."""
        if not rendered.startswith(turn.rendered):
            return None
        last_id = turn.all_ids[-1]
        if rendered.startswith(turn.rendered + turn.raw):
            return self._encode_after(last_id, rendered[len(turn.rendered) + len(turn.raw) :])
        if not stands_for(request.messages[len(turn.request.messages)], turn.conversation[-1]):
            return None
        # The template writes the output differently: trimmed, or with other spaces in the JSON of a tool's arguments.
        tail = self._after_words(request, len(turn.request.messages))
        if tail is None or not rendered.endswith(tail):
            return None
        kept = rendered[len(turn.rendered) : len(rendered) - len(tail)]
        words = [turn.reply.content, turn.reply.reasoning, *(call.name for call in turn.reply.tool_calls)]
        if not all(word.strip() in kept for word in words):
            return None
        if last_id in self._special_ids:  # the model wrote an end of turn, perhaps not the template's
            tail = tail.removeprefix(self._end_of_turn)
        return self._encode_after(last_id, tail)

    def _after_words(self, request: ModelRequest, place: int) -> str | None:
        """Return what the template writes after the words of the assistant's message at `place`; None if it refuses."""
        before, after = request.messages[:place], request.messages[place + 1 :]
        try:
            texts = [self._render(request, [*before, message, *after]) for message in _WORDS]
        except Refusal:  # a tool's result may not follow a message without a call
            return None
        return common_suffix(texts)

    @cached_property
    def _special_ids(self) -> set[int]:
        return set(self._tokenizer.all_special_ids)

    @cached_property
    def _end_of_turn(self) -> str:
        """Return the special token that the template writes after an assistant's words; "" if it writes none there."""
        user = {"role": "user", "content": "clew"}
        requests = [ModelRequest(model="", messages=[user, message]) for message in _WORDS]
        ids = self._encode(common_suffix([self._render(each, each.messages, generation=False) for each in requests]))
        special = ids and ids[0] in self._special_ids
        return str(self._tokenizer.decode(ids[:1], skip_special_tokens=False)) if special else ""

    def _encode_after(self, last_id: int, text: str) -> list[int]:
        """Return the tokens of a text after a token. Alone, some tokenizers would put a space before its first word."""
        last = self._tokenizer.decode([last_id], skip_special_tokens=False)
        together = self._encode(f"{last}{text}")
        return together[1:] if together[:1] == [last_id] else self._encode(text)

    @cached_property
    def variables(self) -> set[str]:
        """Return the names of the variables that the chat template reads, except those that it sets itself."""
        template = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        language = Environment(extensions=["jinja2.ext.loopcontrols"])
        return set().union(
            *(meta.find_undeclared_variables(language.parse(_GENERATION.sub("", text))) for text in texts)
        )

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def _render(
        self, request: ModelRequest, messages: Sequence[Message], *, generation: bool = True, parts: bool | None = None
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise Refusal(400, "the model's tokenizer has no chat template; /v1/completions takes plain text.")
        parts = self._wants_parts if parts is None else parts
        given = [_in_parts(message) for message in messages] if parts else list(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                given,
                tools=request.shown_tools or None,  # pyright: ignore[reportArgumentType]
                add_generation_prompt=generation,
                tokenize=False,
                **request.template,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            if len(one := with_one_system(messages)) < len(messages):
                return self._render(request, one, generation=generation, parts=parts)
            why = f"Cannot render the messages: the model's chat template refuses them: {error}"
            raise Refusal(400, why, param="messages") from None
        if self._vision is None:
            return str(text)
        try:
            return self._vision.expanded(str(text), [request.images[name] for name in image_names(messages)])
        except ImageError as error:
            raise Refusal(400, str(error), param="messages") from None

    @cached_property
    def _wants_parts(self) -> bool:
        """Return whether the template takes content only as a list of parts, as some vision models' templates do."""
        if self._vision is None or self._tokenizer.chat_template is None:
            return False
        try:
            return "clew" not in self._render(
                ModelRequest(model=""), [{"role": "user", "content": "clew"}], parts=False
            )
        except Refusal:
            return True

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        # The JSON of a tool's arguments may hold an escaped half of a surrogate pair, which no tokenizer accepts.
        valid = text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")
        encoded: Any = self._tokenizer(valid, add_special_tokens=special)
        return list(encoded["input_ids"])


def _in_parts(message: Message) -> Message:
    if not isinstance(said := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": said}]}


def goes_on_in(message: Message, reply: Reply) -> bool:
    """Return whether the client continued the model's message after the stop string that had ended it."""
    said = message.get("content") if message.get("role") == "assistant" else None
    return reply.stop_string is not None and str(said).startswith(reply.content + reply.stop_string)


def _goes_on_after(text: str, turn: Turn) -> bool:
    """Return whether a text begins with that turn's prompt and, but for white space, with the words of its reply."""
    words = turn.reply.content.strip()[:WORDS]
    return bool(words) and text.startswith(turn.rendered) and text[len(turn.rendered) :].lstrip().startswith(words)


def _goes_on_from(sent: Sequence[str], reworded: int, turn: Turn) -> bool:
    """Return whether a request has that turn's reply, or another message in its place.

    Args:
        sent: Keys of the request's messages.
        reworded: Index of the first assistant message that is in no recorded turn; 0 if there is none.
    """
    *asked, replied = turn.keys
    spoke = turn.reply.content.strip() or turn.reply.tool_calls
    if (spoke and replied in sent) or (len(sent) > len(asked) and sent[: len(asked)] == asked):
        return True
    # A reworded reply replaces this turn's if any message before it is also in this turn's request. System messages do
    # not count, because all turns share them.
    words = {key for key, message in zip(asked, turn.request.messages, strict=True) if message["role"] != "system"}
    return not words.isdisjoint(sent[:reworded])


def _why_rewritten(turn: Turn, before: Turn) -> tuple[str, str]:
    """Return why the rendered text does not keep an earlier turn that the messages continue: a kind and a clause."""
    request, earlier, id = turn.request, before.request, before.reply.id
    if request.shown_tools != earlier.shown_tools:
        both = (earlier.shown_tools, request.shown_tools)
        earlier_names, names = (", ".join(tool["function"]["name"] for tool in tools) or "none" for tools in both)
        texts = [json.dumps(tools, ensure_ascii=False) for tools in both]
        differ = f"({earlier_names} before, {names} now)" if earlier_names != names else excerpt(*texts)
        return "other tools", f"the client offers other tools {differ}"
    if request.template != earlier.template:
        texts = [json.dumps(variables, sort_keys=True) for variables in (earlier.template, request.template)]
        return "chat template arguments", f"the arguments of the chat template differ {excerpt(*texts)}"
    what = f"the chat template does not keep {id} as the model wrote it"
    if before.reply.reasoning and not request.messages[len(earlier.messages)].get("reasoning_content"):
        what += " (the client sends no reasoning back)"
    return "chat template", f"{what}; its text differs {excerpt(before.rendered + before.raw, turn.rendered)}"


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the system messages at the beginning joined into one.

    Many templates accept only one, and some agents send several.
    """
    systems = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(systems) < 2 or image_names(systems):
        return list(messages)
    said = "\n\n".join(message["content"] for message in systems)
    return [{"role": "system", "content": said}, *messages[len(systems) :]]


def common_suffix(texts: Sequence[str]) -> str:
    """Return the longest text that all of them end with."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, texts), strict=False))
    return "".join(letters[0] for letters in alike)[::-1]
