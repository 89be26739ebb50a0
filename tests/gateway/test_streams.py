"""Words come while the model is still speaking: over real sockets, with the providers' own streaming clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from clew.gateway.agent_session import Limits
from clew.gateway.dialect import Delta
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.output_parser import Part, Reader, parse_output
from clew.gateway.reply_so_far import Decoder, Draft, Transcript
from tests.gateway.chatml import CHATML, chatml_tokenizer, odd_ids
from tests.gateway.spoken import Spoken, session_on

USER: Any = {"role": "user", "content": "What is the answer?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = "<think>\nhm, 1 < 2\n</think>\n\nI ask: the café\n\n<tool_call>\n" + (
    '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
)
BEFORE_THE_CALL = SAID.index("\n\n<tool_call>")


class Halting:
    """A gateway whose model says `SAID`, and waits in the midst until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.engine = Spoken(chatml_tokenizer(folder), lambda prompt: SAID)
        self.engine.speaks = self.speak
        self.halt_at = len(odd_ids(self.engine.tokenizer, SAID[:BEFORE_THE_CALL]))
        self.gateway = GatewayThread(Limits())
        self.key, self.session = self.gateway.open(session_on(self.engine))
        self.may_go_on = asyncio.Event()

    async def speak(self, number: int) -> None:
        if number == self.halt_at:
            await asyncio.wait_for(self.may_go_on.wait(), 20)

    def go_on(self) -> None:
        self.gateway.loop.call_soon_threadsafe(self.may_go_on.set)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=self.key, max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        url = self.gateway.base_url.removesuffix("/v1")
        return anthropic.AsyncAnthropic(base_url=url, api_key=self.key, max_retries=0)


@pytest.fixture
def halting(tmp_path: Path) -> Iterator[Halting]:
    made = Halting(tmp_path)
    yield made
    made.go_on()
    made.gateway.stop()


async def _chat(halting: Halting, heard: Callable[[str, str], None]) -> tuple[str, str, list[Any]]:
    reasoning = ""
    async with (
        halting.openai() as client,
        client.chat.completions.stream(model="x", messages=[USER], tools=[ADD]) as stream,
    ):
        async for event in stream:
            if event.type != "chunk" or not event.chunk.choices:
                continue
            said = event.chunk.choices[0].delta
            thought = getattr(said, "reasoning_content", None) or ""
            reasoning += thought
            heard(thought, said.content or "")
        message = (await stream.get_final_completion()).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return reasoning, message.content or "", calls


async def _responses(halting: Halting, heard: Callable[[str, str], None]) -> tuple[str, str, list[Any]]:
    tool: Any = {"type": "function", **ADD["function"]}
    async with (
        halting.openai() as client,
        client.responses.stream(model="x", input="What is the answer?", tools=[tool]) as stream,
    ):
        numbers = []
        async for event in stream:
            numbers.append(event.sequence_number)
            kinds = {"response.reasoning_text.delta": (1, 0), "response.output_text.delta": (0, 1)}
            thought, said = kinds.get(event.type, (0, 0))
            delta = str(getattr(event, "delta", ""))
            heard(delta * thought, delta * said)
        response = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    items: dict[str, Any] = {item.type: item for item in response.output}
    assert list(items) == ["reasoning", "message", "function_call"]
    call = items["function_call"]
    return items["reasoning"].content[0].text, response.output_text, [(call.name, call.arguments)]


async def _messages(halting: Halting, heard: Callable[[str, str], None]) -> tuple[str, str, list[Any]]:
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    async with (
        halting.anthropic() as client,
        client.messages.stream(model="x", max_tokens=200, messages=[USER], tools=[tool]) as stream,
    ):
        async for event in stream:
            heard(*((event.thinking, "") if event.type == "thinking" else ("", "")))
            heard(*(("", event.text) if event.type == "text" else ("", "")))
        message = await stream.get_final_message()
    blocks: dict[str, Any] = {block.type: block for block in message.content}
    assert list(blocks) == ["thinking", "text", "tool_use"]
    assert message.usage.input_tokens > 0 and message.usage.output_tokens == len(
        halting.session.engine.interactions[0].output_ids
    )
    call = blocks["tool_use"]
    return blocks["thinking"].thinking, blocks["text"].text, [(call.name, json.dumps(call.input))]


