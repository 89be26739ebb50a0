"""Messages dialect, tested with the `anthropic` package, whose own types check everything that it receives."""

import asyncio

import anthropic
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from clew.gateway import anthropic_messages
from clew.gateway.dialect import Refusal
from tests.gateway.dialects import ID, Served, made

STREAM_EVENT = TypeAdapter(RawMessageStreamEvent)
HELLO = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {"name": "weather", "description": "Now.", "input_schema": {"type": "object", "properties": {}}}
TIME = {"name": "time", "input_schema": {"type": "object"}}


def client_of(served):
    return anthropic.AsyncAnthropic(
        api_key="k", base_url="http://gateway", http_client=served.http_client, max_retries=0
    )


def ask(*answers, **request):
    """Send one request; return the client's answer, and the application that served it."""
    served = Served(anthropic_messages, *answers)

    async def one():
        async with client_of(served) as client:
            return await client.messages.create(**{**HELLO, **request})

    message = asyncio.run(one())
    for response in served.responses:
        TypeAdapter(Message).validate_python(response, strict=True)
    return message, served


def stream(*answers, **request):
    """Stream one request; return the message that the client assembles, and the application that served it."""
    served = Served(anthropic_messages, *answers)

    async def one():
        async with client_of(served) as client, client.messages.stream(**{**HELLO, **request}) as events:
            return await events.get_final_message()

    message = asyncio.run(one())
    for name, data in served.events:
        if name != "ping":
            STREAM_EVENT.validate_python(data, strict=True)
    return message, served


def test_a_message():
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    message, served = ask(made("Hello you."), system="Be kind.", extra_body=sampling)
    assert message.id == ID and message.model == "m"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello you."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 2)
    [asked] = served.requests
    assert asked.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert asked.sampling == {"max_new_tokens": 50, **sampling}
    assert not asked.stream and asked.template == {}


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (made("a", finish_reason="length"), "max_tokens", None),
        (made("a", stop_string="END"), "stop_sequence", "END"),
        (made(tool_calls=[("time", {})]), "tool_use", None),
        (made(""), "end_turn", None),
    ],
)
def test_stop_reasons_are_the_same_in_a_stream(reply, reason, sequence):
    for message, served in (ask(reply, stop_sequences=["END"]), stream(reply, stop_sequences=["END"])):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert served.requests[0].sampling["stop"] == ("END",)


def test_a_stream_event_by_event():
    reply = made("Let me see.", reasoning="Which city?", tool_calls=[("weather", {"city": "Ulm"}), ("time", {})])
    whole, _ = ask(reply, tools=[WEATHER, TIME])
    message, served = stream(reply, tools=[WEATHER, TIME])
    assert message.to_dict() == whole.to_dict()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    start, stop = "content_block_start", "content_block_stop"
    delta = "content_block_delta"
    assert served.names() == [
        "message_start",
        *(start, "ping", delta, delta, delta, stop),  # two words and the signature
        *(start, delta, delta, delta, stop),
        *(start, delta, delta, delta, stop),  # "", then the arguments
        *(start, delta, delta, stop),
        *("message_delta", "message_stop"),
    ]
    begun = served.events[0][1]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["input_tokens"] == 3
    deltas = [data["delta"] for name, data in served.events if name == delta]
    assert [each["type"] for each in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta", "text_delta"),
        *["input_json_delta"] * 5,
    ]
    assert [data["index"] for name, data in served.events if name == start] == [0, 1, 2, 3]
    [last] = [data for name, data in served.events if name == "message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("get", [ask, stream])
def test_what_the_client_sends_back_is_what_the_template_takes(get):
    reply = made("Let me see.", reasoning="Which city?", tool_calls=[("weather", {"city": "Ulm"}), ("time", {})])
    said, _ = get(reply, tools=[WEATHER, TIME])
    first, second = said.content[2:]
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": second.id, "content": "no clock", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    history = [*HELLO["messages"], {"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    _, served = ask(made("Sunny."), tools=[WEATHER, TIME], messages=history)
    assert served.requests[0].messages == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Which city?",
            "tool_calls": [
                {"id": first.id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}},
                {"id": second.id, "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": first.id, "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": second.id, "name": "time", "content": "no clock", "is_error": True},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "Now.", "parameters": WEATHER["input_schema"]}
    assert served.requests[0].tools[0] == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "tool", "name": "time"}}, {"tool_choice": "time"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"template": {"enable_thinking": True}}),
        ({"thinking": {"type": "adaptive"}}, {"template": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"template": {"enable_thinking": False}}),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}, {}),
        ({"container": None, "temperature": None, "output_config": {"effort": "high"}}, {"template": {}}),
        (
            {"system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]},
            {"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_what_is_asked(fields, expected):
    parsed = anthropic_messages.parse({**HELLO, "tools": [WEATHER, TIME], **fields})
    assert {name: getattr(parsed, name) for name in expected} == expected


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks):
    return {"messages": [{"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "go on"}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "Field required"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, found '0'"),
        ({"max_tokens": "9"}, "max_tokens", "valid integer, found '9'"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0", "'robot' is not served here, only"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid list"),
        ({"messages": [{"role": "assistant", "content": "The"}]}, "messages", "there is no prefilling"),
        (user({"type": "image", "source": {}}), "messages.0.content.0.source.type", "Field required"),
        (user({"type": "text"}), "messages.0.content.0.text", "Field required"),
        (user({"type": "document"}), "messages.0.content.0", "'document' is not served"),
        (assistant({"type": "redacted_thinking", "data": "x"}), "messages.0.content.0", "'redacted_thinking' is not"),
        (assistant({"type": "text", "text": "a", "citations": [{}]}), "messages.0.content.0.citations", "at most 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type", "only 'custom'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "requires a tool call"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TIME]}, "tool_choice", "'x', which is not among"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "not served"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "Field required"),
        ({"mcp_servers": []}, "mcp_servers", "it changes the prompt"),
    ],
)
def test_what_is_refused(fields, param, words):
    with pytest.raises(Refusal, match=words) as caught:
        anthropic_messages.parse({**HELLO, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (413, anthropic.RequestTooLargeError, "request_too_large"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (503, anthropic.ServiceUnavailableError, "overloaded_error"),
    ],
)
def test_errors_arrive_as_the_clients_own(status, error, kind):
    with pytest.raises(error, match="the engine's words") as caught:
        ask(Refusal(status, "the engine's words"))
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "the engine's words"}}
    if status != 413:  # the package has no type for this body
        TypeAdapter(ErrorResponse).validate_python(caught.value.body, strict=True)
    with pytest.raises(anthropic.APIStatusError, match="the engine's words"):
        stream(Refusal(status, "the engine's words"))


def test_counting_tokens_asks_for_the_same_messages():
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    assert anthropic_messages.parse_count(body).messages == anthropic_messages.parse(HELLO).messages
    with pytest.raises(Refusal, match="max_tokens"):
        anthropic_messages.parse_count(HELLO)


def test_the_list_of_models():
    page = anthropic_messages.models(["a", "b"])
    assert [TypeAdapter(ModelInfo).validate_python(model).id for model in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
