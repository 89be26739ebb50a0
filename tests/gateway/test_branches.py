"""Requests that do not continue the recorded conversation: each has a warning that says what differs and what it
costs. Conversations of their own have none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clew.gateway.conversation_difference import excerpt
from clew.gateway.dialect import Message, Reply
from clew.gateway.episode_engine import MAX_WARNINGS
from tests.gateway.chatml import CHATML, THINKING
from tests.gateway.test_turns import ADD, USER, Talk, openai_message

SYSTEM: Message = {"role": "system", "content": "You are good. It is 12:00:01."}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
NEXT: Message = {"role": "user", "content": "and then?"}


def talk_to(folder: Path, *said: str, template: str = CHATML) -> Talk:
    lines = iter(said)
    return Talk(folder, lambda prompt: next(lines), template)


def warning_of(talk: Talk) -> str:
    [warning] = talk.session.warnings
    return warning


def tokens_of(talk: Talk, text: str) -> int:
    encoded: Any = talk.tokenizer(text, add_special_tokens=False)
    return len(encoded["input_ids"])


Change = Callable[[list[Message]], list[Message]]


def with_clock(messages: list[Message]) -> list[Message]:
    return [{"role": "system", "content": "You are good. It is 12:00:02."}, *messages[1:]]


def with_cleared_result(messages: list[Message]) -> list[Message]:
    return [m | {"content": "[cleared]"} if m["role"] == "tool" else m for m in messages]


def with_window(messages: list[Message]) -> list[Message]:
    return [messages[0], *messages[3:]]


def with_space(messages: list[Message]) -> list[Message]:
    return [messages[0], messages[1] | {"content": messages[1]["content"] + "\n"}, *messages[2:]]


def with_summary(messages: list[Message]) -> list[Message]:
    return [*messages[:2], {"role": "user", "content": "Remember the sum."}, *messages[2:]]


def with_other_arguments(messages: list[Message]) -> list[Message]:
    call = messages[2]["tool_calls"][0]
    call = {**call, "function": {"name": "add", "arguments": '{"a": 2}'}}
    return [*messages[:2], messages[2] | {"tool_calls": [call]}, *messages[3:]]


@pytest.mark.parametrize(
    ("change", "message", "words"),
    [
        (with_clock, 1, "message 1 (system) differs at character 28: …' are good. It is 12:00:01.' became …' are"),
        (with_cleared_result, 4, "message 4 (tool) differs at character 1: '3' became '[cleared]'"),
        (with_window, 2, "messages 2 to 3 (user, assistant) of the recorded conversation are left out"),
        (with_space, 2, r"message 2 (user) differs at character 20: 'What is the answer?' became 'What is the ans"),
        (with_summary, 3, "message 3 (user) was inserted: 'Remember the sum.'"),
        (with_other_arguments, 3, "message 3 (assistant) differs in tool_calls at character 37: …'dd\", \"arg"),
    ],
)  # fmt: skip
def test_an_earlier_message_that_changed(tmp_path: Path, change: Change, message: int, words: str) -> None:
    talk = talk_to(tmp_path, CALL, "the answer is 42<|im_end|>", "hello<|im_end|>")

    async def talk_thrice() -> list[Reply]:
        messages = [SYSTEM, USER]
        first = await talk.ask(messages, tools=[ADD])
        said = openai_message(first)
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}]
        second = await talk.ask(messages, tools=[ADD])
        messages += [openai_message(second), NEXT]
        return [first, second, await talk.ask(change(messages), tools=[ADD])]

    first, second, third = asyncio.run(talk_thrice())
    assert talk.sequences() == [[first.id, second.id], [third.id]]
    warning = warning_of(talk)
    assert warning.startswith(f"{third.id} does not continue {second.id}: {words}")
    new = "<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    tokens = len(third.interaction.input_ids) - tokens_of(talk, new)
    assert warning.endswith(f". A new sequence starts, and {tokens} tokens are processed again in training")
    branch = third.interaction.record_entry()["branch"]
    assert (branch["of"], branch["message"], branch["tokens"]) == (second.id, message, tokens)
    assert "branch" not in second.interaction.record_entry()


def ask_twice(talk: Talk, change: Callable[[Reply], list[Message]], **bodies: Any) -> tuple[Reply, Reply]:
    """bodies: first and second, further fields of the requests."""

    async def both() -> tuple[Reply, Reply]:
        first = await talk.ask([SYSTEM, USER], **bodies.get("first", {}))
        return first, await talk.ask(change(first), **bodies.get("second", {}))

    return asyncio.run(both())


def goes_on(reply: Reply) -> list[Message]:
    return [SYSTEM, USER, openai_message(reply), NEXT]


def test_other_tools(tmp_path: Path) -> None:
    talk = talk_to(tmp_path, "hello<|im_end|>", "hello<|im_end|>")
    first, second = ask_twice(talk, goes_on, first={"tools": [ADD]}, second={"tools": [ADD, SUB]})
    words = "the client offers other tools (add before, add, sub now). A new sequence starts"
    assert warning_of(talk).startswith(f"{second.id} does not continue {first.id}: {words}")
    assert second.interaction.details["branch"]["message"] is None


def test_other_arguments_of_the_chat_template(tmp_path: Path) -> None:
    ends = "{% if add_generation_prompt %}"
    template = CHATML.replace(ends, "{% if deep %}deep{% endif %}" + ends)
    talk = talk_to(tmp_path, "hello<|im_end|>", "hello<|im_end|>", template=template)
    ask_twice(talk, goes_on, first={"chat_template_kwargs": {"deep": True}})
    words = "the arguments of the chat template differ at character 2: '{\"deep\": true}' became '{}'"
    assert words in warning_of(talk)


def test_a_reply_that_is_sent_back_in_other_words(tmp_path: Path) -> None:
    talk = talk_to(tmp_path, "hello<|im_end|>", "hello<|im_end|>")
    first, second = ask_twice(talk, lambda reply: [SYSTEM, USER, {"role": "assistant", "content": "hello world"}, NEXT])
    words = "message 3 (assistant) is not what the model said: it differs at character 6: 'hello' became 'hello world'"
    assert f"{second.id} does not continue {first.id}: {words}" in warning_of(talk)


def test_a_reply_in_other_words_under_another_system_prompt(tmp_path: Path) -> None:
    talk = talk_to(tmp_path, "hello<|im_end|>", "hello<|im_end|>")
    ask_twice(talk, lambda reply: with_clock([SYSTEM, USER, {"role": "assistant", "content": "hi"}, NEXT]))
    assert "message 1 (system) differs at character 28" in warning_of(talk)


def test_a_reply_that_is_left_out(tmp_path: Path) -> None:
    talk = talk_to(tmp_path, "hello<|im_end|>", "hello<|im_end|>")
    ask_twice(talk, lambda reply: [SYSTEM, USER, NEXT])
    assert "the model's reply is left out, and message 3 (user) is in its place: 'and then?'" in warning_of(talk)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_conversation_that_goes_on_in_two_ways(tmp_path: Path, side_by_side: bool) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello<|im_end|>")

    async def fork() -> list[Reply]:
        first = await talk.ask([USER])
        on = [USER, openai_message(first)]
        asks = [talk.ask([*on, {"role": "user", "content": word}]) for word in ("left", "right")]
        return [first, *(await asyncio.gather(*asks) if side_by_side else [await ask for ask in asks])]

    first, left, right = asyncio.run(fork())
    assert talk.sequences() == [[first.id, left.id], [right.id]]
    assert "does not continue" in warning_of(talk) and re.search("'(left|right)' became", warning_of(talk))
    [branched] = [each for each in (left, right) if "branch" in each.interaction.details]
    shared = f"{talk.text(first.interaction.all_ids)}\n<|im_start|>user\n"
    other = left if branched is right else right
    same = [one == two for one, two in zip(left.interaction.all_ids, right.interaction.all_ids, strict=False)]
    assert branched.interaction.details["branch"]["tokens"] == same.index(False) >= len(first.interaction.all_ids)
    assert talk.text(other.interaction.input_ids).startswith(shared)


def test_sub_agents_and_further_answers_are_no_branches(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello<|im_end|>")
    planner: Message = {"role": "system", "content": "You plan."}

    async def episode() -> None:
        first = await talk.ask([SYSTEM, USER])
        await talk.ask([SYSTEM, USER])  # for another answer
        await talk.ask([SYSTEM, USER], n=2)
        on = [SYSTEM, USER, openai_message(first), NEXT]
        await asyncio.gather(*(talk.ask(on) for _ in range(2)))
        sub = [planner, {"role": "user", "content": "Add 1 and 2. The first said: hello"}]
        answer = await talk.ask(sub)
        await talk.ask([*sub, openai_message(answer), NEXT])
        await talk.ask([SYSTEM, {"role": "user", "content": "Give it a title."}])
        await talk.ask([planner, USER])  # another agent on the same question
        shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        await talk.ask([planner, *shots, {"role": "user", "content": "1+2?"}])
        await talk.ask([planner, *shots, {"role": "user", "content": "1+3?"}])

    asyncio.run(episode())
    assert talk.session.warnings == []


def test_a_template_that_drops_later_reasoning_is_told_also_where_an_earlier_turn_is_kept(tmp_path: Path) -> None:
    thought = "<think>\nhello\n</think>\n\nthe answer<|im_end|>"
    talk = talk_to(tmp_path, "right<|im_end|>", thought, "hello<|im_end|>", template=THINKING)

    async def three() -> list[Reply]:
        first = await talk.ask([USER])
        messages = [USER, openai_message(first), NEXT]
        second = await talk.ask(messages)
        return [first, second, await talk.ask([*messages, openai_message(second), NEXT])]

    first, second, third = asyncio.run(three())
    assert talk.sequences() == [[first.id, second.id], [third.id]]
    assert f"{third.id} does not continue {second.id}: the chat template does not keep {second.id}" in warning_of(talk)


def test_words_of_a_branch_that_come_back_in_the_conversation_before_it(tmp_path: Path) -> None:
    talk = talk_to(tmp_path, "hello<|im_end|>", "the answer<|im_end|>", "right<|im_end|>")

    async def three() -> list[Reply]:
        first = await talk.ask([SYSTEM, USER])
        messages = [SYSTEM, USER, openai_message(first), NEXT]
        second = await talk.ask(with_clock(messages))
        return [first, second, await talk.ask([*messages, openai_message(second), NEXT])]

    first, second, third = asyncio.run(three())
    assert talk.sequences() == [[first.id, third.id], [second.id]]
    _, warning = talk.session.warnings
    assert warning.startswith(f"{third.id} does not continue {second.id}: message 1 (system) differs at character 28")


def test_warnings_of_one_kind_are_limited(tmp_path: Path) -> None:
    talk = Talk(tmp_path, lambda prompt: "hello<|im_end|>")

    async def clock() -> None:
        messages: list[Message] = [USER]
        for number in range(9):
            reply = await talk.ask([{"role": "system", "content": f"It is {number} o'clock."}, *messages])
            messages += [openai_message(reply), NEXT]

    asyncio.run(clock())
    warnings = talk.session.warnings
    assert len(warnings) == MAX_WARNINGS + 1
    assert warnings[-1] == "further warnings of this kind are not shown: a branch (system message)"
    marked = [each for each in talk.session.engine.interactions if "branch" in each.details]
    assert len(marked) == 8  # the record has all of them


def test_a_difference_shows_white_space_and_what_cannot_be_printed() -> None:
    assert excerpt("a b", "a\u00a0b") == r"at character 2: 'a b' became 'a\xa0b'"
    assert excerpt("ab", "ab ") == "at character 3: 'ab' became 'ab '"
    assert excerpt("a\x1b[2J", "\u202ea") == r"at character 1: 'a\x1b[2J' became '\u202ea'"
    before, after = excerpt("x" * 100 + "1" + "y" * 100, "x" * 100 + "2" + "y" * 100).split(" became ")
    assert before == f"at character 101: …'{'x' * 24}1{'y' * 23}'…"
    assert after == f"…'{'x' * 24}2{'y' * 23}'…"


def test_what_the_model_said_does_not_tell_two_kinds_of_warning_apart(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    said = [f"{each}<|im_end|>" for each in ("<tool_call>no", "<tool_call>call", f"{call} and", f"{call} so on")]
    talk = talk_to(tmp_path, *said)

    async def ask() -> None:
        for number in range(len(said)):
            await talk.ask([{"role": "user", "content": str(number)}], tools=[ADD])

    asyncio.run(ask())
    assert list(talk.session.engine.warnings.values()) == [
        *["has a tool call that cannot be read, which stays text"] * 2,
        *["has words after a tool call, which are left out"] * 2,
    ]