@pytest.mark.parametrize("ask", [_chat, _responses, _messages])
def test_words_come_while_the_model_is_still_speaking(halting: Halting, ask: Any) -> None:
    """The model has not begun its call when all words before it are there, in parts, and nothing else."""
    thoughts: list[str] = []
    words: list[str] = []

    def heard(thought: str, word: str) -> None:
        thoughts.extend([thought] if thought else [])
        words.extend([word] if word else [])
        if "".join(words) == "I ask: the café":
            halting.go_on()

    assert asyncio.run(ask(halting, heard)) == ("hm, 1 < 2", "I ask: the café", [("add", '{"a": 1}')])
    assert halting.may_go_on.is_set() and len(words) > 5 and len(thoughts) > 3
    assert "".join(thoughts) == "hm, 1 < 2" and "".join(words) == "I ask: the café"
    [interaction] = halting.session.engine.interactions
    assert interaction.output_ids == odd_ids(halting.engine.tokenizer, SAID)
    assert halting.session.warnings == []


def test_logprobs_come_with_the_words(halting: Halting) -> None:
    """Each dialect that has logprobs gives one a token, with the words that it is a part of, before the model ends."""
    content = "I ask: the café"

    async def chat() -> list[tuple[str, list[Any]]]:
        heard = []
        asked: Any = {"model": "x", "messages": [USER], "tools": [ADD], "logprobs": True, "stream": True}
        async with halting.openai() as client:
            async for chunk in await client.chat.completions.create(**asked):
                choice = chunk.choices[0]
                if choice.delta.content:
                    assert choice.logprobs and choice.logprobs.content
                    heard.append((choice.delta.content, choice.logprobs.content))
                if "".join(words for words, _ in heard) == content:
                    halting.go_on()
        return heard

    async def responses() -> list[tuple[str, list[Any]]]:
        heard = []
        asked: Any = {"model": "x", "input": "hello", "include": ["message.output_text.logprobs"], "stream": True}
        tool: Any = {"type": "function", **ADD["function"]}
        async with halting.openai() as client:
            async for event in await client.responses.create(**asked, tools=[tool]):
                if event.type == "response.output_text.delta":
                    heard.append((event.delta, event.logprobs))
                if event.type == "response.output_text.done":
                    assert event.text == content and len(event.logprobs or ()) == sum(len(each) for _, each in heard)
                if "".join(words for words, _ in heard) == content:
                    halting.go_on()
        return heard

    for ask in (chat, responses):
        halting.may_go_on.clear()
        heard = asyncio.run(ask())
        assert halting.may_go_on.is_set() and len(heard) > 5
        tokens = [token for _, each in heard for token in each]
        assert {token.logprob for token in tokens} == {-0.25} and len(tokens) == len(content) + 1, "é is two tokens"
        assert all(words == "".join(token.token for token in each) or "é" in words for words, each in heard)


def test_logprobs_of_plain_completions_go_on_from_chunk_to_chunk(halting: Halting) -> None:
    halting.engine.script = lambda prompt: "hello<|im_end|>"
    halting.halt_at = 3

    async def ask() -> list[Any]:
        heard: list[Any] = []
        async with halting.openai() as client:
            async for chunk in await client.completions.create(model="x", prompt="a", logprobs=0, stream=True):
                heard += [chunk.choices[0].logprobs] if chunk.choices[0].text else []
                if len(heard) == 3:
                    halting.go_on()
        return heard

    heard = asyncio.run(ask())
    assert [logprobs.tokens for logprobs in heard] == [["h"], ["e"], ["l"], ["l"], ["o"]]
    assert [logprobs.text_offset for logprobs in heard] == [[0], [1], [2], [3], [4]]
    assert [logprobs.token_logprobs for logprobs in heard] == [[-0.25]] * 5


