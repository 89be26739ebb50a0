"""Generation of the replies to one request, from the tokens of the prompt to content, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from clew.errors import EngineError, EpisodeError
from clew.gateway.constraints import stops_after_call
from clew.gateway.dialect import ModelRequest, Refusal, Reply, Token, ToolCall, message_of
from clew.gateway.episode_engine import EpisodeEngine, plain_text
from clew.gateway.images import image_names
from clew.gateway.interactions import Interaction
from clew.gateway.output_parser import (
    CALL_CLOSES,
    THINK_CLOSES,
    Parsed,
    Reader,
    has_template,
    opens_thought,
    parse_output,
)
from clew.gateway.reply_so_far import Draft, Speech, Transcript
from clew.gateway.turns import Prompt, Turn, Turns
from clew.http_server import LARGE_TEXT
from clew.inference.protocol import RequestTooLong, SchemaUnsupported, ServerFault


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One request whose replies the model generates."""

    engine: EpisodeEngine
    turns: Turns
    """Conversations of the session, to which the replies are added."""
    request: ModelRequest
    prompt: Prompt
    indices: Sequence[int]
    """Indices of the interactions, one for each of the request.n replies."""
    speech: Speech
    """Parts of the replies as they come, if the client wants a stream."""

    async def run(self) -> list[Reply]:
        """Generate the replies side by side, and add them to the conversations.

        Raises:
            Refusal: The engine refused the request, or failed at one of its replies.
        """
        generating = [asyncio.ensure_future(self._generate(number)) for number in range(len(self.indices))]
        try:
            replies = await asyncio.gather(*generating)
        except RequestTooLong as error:
            raise Refusal(400, str(error), param="messages", code="context_length_exceeded") from None
        except SchemaUnsupported as error:
            assert self.request.response_format is not None
            raise Refusal(400, str(error), param=self.request.response_format.param) from None
        except EpisodeError as error:
            raise Refusal(400, str(error)) from None
        except EngineError as error:
            raise Refusal(503 if isinstance(error, ServerFault) else 400, str(error)) from None
        finally:  # if one reply fails, stop the others
            for each in generating:
                each.cancel()
            await asyncio.gather(*generating, return_exceptions=True)
        turns = [
            Turn(
                request=self.request,
                rendered=self.prompt.rendered,
                reply=reply,
                raw=self._decode(reply.interaction.output_ids),
                follows=self.prompt.follows,
            )
            for reply in replies
        ]
        for turn in turns:
            self.turns.add(turn)
        await self._mark_branch(turns)
        return replies

    async def _generate(self, number: int) -> Reply:
        """Generate the request's reply `number`, and send its parts if the client wants a stream."""
        request, prompt, index = self.request, self.prompt, self.indices[number]
        draft = self._draft(number) if request.stream else None
        sampling = dict(request.sampling)
        if "seed" in sampling:
            sampling["seed"] += index  # otherwise the n replies would be equal, and so would replies to equal requests
        if request.response_format is not None:
            sampling["json_schema"] = json.dumps(request.response_format.schema)
        interaction = await self.engine.generate(
            prompt.input_ids,
            prompt=request.text if request.text is not None else request.messages,
            images=[request.images[name] for name in image_names(request.messages)],
            index=index,
            on_token=draft.add if draft is not None else None,
            details={"model": request.model, "tools": request.shown_tools},
            **sampling,
        )
        if prompt.follows is not None:
            interaction.details["follows"] = prompt.follows.reply.id
        reply = self._reply(interaction)
        if draft is not None:
            try:
                draft.finish(reply)
            except ValueError as error:
                what = "differs from the recorded reply"
                self.engine.warn(f"the stream of {reply.id} {what}: {error}", kind=what)
        return reply

    def _draft(self, number: int) -> Draft:
        """Return the draft of the request's reply `number`, which sends its parts as they come."""
        request, prompt = self.request, self.prompt
        before = None if request.text is not None else prompt.before
        # Nothing is sent before the end if a response template needs the whole output, or if a schema may leave no room
        # for the thought that the prompt has begun.
        at_the_end = before is not None and (
            has_template(self.engine.tokenizer) or (request.response_format is not None and opens_thought(before))
        )
        stops = request.sampling.get("stop", self.engine.resources.sampling.stop)
        return Draft(
            number,
            self.speech.send,
            id=self.engine.interaction_id(self.indices[number]),
            transcript=Transcript(self.engine.tokenizer, prompt.begin, logprobs=request.logprobs is not None),
            reader=None if at_the_end else Reader(before, request.shown_tools),
            begin=prompt.begin,
            stops=[stop for stop in stops if not self._closes_call(stop)],
        )

    def _reply(self, interaction: Interaction) -> Reply:
        """Return the reply, whose content, reasoning and tool calls are read from the output."""
        text, stop_string = self.prompt.begin + interaction.text, None
        if isinstance(interaction.matched, str) and not self._closes_call(interaction.matched):
            stop_string = interaction.matched
            text = self._before_stop(text, stop_string, interaction.output_ids)
        parsed = self._parsed(text, interaction.output_ids)
        self._warn_of_losses(interaction, parsed)
        cut_short = interaction.finish_reason == "length"
        calls = [
            ToolCall.of(interaction.id, number, name, arguments)
            for number, (name, arguments) in enumerate(parsed.calls)
        ]
        reply = Reply(
            interaction=interaction,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "length" if cut_short else "stop",
            reasoning_tokens=self.turns.count(parsed.reasoning) if parsed.reasoning else 0,
            stop_string=stop_string,
            tokens=self._tokens(interaction, parsed) if self.request.logprobs is not None else (),
        )
        interaction.details["reply"] = message_of(reply)
        return reply

    def _closes_call(self, stop: str) -> bool:
        """Return whether this stop string is the gateway's own, which belongs to the call that it ends."""
        return stop == CALL_CLOSES and stops_after_call(self.request)

    def _before_stop(self, text: str, stop: str, output_ids: list[int]) -> str:
        """Return the text before the stop string that the last generated token completed."""
        # That token may hold it twice ("\n\n" holds "\n" twice), and min_new_tokens may have let an earlier one pass.
        earlier = self.prompt.begin + plain_text(self.engine.tokenizer, output_ids[:-1]).rstrip("\ufffd")
        place = text.find(stop, max(0, len(earlier) - len(stop) + 1))
        return text[: place if place >= 0 else text.rfind(stop)] if stop in text else text

    def _parsed(self, text: str, output_ids: list[int]) -> Parsed:
        """Split the reply's text, which has no special tokens and no stop string."""
        request, prompt = self.request, self.prompt
        if request.text is not None:
            return Parsed(content=text, begins=0)
        # The schema of a response format may leave no room for a thought.
        no_thought = request.response_format is not None and THINK_CLOSES not in text
        before = "" if no_thought else prompt.before
        raw = prompt.begin + self._decode(output_ids)
        return parse_output(self.engine.tokenizer, text, raw, before, request.shown_tools)

    def _warn_of_losses(self, interaction: Interaction, parsed: Parsed) -> None:
        """Warn if the reply was cut short, leaves out some of the output, or shows a tool call as text."""
        if parsed.unparsed is not None:
            what = "has a tool call that cannot be read, which stays text"
            self.engine.warn(f"{interaction.id} {what}: {parsed.unparsed!r}", kind=what)
        if parsed.left_out.strip():
            what = "has words after a tool call, which are left out"
            self.engine.warn(f"{interaction.id} {what}: {parsed.left_out.strip()!r}", kind=what)
        if interaction.finish_reason == "length":
            self.engine.warn(f"{interaction.id} was cut short after {len(interaction.output_ids)} tokens")

    def _tokens(self, interaction: Interaction, parsed: Parsed) -> list[Token]:
        """Return the tokens that make up the content."""
        begin = self.prompt.begin
        transcript = Transcript(self.engine.tokenizer, begin, logprobs=True)
        for token, logprob in zip(interaction.output_ids, interaction.logprobs, strict=True):
            transcript.add(token, logprob)
        transcript.end()
        place = parsed.begins
        if place is None:
            place = max(0, (begin + interaction.text).rfind(parsed.content))
        return transcript.take(place, place + len(parsed.content))

    async def _mark_branch(self, turns: Sequence[Turn]) -> None:
        """Warn, and note it in the record, if a request does not continue the conversation that it should continue."""
        if turns[0].request.characters >= LARGE_TEXT:
            branch = await asyncio.to_thread(self.turns.branch, turns[0])
        else:
            branch = self.turns.branch(turns[0])
        if branch is None:
            return
        noted = {"of": branch.of.reply.id, "message": branch.message, "why": branch.why, "tokens": branch.tokens}
        for turn in turns:
            turn.reply.interaction.details["branch"] = noted
        ids = ", ".join(turn.reply.id for turn in turns)
        self.engine.warn(
            f"{ids} does not continue {branch.of.reply.id}: {branch.why}. A new sequence starts, and {branch.tokens} "
            f"tokens are processed again in training",
            kind=f"a branch ({branch.kind})",
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self.engine.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
