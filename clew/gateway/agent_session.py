"""Sessions: the conversations of one episode with the model, from request to reply.

Each episode has a session and an API key of its own, so that a client needs to send nothing but the key. A session ends
with its episode, by an explicit call, or at a limit; a request after that gets an error that says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from clew.errors import EngineError, EpisodeError
from clew.gateway.dialect import Ask, Refusal, Reply, Stream, Token, ToolCall, message_of
from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.images import image_names
from clew.gateway.interactions import Interaction
from clew.gateway.output_parser import (
    CALL_CLOSES,
    CALL_OPENS,
    THINK_CLOSES,
    Parsed,
    Reader,
    has_template,
    opens_thought,
    parse_output,
)
from clew.gateway.streaming import Draft, Speech, Transcript
from clew.gateway.turns import Prompt, Turn, Turns
from clew.http_server import LARGE_TEXT, max_text
from clew.inference.protocol import RequestTooLong, SchemaUnsupported, ServerFault


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a session; None: no limit."""

    turns: int | None = None
    """Maximum number of requests to the model."""
    tokens: int | None = None
    """Maximum number of generated tokens."""


@dataclass(kw_only=True, eq=False)
class Submission:
    """A request that has arrived, and its replies. A retry of the request gets the same replies."""

    ids: Sequence[str]
    """IDs of the interactions; the first is the response's ID."""
    fingerprint: bytes
    created_at: float
    """Time when generation was begun, in seconds since the epoch."""
    input_ids: Sequence[int]
    speech: Speech
    """Parts of the replies as they come, if the client wants a stream."""
    replies: asyncio.Task[list[Reply]]
    left: bool = False
    """True if the client left before it had the reply, and no retry has come since."""
    delivered: bool = False
    """True once a client has received the reply. A retry may do so before the old connection is known to be broken."""

    @property
    def abandoned(self) -> bool:
        return self.left and not self.delivered

    def stream(self) -> Stream:
        """Return a new stream of the replies, from the beginning. Any number of streams may be read side by side."""
        return Stream(
            ids=self.ids,
            created_at=self.created_at,
            input_ids=self.input_ids,
            deltas=self.speech.follow(),
            replies=self.answered,
        )

    async def answered(self) -> list[Reply]:
        """Wait for the replies and return them. Cancelling this wait does not stop them.

        Raises:
            Refusal: The request failed, or the session has ended.
        """
        await asyncio.wait({self.replies})
        if self.replies.cancelled():
            raise Refusal(400, f"session {self.ids[0].rpartition('.i')[0]} has ended.", code="session_ended")
        return self.replies.result()