TWICE = SAID.replace("<|im_end|>", '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>')


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        ("chat/completions", {"messages": [USER], "tools": [ADD]}, '{"arguments":" 1}"}'),
        (
            "responses",
            {"input": "hello", "tools": [{"type": "function", **ADD["function"]}]},
            "response.function_call_arguments.delta",
        ),
        (
            "messages",
            {"max_tokens": 300, "messages": [USER], "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
            '"partial_json":" 1}"',
        ),
    ],
)
def test_a_call_comes_when_it_is_whole(halting: Halting, path: str, body: dict[str, Any], ends: str) -> None:
    """The model halts between two calls until the first has come; in the end both have, in order."""
    halting.engine.script = lambda prompt: TWICE
    halting.halt_at = len(odd_ids(halting.engine.tokenizer, TWICE[: TWICE.rindex("<tool_call>")]))

    async def ask() -> str:
        text = ""
        given = {"Authorization": f"Bearer {halting.key}"}
        url = f"{halting.gateway.base_url}/{path}"
        asked = {"model": "x", "stream": True, **body}
        async with aiohttp.ClientSession() as client, client.post(url, json=asked, headers=given) as response:
            async for line in response.content:
                text += line.decode()
                if ends in text and not halting.may_go_on.is_set():
                    assert '" 2}' not in text
                    halting.go_on()
        return text

    text = asyncio.run(ask())
    assert halting.may_go_on.is_set() and text.index('" 1}"') < text.index('" 2}"')
    [interaction] = halting.session.engine.interactions
    assert [call["function"]["arguments"] for call in interaction.details["reply"]["tool_calls"]] == [
        {"a": 1},
        {"a": 2},
    ]


def test_plain_completions_come_in_parts_and_each_choice_by_itself(halting: Halting) -> None:
    halting.engine.script = lambda prompt: "hello<stop>"
    halting.halt_at = 5

    async def ask() -> dict[int, str]:
        said = {0: "", 1: ""}
        async with halting.openai() as client:
            asked: Any = {"model": "x", "prompt": "hello", "n": 2, "max_tokens": 50, "stream": True, "stop": "<stop>"}
            async for chunk in await client.completions.create(**asked):
                for choice in chunk.choices:
                    said[choice.index] += choice.text
                if set(said.values()) == {"hello"}:
                    halting.go_on()
        return said

    assert asyncio.run(ask()) == {0: "hello", 1: "hello"}
    assert halting.may_go_on.is_set()


async def until(happened: Callable[[], bool]) -> None:
    """Another thread's doing."""
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never happened")


def test_a_client_that_leaves_in_mid_stream_gets_the_same_reply_when_it_retries(halting: Halting) -> None:
    async def leave_and_come_back() -> str:
        asked: Any = {"model": "x", "messages": [USER], "stream": True}
        async with halting.openai() as client:
            stream = await client.chat.completions.create(**asked)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            [request] = halting.session._submissions
            await until(lambda: request.abandoned)
            halting.go_on()
            again = await client.chat.completions.create(**asked)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in again])

    assert "I ask: the café" in asyncio.run(leave_and_come_back())
    assert [each.id for each in halting.session.engine.interactions] == ["g000000.e0.i0"]
    assert len(halting.engine.requests) == 1


