"""Token capture: what extends what, and that nothing the model wrote is tokenized again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.gateway import openai_chat
from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.dialect import Message, Refusal, Reply, message_of
from clew.gateway.sequences import aligned, assemble
from clew.gateway.turns import common_suffix
from clew.inference.protocol import Completion, GenerateRequest
from tests.gateway.chatml import CHATML, THINKING, chatml_tokenizer
from tests.gateway.spoken import Script, Spoken, session_on

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER: Message = {"role": "user", "content": "What is the answer?"}


class Talk:
    """A session whose requests are written in the way of OpenAI's chat completions."""

    def __init__(self, folder: Path, script: Script, template: str = CHATML) -> None:
        self.tokenizer = chatml_tokenizer(folder, template)
        self.engine = Spoken(self.tokenizer, script)
        self.session = AgentSession(session_on(self.engine), Limits())

    async def ask(self, messages: list[Message], **body: Any) -> Reply:
        ask = openai_chat.parse({"model": "any", "messages": messages, **body})
        request = await self.session.submit(ask, repr((messages, body)).encode(), retry=False)
        return (await request.replies)[0]

    def sequences(self) -> list[list[str]]:
        """IDs of the interactions of each sequence."""
        return [[each.id for each in chain] for chain in assemble(self.session.engine.interactions)]

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def openai_message(reply: Reply) -> Message:
    """The reply as a client sends it back."""
    return dict(openai_chat._assistant_message(reply))


def test_a_turn_that_extends_another_extends_its_exact_tokens(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "the answer is right<|im_end|>")

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([USER])
        return first, await talk.ask([USER, openai_message(first), {"role": "user", "content": "hello again"}])

    first, second = asyncio.run(both())
    ids, exact = second.interaction.input_ids, first.interaction.all_ids
    assert ids[: len(exact)] == exact
    assert talk.text(ids).endswith("right<|im_end|>\n<|im_start|>user\nhello again<|im_end|>\n<|im_start|>assistant\n")
    encoded: Any = talk.tokenizer(talk.text(ids), add_special_tokens=False)
    assert encoded["input_ids"] != ids, "this tokenizer would have written it otherwise: the test would show nothing"
    assert talk.sequences() == [[first.id, second.id]]
    columns = aligned(assemble(talk.session.engine.interactions)[0])
    trained = columns["input_ids"][columns["loss_mask"]].tolist()
    assert trained == first.interaction.output_ids + second.interaction.output_ids
    assert set(columns["turn_ids"][columns["loss_mask"]].tolist()) == {0, 1}


def test_the_content_ends_where_the_last_token_first_completes_the_stop_string(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "")
    twice = talk.tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert isinstance(twice, list) and talk.text(twice[-1:]).count("l") == 2, "as a line feed in a token of two"
    earlier = talk.tokenizer("tall ", add_special_tokens=False)["input_ids"]
    assert isinstance(earlier, list)

    async def generate(request: GenerateRequest) -> Completion:
        ids = earlier + twice
        return Completion(
            output_ids=ids, logprobs=[-0.25] * len(ids), versions=[3] * len(ids), finish_reason="stop", matched="l"
        )

    talk.engine.generate = generate
    reply = asyncio.run(talk.ask([USER], stop=["l"], min_tokens=len(earlier) + 1))
    assert (reply.content, reply.stop_string) == ("tall he", "l")


def test_an_answer_that_was_cut_short_gets_its_end_of_turn_from_the_template(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "the answer is")

    async def both() -> Reply:
        first = await talk.ask([USER])
        return await talk.ask([USER, openai_message(first), {"role": "user", "content": "hello"}])

    second = asyncio.run(both())
    assert "the answer is<|im_end|>\n<|im_start|>user" in talk.text(second.interaction.input_ids)
    assert len(talk.sequences()) == 1


