"""Fields that client libraries send unasked: what changes nothing is accepted with one warning, the rest is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import litellm
import openai
import pytest
import requests
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner
from langchain_openai import ChatOpenAI

from clew.gateway.episode_engine import WarningLog
from tests.gateway.spoken import session_on
from tests.gateway.test_as_clients_send import CHAT_TOOL, QUESTION, Told

OTHER_TOOL = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
SAID = "3<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


@pytest.fixture
def told(tmp_path: Path) -> Any:
    made = Told(tmp_path)
    yield made
    made.gateway.stop()


NEUTRAL: list[tuple[str, Any]] = [
    ("frequency_penalty", 0.0),
    ("presence_penalty", 0),
    ("repetition_penalty", 1.0),
    ("skip_special_tokens", False),
    ("logit_bias", {"17": 0}),
    ("length_penalty", 0.9),
    ("use_beam_search", False),
    ("prediction", {"type": "content", "content": "3"}),
]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_what_changes_nothing_is_accepted_with_one_warning_each(told: Told, path: str) -> None:
    told.says = [SAID] * 2
    asked = {"/chat/completions": {"messages": [QUESTION]}, "/completions": {"prompt": "1+2?"}}
    body = asked.get(path, {"input": "1+2?"}) | dict(NEUTRAL)
    told.post(path, body)
    told.post(path, body)
    for name, _ in NEUTRAL:
        [warning] = [warning for warning in told.session.warnings if f" {name}" in warning]
        assert warning.endswith("it has no effect and is ignored")
    assert [params.temperature for params in told.engine.params] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.3),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"17": 5}),
        ("use_beam_search", True),
        ("ignore_eos", True),
        ("continue_final_message", True),
        ("bad_words", ["3"]),
        ("stop_token_ids", [3]),
        ("guided_json", {}),
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_what_would_change_the_distribution_is_refused_by_name(told: Told, path: str, field: str, value: Any) -> None:
    asked = {"/chat/completions": {"messages": [QUESTION]}, "/completions": {"prompt": "1+2?"}}
    error = told.post(path, asked.get(path, {"input": "1+2?"}) | {field: value}, 400)["error"]
    assert error["param"] == field and field in error["message"]
    assert not told.engine.requests


def test_what_browser_use_sends_by_default_is_refused_with_how_to_set_it(told: Told) -> None:
    error = told.post("/chat/completions", {"messages": [QUESTION], "frequency_penalty": 0.3}, 400)["error"]
    assert error["message"].startswith("Cannot honour frequency_penalty=0.3: ")
    assert "Training needs 0." in error["message"]
    assert "ChatOpenAI(frequency_penalty=0) in browser-use" in error["message"]


def test_min_tokens_is_honoured(told: Told) -> None:
    told.says = [SAID]
    told.post("/chat/completions", {"messages": [QUESTION], "min_tokens": 2})
    assert told.engine.params[0].min_new_tokens == 2


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"messages": [QUESTION]}),
    ("/completions", {"prompt": "1+2?"}),
    ("/responses", {"input": "1+2?"}),
    ("/messages", {"messages": [QUESTION], "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_field_that_a_client_may_send_next_month_is_ignored_with_one_warning(
    told: Told, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    """Each session records it; the log of the process has it once, whatever its value."""
    logged = WarningLog(logging.getLogger("clew.gateway"))
    told.session.engine.resources = replace(told.session.engine.resources, on_warning=logged.add)
    told.says = [SAID] * 3
    for value in (1, 2):
        told.post(path, {**body, "foresight": value})
    first = told.session.warnings
    told.key, told.session = told.gateway.open(session_on(told.engine, "g000001.e0"))
    told.session.engine.resources = replace(told.session.engine.resources, on_warning=logged.add)
    told.post(path, {**body, "foresight": {"far": True}})
    assert first == told.session.warnings == ["the client sends foresight: it has no effect and is ignored"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "field"), [("/responses", "top_k"), ("/messages", "seed"), ("/completions", "tools"), ("/messages", "n")]
)
def test_a_field_that_only_another_endpoint_honours_is_refused(told: Told, path: str, field: str) -> None:
    error = told.post(path, {**dict(BODIES)[path], field: 1}, 400)["error"]
    assert error["message"].startswith(f"Cannot honour {field}: it is a setting of another endpoint, not of this one")


def test_a_hundred_unknown_fields_hide_none_that_is_refused(told: Told) -> None:
    body = {"messages": [QUESTION], **{f"new{number}": 0 for number in range(200)}, "frequency_penalty": 0.3}
    assert told.post("/chat/completions", body, 400)["error"]["param"] == "frequency_penalty"


def test_keys_that_frameworks_add_to_messages_are_ignored_with_one_warning_each(told: Told) -> None:
    told.says = [CALL, SAID, SAID]
    user = {**QUESTION, "id": "msg_1", "timestamp": 17, "metadata": {"a": 1}}
    first = told.post("/chat/completions", {"messages": [user], "tools": [CHAT_TOOL]})
    said = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3", "is_error": False}
    told.post("/chat/completions", {"messages": [user, said, result], "tools": [CHAT_TOOL]})
    assert told.sequences() == [[0, 1]]
    assert told.session.warnings == [
        "the client adds 'id' to user messages: the model does not see it",
        "the client adds 'timestamp' to user messages: the model does not see it",
        "the client adds 'metadata' to user messages: the model does not see it",
        "the client adds 'is_error' to tool messages: the model does not see it",
    ]
    items = [{"role": "user", "content": "1+2?", "created": 1}]
    told.post("/responses", {"input": items})
    assert told.session.warnings[-1] == "the client adds 'created' to user messages: the model does not see it"


def test_keys_that_are_added_to_an_object_without_a_type_are_named_with_words(told: Told) -> None:
    told.says = [SAID]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}", "parsed": 1}}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    told.post("/chat/completions", {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}, result]})
    assert told.session.warnings == ["the client adds 'parsed' to called function: the model does not see it"]


def test_keys_that_frameworks_add_to_claudes_messages(told: Told) -> None:
    told.says = [SAID]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3", "name": "add"}
    told.post("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [result], "id": "m"}]})
    assert told.session.warnings == [
        "the client adds 'id' to user messages: the model does not see it",
        "the client adds 'name' to tool_result: the model does not see it",
    ]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(told: Told) -> None:
    told.says = [SAID, SAID, '{"a": 1, "b": 2}}\n</tool_call><|im_end|>', SAID]
    body = {"messages": [QUESTION], "tools": [CHAT_TOOL, OTHER_TOOL]}
    told.post("/chat/completions", {**body, "tool_choice": allowed("auto", "sub", "add")})
    assert '"add"' in told.prompt() and '"sub"' in told.prompt()
    told.post("/chat/completions", {**body, "tool_choice": allowed("auto", "add")})
    assert '"add"' in told.prompt() and '"sub"' not in told.prompt()
    forced = told.post("/chat/completions", {**body, "tool_choice": allowed("required", "add")})
    assert forced["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    refused = told.post("/chat/completions", {**body, "tool_choice": allowed("auto", "mul")}, 400)["error"]
    assert refused["param"] == "tool_choice" and "'mul'" in refused["message"]
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    tools = [{"type": "function", **tool["function"]} for tool in (CHAT_TOOL, OTHER_TOOL)]
    answer = told.post("/responses", {"input": "1+2?", "tools": tools, "tool_choice": flat})
    assert answer["tool_choice"] == flat and '"sub"' not in told.prompt()
    assert told.session.warnings[:2] == [
        "the client sends tool_choice allowed_tools with all tools: it has no effect and is ignored",
        "the client sends tool_choice allowed_tools: the model is told only of the allowed tools",
    ]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_token_ids_are_answered_as_vllm_answers_them(told: Told, path: str) -> None:
    told.says = [SAID] * 4
    body: dict[str, Any] = {"messages": [QUESTION]} if path == "/chat/completions" else {"prompt": "1+2?"}
    assert "token_ids" not in str(told.post(path, {**body, "n": 1}))
    answer = told.post(path, {**body, "n": 2, "return_token_ids": True})
    _, first, second = told.session.engine.interactions
    assert [choice["token_ids"] for choice in answer["choices"]] == [first.output_ids, second.output_ids]
    holder = answer if path == "/chat/completions" else answer["choices"][1]
    assert holder["prompt_token_ids"] == first.input_ids
    url, headers = told.gateway.base_url + path, {"Authorization": f"Bearer {told.key}"}
    asked = {"model": "x", **body, "return_token_ids": True, "stream": True}
    chunks = events(requests.post(url, json=asked, headers=headers, timeout=60).text)
    last = told.session.engine.interactions[-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == last.output_ids
    opened = [chunk if path == "/chat/completions" else chunk["choices"][0] for chunk in chunks]
    assert opened[0]["prompt_token_ids"] == last.input_ids
    assert not any("prompt_token_ids" in each for each in opened[1:])


def test_alternatives_to_the_sampled_token_are_refused_by_the_right_field(told: Told) -> None:
    error = told.post("/completions", {"prompt": "1+2?", "logprobs": 1}, 400)["error"]
    assert error["param"] == "logprobs" and "Set logprobs=0." in error["message"]
    error = told.post("/chat/completions", {"messages": [QUESTION], "logprobs": True, "top_logprobs": 2}, 400)["error"]
    assert error["param"] == "top_logprobs" and "Set top_logprobs=0." in error["message"]
    error = told.post("/chat/completions", {"messages": [QUESTION], "top_logprobs": 2}, 400)["error"]
    assert error["param"] == "top_logprobs" and "needs logprobs=true" in error["message"]


def test_what_real_clients_send_with_neutral_settings(told: Told) -> None:
    """openai, litellm, langchain and openai-agents, each with its penalties at 0."""
    told.says = [SAID] * 4
    url, key = told.gateway.base_url, told.key
    zero: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0.0}

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            extra = {"repetition_penalty": 1.0, "skip_special_tokens": True}
            completions: Any = client.chat.completions
            one = await completions.create(model="x", messages=[QUESTION], extra_body=extra, **zero)
            two: Any = await litellm.acompletion(
                "openai/x", messages=[QUESTION], api_base=url, api_key=key, num_retries=0, **zero
            )
            chat: Any = ChatOpenAI
            three = await chat(model="x", base_url=url, api_key=key, max_retries=0, **zero).ainvoke("1+2?")
            model = OpenAIChatCompletionsModel("x", openai_client=client)
            agent = Agent(name="a", model=model, model_settings=ModelSettings(**zero))
            four = await Runner.run(agent, "1+2?", run_config=RunConfig(tracing_disabled=True))
            return [one.choices[0].message.content, two.choices[0].message.content, three.content, four.final_output]

    assert asyncio.run(ask()) == ["3"] * 4
    assert any("frequency_penalty=0" in warning for warning in told.session.warnings)
    assert any("repetition_penalty=1.0" in warning for warning in told.session.warnings)


@pytest.mark.parametrize("calls", ["as Hermes", "in another form"])
def test_one_call_at_most_has_no_effect_where_no_tool_is_shown(told: Told, calls: str) -> None:
    if calls == "in another form":
        template = str(told.engine.tokenizer.chat_template)
        told.engine.tokenizer.chat_template = template.replace("tool_call>", "call>")
    said = "I write </tool_call> and go on"
    told.says = [f"{said}<|im_end|>"]
    body = {"messages": [QUESTION], "tools": [CHAT_TOOL], "tool_choice": "none", "parallel_tool_calls": False}
    assert told.post("/chat/completions", body)["choices"][0]["message"]["content"] == said
    assert told.engine.params[0].stop == ()