def test_a_stream_that_nobody_reads_to_its_end_is_no_part_of_the_episode(halting: Halting) -> None:
    async def leave() -> None:
        async with halting.openai() as client:
            stream = await client.chat.completions.create(model="x", messages=[USER], stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            [request] = halting.session._submissions
            await until(lambda: request.abandoned)
            halting.go_on()
            await until(request.replies.done)
        await halting.gateway.close(halting.key)

    asyncio.run(leave())
    assert halting.session.engine.interactions == []
    [warning] = halting.session.engine.warnings
    assert "left before it had the whole reply g000000.e0.i0" in warning


def test_a_reply_that_the_conversation_goes_on_from_is_part_of_the_episode(halting: Halting) -> None:
    """The client leaves when it has the whole call, before the model has ended its turn."""
    halting.halt_at = len(odd_ids(halting.engine.tokenizer, SAID)) - 1

    async def leave_and_go_on() -> None:
        asked: Any = {"model": "x", "tools": [ADD]}
        async with halting.openai() as client:
            stream = await client.chat.completions.create(**asked, messages=[USER], stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.tool_calls:
                    break
            await stream.close()
            [request] = halting.session._submissions
            await until(lambda: request.abandoned)
            halting.go_on()
            await until(request.replies.done)
            message: Any = halting.session.engine.interactions[0].details["reply"]
            [call] = message["tool_calls"]
            call["function"] = {"name": "add", "arguments": json.dumps(call["function"]["arguments"])}
            result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
            await client.chat.completions.create(**asked, messages=[USER, message, result])
        await halting.gateway.close(halting.key)

    asyncio.run(leave_and_go_on())
    first, second = halting.session.engine.interactions
    assert second.details["follows"] == first.id


OUTPUTS = [
    "plain words, and no more",
    "<think>a</think>b",
    "<think>\n\na < b </thin </think>\n\n\nb\n\n",
    "<think>never closed\n\n",
    "  <think>after spaces</think>c",
    "  <thin is no thought",
    "a <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> tail <tool_call>{\"name\": \"g\"}</tool_call>",
    "a <tool_call>no call</tool_call> tail",
    "a <tool_cal and <tool_",
    '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
    '{"name" is no call',
    '<|python_tag|>{"name": "f", "parameters": {}}',
    "<|python_tag is nothing",
    " \n leading space",
    "ünïcödé 🙂 é 漢字 �",
    "ends with a space ",
    "",
]  # fmt: skip


Words = tuple[str, str, list[Any]]
"""Reasoning, content and calls."""


def words_of(parts: Iterable[Part]) -> Words:
    listed = list(parts)
    calls = [part.call for part in listed if part.call is not None]
    return "".join(part.reasoning for part in listed), "".join(part.content for part in listed), calls


@pytest.mark.parametrize("prompt", ["assistant\n", "assistant\n<think>\n"])
@pytest.mark.parametrize("tools", [[], [ADD]])
@pytest.mark.parametrize("said", OUTPUTS)
def test_however_it_is_cut_what_is_told_is_how_the_reply_begins(
    tokenizer: Any, said: str, tools: list[Any], prompt: str
) -> None:
    """Cut at each character, whatever follows; at the end all of it is told."""
    rest = random.Random(said)
    endings = ["", *("".join(rest.choices(said or "x", k=9)) for _ in range(3)), *OUTPUTS[1:12:2]]
    for place in range(len(said) + 1):
        begun = said[:place]
        cuts = sorted(rest.sample(range(place + 1), min(3, place)))
        reader = Reader(prompt, tools)
        told = [part for piece in cut(begun, cuts) for part in reader.feed(piece)]
        reasoning, content, calls = words_of(told)
        for ending in (said[place:], *endings):
            parsed = parse_output(tokenizer, begun + ending, begun + ending, prompt, tools)
            assert parsed.reasoning.startswith(reasoning) and parsed.content.startswith(content), (begun, ending)
            assert list(parsed.calls[: len(calls)]) == calls
            assert not (content or calls) or parsed.reasoning == reasoning
            assert not calls or parsed.content == content
        parsed = parse_output(tokenizer, said, said, prompt, tools)
        whole = words_of([*told, *reader.feed(said[place:], final=True)])
        assert whole == (parsed.reasoning, parsed.content, list(parsed.calls))
        assert (reader.unparsed, reader.left_out, reader.begins) == (parsed.unparsed, parsed.left_out, parsed.begins)
        if parsed.begins is not None:
            assert said[parsed.begins :].startswith(parsed.content)


def cut(text: str, places: list[int]) -> list[str]:
    return [text[first:last] for first, last in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize(
    ("said", "content", "calls", "left_out"),
    [
        ('a <tool_call>{"name": "f"}</tool_call> tail', "a", ["f"], " tail"),
        ('a <tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"', "a", ["f"], '\n<tool_call>{"name": "g"'),
        (
            'a <tool_call>{"name": </tool_call> b <tool_call>{"name": "g"}',
            'a <tool_call>{"name": </tool_call> b',
            ["g"],
            "",
        ),
        ("a <tool_call>no call</tool_call>  ", "a <tool_call>no call</tool_call>  ", [], ""),
        ('{"name": "f"}; {"name": "g"}', "", ["f", "g"], ""),
        ('{"name": "f"} and words', '{"name": "f"} and words', [], ""),
    ],
)
def test_a_call_stays_one_whatever_comes_after_it(
    tokenizer: Any, said: str, content: str, calls: list[str], left_out: str
) -> None:
    parsed = parse_output(tokenizer, said, said, "assistant\n", [ADD])
    assert (parsed.content, [name for name, _ in parsed.calls], parsed.left_out) == (content, calls, left_out)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


def test_stop_strings_and_what_may_become_one_are_kept_back(tokenizer: Any) -> None:
    told: list[Delta] = []
    draft = Draft(
        0,
        told.append,
        id="g000000.e0.i0",
        transcript=Transcript(tokenizer, "", logprobs=False),
        reader=Reader(None, ()),
        begin="",
        stops=("END", "<stop>"),
    )
    seen = []
    for token in odd_ids(tokenizer, "a E EN <st EN<stop>"):
        draft.add(token, -0.5)
        seen.append("".join(delta.content for delta in told))
    assert seen == [
        "a", "a ", "a ", "a E ", "a E ", "a E ", "a E EN ", "a E EN ", "a E EN ", "a E EN ", "a E EN <st ",
        "a E EN <st ", "a E EN <st ", "a E EN <st EN", "a E EN <st EN", "a E EN <st EN", "a E EN <st EN",
        "a E EN <st EN", "a E EN <st EN",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["ünïcödé", "🙂 and 漢字", "a � b", "<|im_start|>user<|im_end|> é", "hm é"])
def test_characters_come_whole(tokenizer: Any, text: str) -> None:
    decoder, ids = Decoder(tokenizer), odd_ids(tokenizer, text)
    parts = [decoder.add(token) for token in ids]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all(part in text for part in parts) and len(ids) > len([part for part in parts if part])


def test_a_prompt_of_megabytes_is_refused_and_holds_nobody_up(tmp_path: Path) -> None:
    engine = Spoken(chatml_tokenizer(tmp_path), lambda prompt: "hello<|im_end|>")
    gateway = GatewayThread(Limits())
    key, session = gateway.open(session_on(engine))
    long = "the answer is right, " * 100_000

    async def ask(context: int | None) -> tuple[float, str]:
        session.turns._context = context
        longest, ended = 0.0, asyncio.Event()

        async def beat() -> None:
            nonlocal longest
            while not ended.is_set():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        beating = asyncio.run_coroutine_threadsafe(beat(), gateway.loop)
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
            try:
                asked: Any = [{"role": "user", "content": long}]
                answer = await client.chat.completions.create(model="x", messages=asked)
                said = answer.choices[0].message.content or ""
            except openai.BadRequestError as error:
                said = str(error)
                assert (error.code, error.param) == ("context_length_exceeded", "messages")
        gateway.loop.call_soon_threadsafe(ended.set)
        await asyncio.wrap_future(beating)
        return longest, said

    began = time.monotonic()
    held_up, refused = asyncio.run(ask(4096))
    assert "the first 65536 of which alone are" in refused and "the model's context is 4096" in refused
    refused_in, began = time.monotonic() - began, time.monotonic()
    held_up, said = asyncio.run(ask(None))
    gateway.stop()
    took = time.monotonic() - began
    assert said == "hello" and len(engine.requests[0]) > 500_000
    assert refused_in < max(2, took / 3) and held_up < max(1, took / 3)  # a busy machine is slow at everything


@pytest.mark.parametrize(
    "call, expected",
    [
        ({"name": "add", "arguments": '{"a": 1}'}, ("add", {"a": 1})),
        ({"function": {"name": "add", "arguments": {}}}, ("add", {})),
        ({"name": "add", "arguments": '{"a": '}, None),
        ({"name": "add", "arguments": [1]}, None),
        ({"arguments": "{}"}, None),
        ({"name": None}, None),
        ({"function": "add"}, None),
    ],
)
def test_calls_that_a_response_template_finds_but_nobody_can_read_are_left_as_text(
    call: dict[str, Any], expected: tuple[str, dict[str, Any]] | None
) -> None:
    class Tokenizer:
        response_schema = response_template = "a template"

        def parse_response(self, raw: str, **_: Any) -> dict[str, Any]:
            return {"content": "", "tool_calls": [call]}

    tokenizer: Any = Tokenizer()
    parsed = parse_output(tokenizer, "said", "said", "", [ADD])
    assert list(parsed.calls) == ([expected] if expected else []) and bool(parsed.unparsed) is (expected is None)
    assert parsed.content == ("" if expected else "said")