@pytest.mark.parametrize("said", ["  hello world \n<|im_end|>", "\n\nhello world<|im_end|>", "hello world  "])
def test_a_template_or_client_that_trims_keeps_the_tokens(tmp_path: Path, said: str) -> None:
    talk = Talk(tmp_path, lambda prompt: said, CHATML.replace("{{ message.content }}", "{{ message.content.strip() }}"))

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([USER])
        back = openai_message(first) | {"content": first.content.strip()}
        return first, await talk.ask([USER, back, {"role": "user", "content": "hello"}])

    first, second = asyncio.run(both())
    exact = first.interaction.all_ids
    assert second.interaction.input_ids[: len(exact)] == exact
    after = talk.text(second.interaction.input_ids[len(exact) :])
    end = "" if said.endswith("<|im_end|>") else "<|im_end|>"
    assert after == f"{end}\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_are_compared_as_json(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name":"add",  "arguments":{"a":1,"b":[2,3]}}\n</tool_call><|im_end|>'
    talk = Talk(tmp_path, lambda prompt: call)

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([USER], tools=[ADD])
        back = openai_message(first)
        back["tool_calls"][0]["function"]["arguments"] = '{"b": [2, 3], "a": 1}'
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "3"}
        return first, await talk.ask([USER, back, result], tools=[ADD])

    first, second = asyncio.run(both())
    assert [(each.name, each.arguments) for each in first.tool_calls] == [("add", '{"a": 1, "b": [2, 3]}')]
    exact = first.interaction.all_ids
    assert second.interaction.input_ids[: len(exact)] == exact
    after = talk.text(second.interaction.input_ids[len(exact) :])
    assert after.startswith("\n<|im_start|>user\n<tool_response>\n3\n</tool_response>")


def test_a_template_that_strips_reasoning_starts_a_new_sequence_and_says_what_it_costs(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "<think>\nhello\n</think>\n\nthe answer<|im_end|>", THINKING)

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([USER])
        return first, await talk.ask([USER, openai_message(first), {"role": "user", "content": "hello"}])

    first, second = asyncio.run(both())
    assert (first.reasoning, first.content) == ("hello", "the answer")
    assert talk.sequences() == [[first.id], [second.id]]
    assert "think" not in talk.text(second.interaction.input_ids)
    again = talk.text(second.interaction.input_ids).partition("<|im_end|>\n<|im_start|>user\nhello")[0]
    encoded: Any = talk.tokenizer(again, add_special_tokens=False)
    assert f"{len(encoded['input_ids'])} tokens" in talk.session.warnings[0]
    assert second.interaction.details["follows"] == first.id


def test_reasoning_within_a_loop_of_tools_is_kept_when_the_client_sends_it_back(tmp_path: Path) -> None:
    call = '<think>\nhello\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    talk = Talk(tmp_path, lambda prompt: call, THINKING)

    async def all_three() -> list[Reply]:
        first = await talk.ask([USER], tools=[ADD])
        back = openai_message(first)
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "3"}
        kept = await talk.ask([USER, back, result], tools=[ADD])
        back = {name: value for name, value in back.items() if name != "reasoning_content"}
        return [first, kept, await talk.ask([USER, back, result], tools=[ADD])]

    first, kept, dropped = asyncio.run(all_three())
    assert talk.sequences() == [[first.id, kept.id], [dropped.id]]
    assert "the client sends no reasoning back" in talk.session.warnings[0]