class AgentSession:
    """Conversations of one episode with the model. Use it on the gateway's event loop."""

    def __init__(self, engine: EpisodeEngine, limits: Limits) -> None:
        self.engine = engine
        self.ended: str | None = None
        """Reason why no further request is answered; None while the session is open."""
        self.data: dict[str, Any] = {}
        """Data that the client sent to /rl/start_session; recorded as the episode's data row. Not used in training."""
        self.started_at = time.time()
        self.last_used = time.monotonic()
        self.received_bytes = 0
        """Size in bytes of the requests that are kept: a measure of the memory that they take."""
        self._limits = limits
        self._warn = engine.warn
        self.turns = Turns(engine.tokenizer, engine.resources.context, engine.resources.vision)
        self._requests: list[Submission] = []
        self._failed: Counter[bytes] = Counter()
        """Number of failed attempts by request fingerprint. For each of them, one retry counts as a new attempt."""
        self._arriving: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks by request fingerprint. A retry waits while the prompt is being made, and then finds the request."""

    @property
    def id(self) -> str:
        return self.engine.episode_id

    @property
    def busy(self) -> bool:
        return any(not request.replies.done() for request in self._requests)

    @property
    def rewards(self) -> dict[str, float]:
        """Return the rewards of single interactions, by interaction ID."""
        return self.engine.turn_rewards

    @property
    def warnings(self) -> list[str]:
        return list(self.engine.warnings)

    async def submit(self, ask: Ask, fingerprint: bytes, *, retry: bool, size: int = 0) -> Submission:
        """Begin to answer a request of `size` bytes, or return the earlier request that it is a retry of.

        `fingerprint` is equal for a request and its retries; `retry` is True if the client says that this is a retry.

        Raises:
            Refusal: The session has ended, or its messages or parameters cannot be honoured.
        """
        self.last_used = time.monotonic()
        async with self._arriving.setdefault(fingerprint, asyncio.Lock()):
            return await self._submit(ask, fingerprint, retry, size)

    async def _submit(self, ask: Ask, fingerprint: bytes, retry: bool, size: int) -> Submission:
        if retry and self._failed[fingerprint] > 0:
            retry = False
            self._failed[fingerprint] -= 1
        for earlier in reversed(self._requests):  # equal requests side by side are no retries: neither was abandoned
            if earlier.fingerprint == fingerprint and (retry or earlier.abandoned):
                earlier.left = False
                return earlier
        self._refuse_beyond_limits()
        ask, begin = self._constrained(ask)
        prompt = await self._prompt(ask, begin)
        self._advise(ask)
        indices = [self.engine.reserve() for _ in range(ask.n)]
        speech = Speech()
        answer = asyncio.get_running_loop().create_task(self._answer(ask, prompt, indices, speech))
        request = Submission(
            ids=[self.engine.interaction_id(index) for index in indices],
            fingerprint=fingerprint,
            created_at=time.time(),
            input_ids=prompt.input_ids,
            speech=speech,
            replies=answer,
        )
        self._requests.append(request)
        self.received_bytes += size
        answer.add_done_callback(lambda done: self._settle(request, size, done))
        return request

    async def count_tokens(self, ask: Ask) -> int:
        return len((await self._prompt(ask)).input_ids)

    def set_reward(self, reward: float, id: str | None = None) -> None:
        """Reward the interaction of that ID; None: the last one.

        Raises:
            Refusal: There is no interaction of that ID, or none at all.
        """
        known = [interaction.id for interaction in self.engine.interactions]
        if not known or (id is not None and id not in known):
            has = f"has only {', '.join(known)}" if known else "has no interaction yet"
            raise Refusal(404, f"Cannot reward {id or 'the last interaction'}: session {self.id} {has}.")
        self.rewards[id or known[-1]] = reward

    def end(self, why: str) -> None:
        """Answer no further request, and drop replies that the client never saw and no later request continues."""
        self.ended = self.ended or why
        for request in self._requests:
            if not request.replies.done():
                request.replies.cancel()
                self._drop(request.ids)  # drops those of its n replies that are already complete
            elif request.abandoned:
                self._drop(set(request.ids) - self.turns.followed())

    # One request -----------------------------------------------------------------------------------------------------

    def _drop(self, ids: Container[str]) -> None:
        self.engine.interactions[:] = [each for each in self.engine.interactions if each.id not in ids]

    def _settle(self, request: Submission, size: int, done: asyncio.Task[list[Reply]]) -> None:
        self.last_used = time.monotonic()
        request.speech.end()  # also when it was cancelled before it began
        if done.cancelled() or done.exception() is not None:  # a retry is a new attempt
            self._drop(request.ids)
            self._requests.remove(request)
            self.received_bytes -= size
            self._failed[request.fingerprint] += 1

    async def _prompt(self, ask: Ask, begin: str = "") -> Prompt:
        """Return the prompt of a request; see `Turns.prompt`.

        A long one, or one with images, is made in a thread, so that other sessions do not have to wait for it.
        """
        if ask.characters > (limit := max_text(self.engine.resources.context)):
            message = (
                f"Cannot read the messages: they have {ask.characters} characters, and only {limit} are read for this "
                f"model's context. Shorten them."
            )
            raise Refusal(400, message, param="messages", code="context_length_exceeded")
        if ask.characters < LARGE_TEXT and not ask.images:
            return self.turns.prompt(ask, begin)
        prompt = await asyncio.to_thread(self.turns.prompt, ask, begin)
        self._refuse_beyond_limits()  # the session may have ended meanwhile
        return prompt

    def _refuse_beyond_limits(self) -> None:
        turns = len(self._requests)
        tokens = sum(len(interaction.output_ids) for interaction in self.engine.interactions)
        if self.ended is None and self._limits.turns is not None and turns >= self._limits.turns:
            self.ended = f"it has used its {self._limits.turns} requests (rollout.max_turns)"
        if self.ended is None and self._limits.tokens is not None and tokens >= self._limits.tokens:
            self.ended = f"it has used its {self._limits.tokens} generated tokens (rollout.max_episode_tokens)"
        if self.ended is not None:
            message = f"Cannot answer: session {self.id} has ended, because {self.ended}."
            raise Refusal(400, message, code="session_ended")

    def _constrained(self, ask: Ask) -> tuple[Ask, str]:
        """Return the request as the engine can honour it, and the text that the reply begins with to force a tool call.

        Raises:
            Refusal: The engine or the chat template cannot meet a demand.
        """
        if ask.logprobs:
            field = "top_logprobs" if ask.text is None else "logprobs"
            message = (
                f"Cannot honour {field}={ask.logprobs}: the engine gives the logprob of the sampled token alone. "
                f"Set {field}=0."
            )
            raise Refusal(400, message, param=field)
        forced = ask.tool_choice not in ("auto", "none")
        if forced:
            ask = replace(ask, form=None)  # a form applies to text, and a forced call leaves no text
        if ask.form is not None and ask.shown_tools:
            message = (
                f"Cannot honour {ask.form.param} together with tools: the schema would apply to the whole output, so "
                f'the model could not call a tool. Send no tools, or set tool_choice to "none".'
            )
            raise Refusal(400, message, param=ask.form.param)
        ask = self._with_known_variables(ask)
        if not ask.shown_tools or (ask.parallel_tool_calls and not forced):
            return ask, ""
        if CALL_OPENS not in str(self.engine.tokenizer.chat_template):
            param = "tool_choice" if forced else "parallel_tool_calls"
            message = (
                f"Cannot honour {param}: the model's chat template has no {CALL_OPENS}, so its tool calls cannot be "
                f"forced. Leave it out."
            )
            raise Refusal(400, message, param=param)
        if not ask.parallel_tool_calls:
            stops = ask.sampling.get("stop", self.engine.resources.sampling.stop)
            ask = replace(ask, sampling={**ask.sampling, "stop": (*stops, CALL_CLOSES)})
        if ask.tool_choice == "required":
            return ask, f'{CALL_OPENS}\n{{"name": "'
        return ask, f'{CALL_OPENS}\n{{"name": {json.dumps(ask.tool_choice)}, "arguments": ' if forced else ""

    def _with_known_variables(self, ask: Ask) -> Ask:
        """Return the request without variables that the chat template does not know, if that does no harm.

        A variable that is False, such as enable_thinking, is dropped silently: there is nothing to turn off. Thinking
        or an effort is dropped with a warning, because frameworks ask for it by default for some model names.

        Raises:
            Refusal: The template does not know any other variable.
        """
        unknown = [name for name in ask.template if name not in self.turns.variables]
        for name in unknown:
            value = ask.template[name]
            if value is False:
                continue
            if name == "reasoning_effort":
                self._warn(f"the client asks for reasoning effort {value!r}, a setting that the model does not have")
            elif name == "enable_thinking":
                self._warn("the client asks for thinking, a setting that the model does not have")
            else:
                message = f"Cannot honour {name}: the model's chat template knows no such variable. Leave it out."
                raise Refusal(400, message, param=name)
        return replace(ask, template={name: value for name, value in ask.template.items() if name not in unknown})

    def _advise(self, ask: Ask) -> None:
        for note in ask.notes:
            self._warn(note, kind=note)
        if ask.form is not None:
            self._warn(
                "replies follow a JSON schema: their logprobs are relative to the tokens that the schema allows, not "
                "the policy's own. Do not train on them"
            )
        if "seed" in ask.sampling:
            self._warn(f"the client sets seed={ask.sampling['seed']}: episodes of a group get the same random numbers")

    async def _answer(self, ask: Ask, prompt: Prompt, indices: list[int], speech: Speech) -> list[Reply]:
        drafts = [self._draft(ask, prompt, number, index, speech) for number, index in enumerate(indices)]
        pairs = zip(indices, drafts, strict=True)
        generating = [asyncio.ensure_future(self._one(ask, prompt, *pair)) for pair in pairs]
        try:
            replies = await asyncio.gather(*generating)
        except RequestTooLong as error:
            raise Refusal(400, str(error), param="messages", code="context_length_exceeded") from None
        except SchemaUnsupported as error:
            assert ask.form is not None
            raise Refusal(400, str(error), param=ask.form.param) from None
        except EpisodeError as error:
            raise Refusal(400, str(error)) from None
        except EngineError as error:
            raise Refusal(503 if isinstance(error, ServerFault) else 400, str(error)) from None
        finally:  # if one reply failed, the request has failed: the others must not go on
            for each in generating:
                each.cancel()
            await asyncio.gather(*generating, return_exceptions=True)
        turns = []
        for reply in replies:
            raw = self._decode(reply.interaction.output_ids)
            turns.append(Turn(ask=ask, rendered=prompt.rendered, reply=reply, raw=raw, follows=prompt.follows))
            self.turns.add(turns[-1])
        await self._mark_branch(turns)
        return replies

    async def _mark_branch(self, turns: Sequence[Turn]) -> None:
        """Warn, and note in the record, if a request does not continue the conversation that it should have."""
        if turns[0].ask.characters >= LARGE_TEXT:
            branch = await asyncio.to_thread(self.turns.branch, turns[0])
        else:
            branch = self.turns.branch(turns[0])
        if branch is None:
            return
        noted = {"of": branch.of.reply.id, "message": branch.message, "why": branch.why, "tokens": branch.tokens}
        for turn in turns:
            turn.reply.interaction.details["branch"] = noted
        ids = ", ".join(turn.reply.id for turn in turns)
        self._warn(
            f"{ids} does not continue {branch.of.reply.id}: {branch.why}. A new sequence starts, and {branch.tokens} "
            f"tokens are processed again in training",
            kind=f"a branch ({branch.kind})",
        )

    def _draft(self, ask: Ask, prompt: Prompt, number: int, index: int, speech: Speech) -> Draft | None:
        """Return the draft of the request's reply `number`; None if the client wants no stream."""
        if not ask.stream:
            return None
        before = None if ask.text is not None else prompt.before
        # Not streamed before the end: a response template needs the whole output, and a schema may leave no room for
        # the thought that the prompt has begun.
        at_the_end = before is not None and (
            has_template(self.engine.tokenizer) or (ask.form is not None and opens_thought(before))
        )
        stops = ask.sampling.get("stop", self.engine.resources.sampling.stop)
        return Draft(
            number,
            speech.tell,
            id=self.engine.interaction_id(index),
            transcript=Transcript(self.engine.tokenizer, prompt.begin, logprobs=ask.logprobs is not None),
            reader=None if at_the_end else Reader(before, ask.shown_tools),
            begin=prompt.begin,
            stops=[stop for stop in stops if stop != CALL_CLOSES],  # CALL_CLOSES belongs to the call that it ends
        )

    async def _one(self, ask: Ask, prompt: Prompt, index: int, draft: Draft | None) -> Reply:
        sampling = dict(ask.sampling)
        if "seed" in sampling:
            sampling["seed"] += index  # otherwise the n replies, or those to equal requests, would be equal
        if ask.form is not None:
            sampling["json_schema"] = json.dumps(ask.form.schema)
        interaction = await self.engine.generate(
            prompt.input_ids,
            prompt=ask.text if ask.text is not None else ask.messages,
            images=[ask.images[name] for name in image_names(ask.messages)],
            index=index,
            on_token=draft.add if draft is not None else None,
            details={"model": ask.model, "tools": ask.shown_tools},
            **sampling,
        )
        if prompt.follows is not None:
            interaction.details["follows"] = prompt.follows.reply.id
        reply = self._reply(ask, prompt, interaction)
        if draft is not None:
            try:
                draft.finish(reply)
            except ValueError as error:
                what = "differs from the recorded reply"
                self._warn(f"the stream of {reply.id} {what}: {error}", kind=what)
        return reply

    def _reply(self, ask: Ask, prompt: Prompt, interaction: Interaction) -> Reply:
        text = prompt.begin + interaction.text
        stop_string = None
        if isinstance(interaction.matched, str) and interaction.matched != CALL_CLOSES:
            stop_string = interaction.matched
            text = text[: text.rindex(stop_string)] if stop_string in text else text
        if ask.text is not None:
            parsed = Parsed(content=text, begins=0)
        else:
            raw = prompt.begin + self._decode(interaction.output_ids)
            no_thought = ask.form is not None and THINK_CLOSES not in text  # the schema left no room for one
            before = "" if no_thought else prompt.before
            parsed = parse_output(self.engine.tokenizer, text, raw, before, ask.shown_tools)
        if parsed.unparsed is not None:
            what = "has a tool call that cannot be read, which stays text"
            self._warn(f"{interaction.id} {what}: {parsed.unparsed!r}", kind=what)
        if parsed.left_out.strip():
            what = "has words after a tool call, which are left out"
            self._warn(f"{interaction.id} {what}: {parsed.left_out.strip()!r}", kind=what)
        if interaction.finish_reason == "length":
            self._warn(f"{interaction.id} was cut short after {len(interaction.output_ids)} tokens")
        calls = [
            ToolCall.of(interaction.id, number, name, arguments)
            for number, (name, arguments) in enumerate(parsed.calls)
        ]
        reply = Reply(
            interaction=interaction,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "length" if interaction.finish_reason == "length" else "stop",
            reasoning_tokens=self.turns.count(parsed.reasoning) if parsed.reasoning else 0,
            stop_string=stop_string,
            tokens=self._tokens(interaction, prompt.begin, parsed) if ask.logprobs is not None else (),
        )
        interaction.details["reply"] = message_of(reply)
        return reply

    def _tokens(self, interaction: Interaction, begin: str, parsed: Parsed) -> list[Token]:
        """Return the tokens that make up the content."""
        transcript = Transcript(self.engine.tokenizer, begin, logprobs=True)
        for token, logprob in zip(interaction.output_ids, interaction.logprobs, strict=True):
            transcript.add(token, logprob)
        transcript.end()
        place = parsed.begins
        if place is None:
            place = max(0, (begin + interaction.text).rfind(parsed.content))
        return transcript.take(place, place + len(parsed.content))

    def _decode(self, ids: list[int]) -> str:
        return str(self.engine.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
