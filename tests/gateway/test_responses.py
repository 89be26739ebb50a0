"""The Responses dialect, spoken by the `openai` package; its own types judge all that it is sent."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from clew.gateway import openai_responses
from clew.gateway.dialect import Refusal, ResponseFormat, Token
from tests.gateway.dialects import ID, Served, made

STREAM_EVENT = TypeAdapter(ResponseStreamEvent)
HELLO: dict[str, Any] = {"model": "m", "input": "Hi"}
WEATHER = {"type": "function", "name": "weather", "description": "Now.", "parameters": {"type": "object"}}
TIME = {"type": "function", "name": "time", "parameters": {}, "strict": True}
BUSY = made("Let me see.", reasoning="Which city?", tool_calls=[("weather", {"city": "Ulm"}), ("time", {})])


def client_of(served):
    return openai.AsyncOpenAI(api_key="k", base_url="http://gateway", http_client=served.http_client, max_retries=0)


def ask(*answers, **request):
    """One request; the client's answer, and what served it."""
    served = Served(openai_responses, *answers)

    async def one():
        async with client_of(served) as client:
            return await client.responses.create(**{**HELLO, **request})

    response = asyncio.run(one())
    for sent in served.responses:
        TypeAdapter(Response).validate_json(json.dumps(sent), strict=True)
    return response, served


def stream(*answers, **request):
    """One request; the last response of the stream, and what served it."""
    served = Served(openai_responses, *answers)

    async def one():
        async with client_of(served) as client:
            events: list[Any] = [
                event async for event in await client.responses.create(**{**HELLO, **request}, stream=True)
            ]
        return events[-1].response

    response = asyncio.run(one())
    for _, data in served.events:
        STREAM_EVENT.validate_json(json.dumps(data), strict=True)
    assert [data["sequence_number"] for _, data in served.events] == list(range(len(served.events)))
    return response, served


def test_a_response():
    asked_for = {"max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "u"}
    response, served = ask(made("Hello you."), instructions="Be kind.", **asked_for)
    assert (response.id, response.model, response.status) == (ID, "m", "completed")
    assert response.output_text == "Hello you."
    assert (response.created_at, response.completed_at) == (1e9, 1e9 + 2)
    assert response.usage and (response.usage.input_tokens, response.usage.output_tokens) == (3, 2)
    assert {name: getattr(response, name) for name in asked_for} == asked_for
    assert (response.instructions, response.tool_choice, response.tools) == ("Be kind.", "auto", [])
    [asked] = served.requests
    assert asked.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert asked.sampling == {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    assert (asked.template, asked.logprobs, asked.stream) == ({}, None, False)


@pytest.mark.parametrize("get", [ask, stream])
def test_a_response_that_was_cut_short(get):
    response, served = get(made("Hello", reasoning="So", finish_reason="length"))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    if served.events:
        assert served.names()[-1] == "response.incomplete"


def test_a_stream_event_by_event():
    whole, _ = ask(BUSY, tools=[WEATHER, TIME])
    response, served = stream(BUSY, tools=[WEATHER, TIME])
    same = {"created_at", "completed_at"}
    assert response.model_dump(exclude=same) == whole.model_dump(exclude=same)
    added, done, call = "output_item.added", "output_item.done", "function_call_arguments"
    part, part_done = "content_part.added", "content_part.done"
    assert [name.removeprefix("response.") for name in served.names()] == [
        *("created", "in_progress"),
        *(added, part, *["reasoning_text.delta"] * 2, "reasoning_text.done", part_done, done),
        *(added, part, *["output_text.delta"] * 3, "output_text.done", part_done, done),
        *(added, *[f"{call}.delta"] * 2, f"{call}.done", done),
        *(added, f"{call}.delta", f"{call}.done", done),
        "completed",
    ]
    assert served.events[0][1]["response"]["status"] == "in_progress"
    for index, item in enumerate(response.output):
        mine = [data for _, data in served.events if data.get("output_index") == index]
        assert {data.get("item_id", item.id) for data in mine} == {item.id}
        assert mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"]["status"] == "completed"


def test_the_clients_own_stream_puts_it_together():
    served = Served(openai_responses, BUSY)

    async def one():
        async with client_of(served) as client, client.responses.stream(**HELLO) as events:
            return await events.get_final_response()

    response = asyncio.run(one())
    assert (response.id, response.output_text) == (ID, "Let me see.")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


def said(*, reasoning=True):
    calls = [
        {"id": f"call_{ID}.0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}},
        {"id": f"call_{ID}.1", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    thought = {"reasoning_content": "Which city?"} if reasoning else {}
    return {"role": "assistant", "content": "Let me see.", **thought, "tool_calls": calls}


@pytest.mark.parametrize("get", [ask, stream])
@pytest.mark.parametrize("dump", [lambda item: item, lambda item: item.model_dump(exclude_none=True)])
def test_what_the_client_sends_back_is_what_the_template_takes(get, dump):
    response, _ = get(BUSY, tools=[WEATHER, TIME])
    first, second = response.output[2:]
    history = [
        {"role": "user", "content": "Hi"},
        *map(dump, response.output),
        {"type": "function_call_output", "call_id": first.call_id, "output": "sunny"},
        {"type": "function_call_output", "call_id": second.call_id, "output": [{"type": "input_text", "text": "9"}]},
        {"role": "developer", "content": "Hurry."},
    ]
    _, served = ask(made("Sunny."), tools=[WEATHER, TIME], input=history)
    assert served.requests[0].messages == [
        {"role": "user", "content": "Hi"},
        said(),
        {"role": "tool", "tool_call_id": first.call_id, "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": second.call_id, "name": "time", "content": "9"},
        {"role": "system", "content": "Hurry."},
    ]
    function = {"name": "weather", "description": "Now.", "parameters": {"type": "object"}}
    assert served.requests[0].tools[0] == {"type": "function", "function": function}


def test_reasoning_comes_back_from_a_client_that_keeps_only_its_encrypted_content():
    response, _ = ask(BUSY, include=["reasoning.encrypted_content"], store=False)
    thought, *rest = [item.to_dict() for item in response.output]
    without = {name: value for name, value in thought.items() if name != "content"}
    assert openai_responses.parse({**HELLO, "input": [without, *rest]}).messages == [said()]
    assert openai_responses.parse({**HELLO, "input": rest}).messages == [said(reasoning=False)]


def test_two_replies_in_a_row_stay_two_messages():
    items = [*made_items("One."), *made_items("Two.", reasoning="Why?"), *made_items("Three.")]
    assert openai_responses.parse({**HELLO, "input": items}).messages == [
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Why?"},
        {"role": "assistant", "content": "Three."},
    ]


def made_items(*reply, **parts):
    return openai_responses.respond(openai_responses.parse(HELLO), [made(*reply, **parts)])["output"]


@pytest.mark.parametrize("tokens", [("Hello", " you"), ("<think>", "Hello", " you")])
def test_logprobs(tokens):
    reply = made("Hello you", tokens=[Token(text=text, logprob=-0.5) for text in tokens])
    include = ["message.output_text.logprobs"]
    response, served = ask(reply, include=include)
    shown = response.output[0].content[0].logprobs
    assert [(each.token, each.logprob, each.top_logprobs) for each in shown] == [(text, -0.5, []) for text in tokens]
    assert served.requests[0].logprobs == 0
    _, served = stream(reply, include=include)
    deltas = [data for name, data in served.events if name == "response.output_text.delta"]
    assert "".join(data["delta"] for data in deltas) == "Hello you"
    assert [each["token"] for data in deltas for each in data["logprobs"]] == list(tokens)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "function", "name": "time"}}, {"tool_choice": "time"}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, {"template": {"enable_thinking": False}}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"template": {"enable_thinking": True}}),
        ({"top_logprobs": 2}, {"logprobs": 2}),
        ({"store": False, "service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s"}, {}),
        (
            {"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled", "conversation": None},
            {"response_format": None},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": ResponseFormat(schema={"type": "object"}, param="text.format")},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}}},
            {"response_format": ResponseFormat(schema={"type": "array"}, param="text.format")},
        ),
    ],
)
def test_what_is_asked(fields, expected):
    asked = openai_responses.parse({**HELLO, "tools": [WEATHER, TIME], **fields})
    assert {name: getattr(asked, name) for name in expected} == expected
    response = openai_responses.respond(asked, [made("Hello")])
    TypeAdapter(Response).validate_json(json.dumps(response), strict=True)