def test_branches_and_rewritten_contexts_are_sequences_of_their_own_and_train_each_token_once(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello<|im_end|>")

    async def tree() -> list[Reply]:
        first = await talk.ask([USER])
        on = [USER, openai_message(first)]
        left, right = await asyncio.gather(
            talk.ask([*on, {"role": "user", "content": "left"}]), talk.ask([*on, {"role": "user", "content": "right"}])
        )
        compacted = await talk.ask([{"role": "user", "content": "in short: hello"}])
        return [first, left, right, compacted]

    first, left, right, compacted = asyncio.run(tree())
    assert talk.sequences() == [[first.id, left.id], [right.id], [compacted.id]]
    interactions = talk.session.engine.interactions
    trained = sum(int(aligned(chain)["loss_mask"].sum()) for chain in assemble(interactions))
    assert trained == sum(len(each.output_ids) for each in interactions)


def test_a_message_that_is_not_what_the_model_said_starts_a_new_sequence(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello")

    async def both() -> list[Reply]:
        first = await talk.ask([USER])
        longer = openai_message(first) | {"content": "hello world"}  # begins as the model did
        return [first, await talk.ask([USER, longer, {"role": "user", "content": "on"}])]

    first, second = asyncio.run(both())
    assert talk.sequences() == [[first.id], [second.id]]
    assert "follows" not in second.interaction.details


def test_messages_that_no_template_accepts(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello")
    with pytest.raises(Refusal, match="a system message must come first"):
        asyncio.run(talk.ask([USER, {"role": "system", "content": "be good"}]))


def test_a_call_that_cannot_be_read_stays_text_and_is_told(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: '<tool_call>\n{"name": "add", "argum<|im_end|>')
    reply = asyncio.run(talk.ask([USER], tools=[ADD]))
    assert reply.finish_reason == "stop" and not reply.tool_calls and "<tool_call>" in reply.content
    assert "cannot be read" in talk.session.warnings[0]


def test_a_forced_tool_begins_the_models_words(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: '{"a": 1}}\n</tool_call><|im_end|>')
    choice = {"type": "function", "function": {"name": "add"}}

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([USER], tools=[ADD], tool_choice=choice)
        back = openai_message(first)
        return first, await talk.ask([USER, back, {"role": "tool", "tool_call_id": "x", "content": "1"}], tools=[ADD])

    first, second = asyncio.run(both())
    assert [(each.name, each.arguments) for each in first.tool_calls] == [("add", '{"a": 1}')]
    assert talk.text(first.interaction.output_ids) == '{"a": 1}}\n</tool_call><|im_end|>'
    assert talk.sequences() == [[first.id, second.id]]


def test_a_forced_call_ends_the_thought_that_the_template_has_begun(tmp_path: Path) -> None:
    begins = "<|im_start|>assistant{{ '\\n' }}{% endif %}"
    thinks = CHATML.replace(begins, begins.replace("{% endif %}", "<think>{{ '\\n' }}{% endif %}"))
    talk = Talk(tmp_path, lambda prompt: 'add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', thinks)
    reply = asyncio.run(talk.ask([USER], tools=[ADD], tool_choice="required"))
    assert ([call.name for call in reply.tool_calls], reply.reasoning) == (["add"], "")
    assert talk.text(reply.interaction.input_ids).endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "')


def test_one_call_at_most_where_the_client_wants_it_so(tmp_path: Path) -> None:
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    talk = Talk(tmp_path, lambda prompt: f"{one}\n{one}<|im_end|>")
    assert len(asyncio.run(talk.ask([USER], tools=[ADD])).tool_calls) == 2
    resources = talk.session.engine.resources
    talk.session.engine.resources = replace(resources, sampling=replace(resources.sampling, stop=("END",)))
    assert len(asyncio.run(talk.ask([USER], tools=[ADD], parallel_tool_calls=False)).tool_calls) == 1
    assert talk.engine.params[-1].stop == ("END", "</tool_call>"), "the configured stop strings hold, too"


@given(st.lists(st.text("ab"), min_size=1, max_size=4))
def test_the_common_suffix_is_the_longest(texts: list[str]) -> None:
    suffix = common_suffix(texts)
    assert all(text.endswith(suffix) for text in texts)
    shortest = min(map(len, texts))
    if len(suffix) < shortest:
        assert len({text[-len(suffix) - 1] for text in texts}) > 1


@settings(deadline=None)
@given(
    words=st.lists(
        st.tuples(
            st.sampled_from(["hello", "the answer", " is right ", "\n42", "é☃"]),
            st.sampled_from(["<|im_end|>", ""]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_however_a_conversation_goes_its_tokens_are_those_that_were_generated(
    words: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    said = iter("".join(word) for word in words)
    talk = Talk(tmp_path_factory.mktemp("talk"), lambda prompt: next(said))

    async def go_on() -> list[Reply]:
        messages, replies = [USER], []
        for _ in words:
            replies.append(await talk.ask(messages))
            messages = [*messages, message_back(replies[-1]), {"role": "user", "content": "and?"}]
        return replies

    replies = asyncio.run(go_on())
    assert len(talk.sequences()) == 1
    columns = aligned(assemble(talk.session.engine.interactions)[0])
    generated = [id for reply in replies for id in reply.interaction.output_ids]
    assert columns["input_ids"][columns["loss_mask"]].tolist() == generated


def message_back(reply: Reply) -> Message:
    message = message_of(reply)
    return {"role": "assistant", "content": message["content"]}