def test_what_goes_on_from_an_earlier_response_is_only_what_is_new():
    output = {"type": "function_call_output", "call_id": "c", "output": "9"}
    asked = openai_responses.parse({**HELLO, "input": [output], "previous_response_id": ID, "instructions": "Go."})
    tool = {"role": "tool", "tool_call_id": "c", "content": "9"}
    assert asked.messages == [{"role": "system", "content": "Go."}, tool]
    assert (asked.follows, asked.extras["instructions"]) == (ID, "Go.")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "Field required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 3}, "input", "valid list, found '3'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "'item_reference' is not served here, only"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.image_url",
            "required",
        ),
        ({"input": [{"role": "user"}]}, "input.0.content", "Field required"),
        ({"input": [{"type": "reasoning", "id": "r", "encrypted_content": "?"}]}, "input", "is not from this server"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "Field required"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar' is not served here, only"),
        ({"tools": [{"type": "file_search"}]}, "tools.0", "'file_search' is not served here, only 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "the request has no tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "Field required"),
        ({"tool_choice": {"type": "hosted"}}, "tool_choice", "'hosted' is not served"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "should be 'auto', 'concise' or 'detailed'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"truncation": "middle"}, "truncation", "should be 'disabled' or 'auto'"),
        ({"background": True}, "background", "should be False"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"prompt": {"id": "p"}}, "prompt", "it changes the prompt"),
    ],
)
def test_what_is_refused(fields, param, words):
    with pytest.raises(Refusal, match=words) as caught:
        openai_responses.parse({**HELLO, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, openai.BadRequestError), (404, openai.NotFoundError), (429, openai.RateLimitError)],
)
def test_errors_arrive_as_the_clients_own(status, error):
    refusal = Refusal(status, "the engine's words", param="model", code="model_not_found")
    with pytest.raises(error, match="the engine's words") as caught:
        ask(refusal)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.APIError, match="the engine's words") as caught:
        stream(refusal)
    assert caught.value.code == "model_not_found"


def test_an_error_in_a_stream_is_an_event_of_it():
    name, data = openai_responses.refuse_in_stream(Refusal(503, "the engine is away"), 7).decode().split("\n")[:2]
    event = STREAM_EVENT.validate_json(data.removeprefix("data: "), strict=True)
    assert (name, event.type, event.sequence_number) == ("event: error", "error", 7)
