"""Requests in which frameworks and agents differ from the providers' own clients, as they came over the wire when
run by hand, shortened: @ai-sdk/openai 3.0.141, @openai/agents 0.20.0, smolagents 1.26.0, crewai 1.15.30, autogen 0.7.5,
instructor 1.17.0, @anthropic-ai/sdk 1.12.0 (tool runner), Claude Code 2.1.330, Codex 0.169.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from clew.gateway.agent_session import Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.sequences import aligned, assemble
from tests.gateway.chatml import CHATML, THINKING, chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on

Body = dict[str, Any]

CALLS = "\n".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>' for a, b in ((1, 2), (3, 4))
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
CLAUDE_TOOL = {"name": "add", "description": "adds", "input_schema": SCHEMA}
QUESTION = {"role": "user", "content": "1+2?"}


class Told:
    """A session reached over HTTP, whose model gives the answers in `says`, one after the other."""

    def __init__(self, folder: Path, template: str = CHATML, context: int | None = None) -> None:
        self.engine = Spoken(chatml_tokenizer(folder, template), lambda prompt: self.says.pop(0))
        self.says: list[str] = []
        self.gateway = GatewayThread(Limits())
        session = session_on(self.engine)
        session.resources = replace(session.resources, context=context)
        self.key, self.session = self.gateway.open(session)

    def post(self, path: str, body: Body, status: int = 200) -> Body:
        url = self.gateway.base_url + path
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = requests.post(url, json={"model": "policy", **body}, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    def prompt(self) -> str:
        """Return the prompt that the model received last."""
        return str(self.engine.tokenizer.decode(self.engine.requests[-1], skip_special_tokens=False))

    def sequences(self) -> list[list[int]]:
        """Indices of the interactions of each sequence; exactly what was generated is trained on."""
        chains = assemble(self.session.engine.interactions)
        for chain in chains:
            columns = aligned(chain)
            generated = [id for each in chain for id in each.output_ids]
            assert columns["input_ids"][columns["loss_mask"]].tolist() == generated
        return [[each.index for each in chain] for chain in chains]


@pytest.fixture
def told(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Told]:
    made = Told(tmp_path, **getattr(request, "param", {}))
    yield made
    made.gateway.stop()


@pytest.mark.parametrize("told", [{"template": THINKING}], indirect=True)
def test_items_that_are_named_by_their_ids(told: Told) -> None:
    """@ai-sdk/openai refers by ID to the reasoning and messages that it had stored, and sends calls in full."""
    told.says = [f"<think>\nhm\n</think>\n\nI add:\n{CALLS}<|im_end|>", "3<|im_end|>", "more<|im_end|>"]
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}
    asked = [{"role": "developer", "content": "Be good."}, QUESTION]
    first = told.post("/responses", {"input": asked, "tools": [tool], "tool_choice": "auto"})
    thought, said, *calls = first["output"]
    items = [{"type": "item_reference", "id": thought["id"]}, {"type": "item_reference", "id": said["id"]}]
    items += [{key: call[key] for key in ("type", "call_id", "name", "arguments")} for call in calls]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "3"} for call in calls]
    second = told.post("/responses", {"input": [*asked, *items, *results], "tools": [tool]})
    assert told.sequences() == [[0, 1]] and told.session.warnings == []
    named = [{"type": "item_reference", "id": call["id"]} for call in calls]
    answer = {"type": "item_reference", "id": second["output"][0]["id"]}
    told.post("/responses", {"input": [*asked, *items[:2], *named, *results, answer], "tools": [tool]})
    assert told.sequences() == [[0, 1, 2]]


CODEX = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "prompt_cache_key": "0",
    "client_metadata": {"turn_id": "1"},
    "tools": [
        {"type": "function", "name": "exec_command", "description": "runs", "strict": False, "parameters": SCHEMA},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Sub-agents.",
            "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": SCHEMA}],
        },
        {"type": "web_search", "external_web_access": True},
    ],
}


@pytest.mark.parametrize("told", [{"template": THINKING}], indirect=True)
def test_codex(told: Told) -> None:
    """Codex sends two system messages, tools in a namespace, a provider's tool, and reasoning without its ID."""
    call = '<tool_call>\n{"name": "agents.spawn", "arguments": {"a": 1}}\n</tool_call>'
    told.says = [f"<think>\nhm\n</think>\n\nI ask.\n{call}<|im_end|>", "3<|im_end|>"]
    asked = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
        for text in ("You are a coding agent.", "You have skills.")
    ]
    asked.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+2?"}]})
    first = told.post("/responses", {**CODEX, "input": asked})
    assert told.prompt().startswith("<|im_start|>system\nYou are a coding agent.\n\nYou have skills.\n<tools>\n")
    thought, said, made = first["output"]
    assert (made["namespace"], made["name"]) == ("agents", "spawn")
    assert [tool["type"] for tool in first["tools"]] == ["function", "namespace", "web_search"]
    items = [{key: item[key] for key in item if key not in ("id", "status")} for item in (thought, said, made)]
    items[0]["content"] = None
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "done"}
    told.post("/responses", {**CODEX, "input": [*asked, *items, result]})
    assert told.sequences() == [[0, 1]]
    [warning] = told.session.warnings
    assert warning == "the client offers web_search, a built-in tool of the provider: the model does not see it"


def test_a_schema_of_the_text_where_a_tool_is_forced(told: Told) -> None:
    """instructor asks for both; the reply is a call, and no text."""
    told.says = ['{"a": 1, "b": 2}}\n</tool_call><|im_end|>']
    tool = {"type": "function", "name": "add", "parameters": SCHEMA}
    form = {"format": {"type": "json_schema", "name": "add", "schema": SCHEMA}}
    choice = {"type": "function", "name": "add"}
    answer = told.post("/responses", {"input": "1+2?", "tools": [tool], "tool_choice": choice, "text": form})
    assert answer["output"][0]["arguments"] == '{"a": 1, "b": 2}'
    assert told.engine.params[-1].json_schema is None and told.session.warnings == []


@pytest.mark.parametrize("id", ["msg_g9.e0.i0", "rs_g9.e0.i0", "fc_g9.e0.i0.0", "fc_1", "nothing", ""])
def test_an_item_of_that_id_is_unknown_here(told: Told, id: str) -> None:
    answer = told.post("/responses", {"input": [QUESTION, {"type": "item_reference", "id": id}]}, 404)
    assert "in this session" in answer["error"]["message"]


def test_an_item_that_the_response_did_not_have(told: Told) -> None:
    told.says = ["hello<|im_end|>"]
    first = told.post("/responses", {"input": "1+2?"})
    named = {"type": "item_reference", "id": f"rs_{first['id']}"}
    answer = told.post("/responses", {"input": [QUESTION, named]}, 404)
    assert f"no item 'rs_{first['id']}' in this session" in answer["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_parts_that_have_what_the_whole_message_had(told: Told, streamed: bool) -> None:
    """@openai/agents over chat completions puts the fields of the message into its text."""
    told.says = [f"I add:\n{CALLS}<|im_end|>", "3<|im_end|>"]
    first = told.post("/chat/completions", {"messages": [QUESTION], "tools": [CHAT_TOOL]})
    message = first["choices"][0]["message"]
    kept = {"annotations": []} if streamed else {name: message[name] for name in message if name != "content"}
    text = {**kept, "type": "text", "text": message["content"]}
    back = {"role": "assistant", "content": [text], "tool_calls": message["tool_calls"], "images": []}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
    told.post("/chat/completions", {"messages": [QUESTION, back, *results], "tools": [CHAT_TOOL]})
    assert told.sequences() == [[0, 1]] and told.session.warnings == []


@pytest.mark.parametrize("told", [{"template": THINKING}], indirect=True)
def test_reasoning_under_its_other_name(told: Told) -> None:
    told.says = [f"<think>\nhm\n</think>\n\n{CALLS}<|im_end|>", "3<|im_end|>"]
    first = told.post("/chat/completions", {"messages": [QUESTION], "tools": [CHAT_TOOL]})
    message = first["choices"][0]["message"]
    back = {**message, "reasoning": message["reasoning_content"], "reasoning_details": [{}]}
    del back["reasoning_content"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
    told.post("/chat/completions", {"messages": [QUESTION, back, *results], "tools": [CHAT_TOOL]})
    assert told.sequences() == [[0, 1]] and told.session.warnings == []


def test_a_client_that_writes_on_where_a_stop_string_ended_the_model(told: Told) -> None:
    """smolagents' CodeAgent stops at </code>, puts it back, and appends the call that it made from the code."""
    told.says = ["Thought: I add.\n<code>\nprint(1 + 2)\n</code>"] * 3
    stop = ["Observation:", "Calling tools:", "</code>"]
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "New task:\n1+2?"}]}]
    for _ in range(3):
        answer = told.post("/chat/completions", {"messages": messages, "stop": stop})
        said = answer["choices"][0]["message"]["content"]
        assert said == "Thought: I add.\n<code>\nprint(1 + 2)\n"
        said += "</code>\nCalling tools:\n[{'id': 'call_1', 'type': 'function'}]"
        messages.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
        messages.append({"role": "user", "content": [{"type": "text", "text": "Observation:\n3"}]})
    assert told.sequences() == [[0, 1, 2]] and told.session.warnings == []
    assert told.prompt().count("</code>\nCalling tools:\n[{'id'") == 2


def test_a_text_that_goes_on_after_its_completion(told: Told) -> None:
    """Search agents without a chat template stop at </search>, put it back, and append what was found."""
    told.says = ["<search>1+2</search>", "<search>3+4</search>", "7<|im_end|>", "Thanks.<|im_end|>"]
    prompt = "1+2+4?\n"
    for found in ("3", "7"):
        answer = told.post("/completions", {"prompt": prompt, "max_tokens": 100, "stop": ["</search>"]})
        assert answer["choices"][0]["text"].endswith(("<search>1+2", "<search>3+4"))
        prompt += answer["choices"][0]["text"] + f"</search><found>{found}</found>\n"
    prompt += told.post("/completions", {"prompt": prompt})["choices"][0]["text"]
    assert told.sequences() == [[0, 1, 2]]
    told.post("/completions", {"prompt": f"{prompt}\n"})  # without the end token, which the client never saw
    assert told.sequences() == [[0, 1, 2], [3]]
    (warning,) = told.session.warnings
    assert "i3 does not continue" in warning and "7<|im_end|>' became" in warning
    follows = [each.details.get("follows") for each in told.session.engine.interactions]
    assert follows == [None, *(each.id for each in told.session.engine.interactions[:3])]


def test_a_text_that_does_not_keep_its_completion_is_a_branch(told: Told) -> None:
    """An agent with one growing text strips the completion, or cuts off what the model went on to imagine."""
    told.says = [" I must add.\n<|im_end|>", "Thought: 3\nObservation: 4<|im_end|>", "Done<|im_end|>", "No.<|im_end|>"]
    begin = "1+2?\nThought:"
    prompt = f"{begin} I must add.\nObservation: 3\n"
    for text in (begin, prompt, f"{prompt}Thought: 3\nObservation: 3\n", f"{begin}Another question?"):
        told.post("/completions", {"prompt": text, "max_tokens": 100})
    assert told.sequences() == [[0], [1], [2], [3]]
    branches = [each.details.get("branch") for each in told.session.engine.interactions]
    ids = [each.id for each in told.session.engine.interactions]
    assert [each and each["of"] for each in branches] == [None, ids[0], ids[1], None]
    whole, new = (len(told.engine.tokenizer(text)["input_ids"]) for text in (prompt, "\nObservation: 3\n"))
    assert branches[1] is not None and branches[1]["tokens"] == whole - new
    assert len(told.session.warnings) == 2


def test_a_text_goes_on_after_the_one_of_two_completions_whose_tokens_it_keeps(told: Told) -> None:
    told.says = ["<search>1</search>", "<search>1<|im_end|>", "2<|im_end|>"]
    prompt = "1+1?\n"
    told.post("/completions", {"prompt": prompt, "n": 2, "max_tokens": 100, "stop": ["</search>"]})
    told.post("/completions", {"prompt": f"{prompt}<search>1</search>\n"})
    texts = [[told.session.engine.interactions[turn].text for turn in turns] for turns in told.sequences()]
    assert ["<search>1</search>", "2"] in [[text.removesuffix("<|im_end|>") for text in each] for each in texts]


def test_a_client_that_stops_at_the_end_of_a_call_by_itself(told: Told) -> None:
    """</tool_call> is a stop string like any other if there are no tools."""
    told.says = ['<tool_call>\n{"name": "add"}\n</tool_call>'] * 2
    messages: list[Body] = [QUESTION]
    for _ in range(2):
        answer = told.post("/chat/completions", {"messages": messages, "stop": ["</tool_call>"]})
        said = answer["choices"][0]["message"]["content"]
        assert said == '<tool_call>\n{"name": "add"}\n'
        messages += [{"role": "assistant", "content": f"{said}</tool_call>"}, {"role": "user", "content": "3"}]
    assert told.sequences() == [[0, 1]] and told.session.warnings == []


def test_a_client_that_writes_the_models_words_anew(told: Told) -> None:
    """crewai keeps a message's calls, but drops its text."""
    told.says = [f"I add:\n{CALLS}<|im_end|>", "3<|im_end|>"]
    first = told.post("/chat/completions", {"messages": [QUESTION], "tools": [CHAT_TOOL]})
    message = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
    back = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
    told.post("/chat/completions", {"messages": [QUESTION, back, *results], "tools": [CHAT_TOOL]})
    assert told.sequences() == [[0], [1]]
    [warning] = told.session.warnings
    assert f"does not continue {first['id']}: message 2 (assistant) is not what the model said: it differs" in warning
    assert "'I add:' became ''" in warning


def test_another_answer_to_the_same_messages_is_not_the_models_words_anew(told: Told) -> None:
    told.says = ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    told.post("/chat/completions", {"messages": [QUESTION]})
    told.post("/chat/completions", {"messages": [QUESTION]})
    for said in ("one", "two"):
        messages = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "more?"}]
        told.says = ["three<|im_end|>"]
        told.post("/chat/completions", {"messages": messages})
    assert told.sequences() == [[0, 2], [1, 3]] and told.session.warnings == []


def test_a_client_that_offers_other_tools_in_mid_conversation(told: Told) -> None:
    """autogen asks for the final answer without tools, which most templates put before the messages."""
    told.says = [f"{CALLS}<|im_end|>", "3<|im_end|>"]
    first = told.post("/chat/completions", {"messages": [QUESTION], "tools": [CHAT_TOOL]})
    message = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
    told.post("/chat/completions", {"messages": [QUESTION, message, *results]})
    assert told.sequences() == [[0], [1]]
    [warning] = told.session.warnings
    assert f"does not continue {first['id']}: the client offers other tools (add before, none now). A new" in warning


@pytest.mark.parametrize("told", [{"template": THINKING}], indirect=True)
def test_a_template_that_drops_reasoning_which_the_client_sent_is_told_from_a_client_that_drops_it(told: Told) -> None:
    told.says = ["<think>\nhm\n</think>\n\n3<|im_end|>", "more<|im_end|>", "more<|im_end|>"]
    first = told.post("/chat/completions", {"messages": [QUESTION]})
    message = first["choices"][0]["message"]
    more = {"role": "user", "content": "more?"}
    told.post("/chat/completions", {"messages": [QUESTION, message, more]})
    other = {"role": "user", "content": "other?"}
    told.post("/chat/completions", {"messages": [QUESTION, {"role": "assistant", "content": "3"}, other]})
    by_template, by_client = told.session.warnings
    assert f"the chat template does not keep {first['id']} as the model wrote it; its text differs" in by_template
    assert "(the client sends no reasoning back)" in by_client


THREAD = {"max_tokens": 500, "stream": False}


def test_a_thread_of_anthropics_tool_runner(told: Told) -> None:
    """The runner sends the system prompt and the tools once, then only new messages."""
    told.says = [f"I add:\n{CALLS}<|im_end|>", "3<|im_end|>", "more<|im_end|>"]
    create = {"thread": {"type": "create"}, "system": "Be good.", "tools": [{**CLAUDE_TOOL, "type": "custom"}]}
    first = told.post("/messages", {**THREAD, **create, "messages": [QUESTION]})
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "3"} for call in calls]
    went_on = {"thread": {"type": "continue", "previous_message_id": first["id"]}}
    second = told.post("/messages", {**THREAD, **went_on, "messages": [{"role": "user", "content": results}]})
    assert second["content"][0]["text"] == "3"
    went_on = {"thread": {"type": "continue", "previous_message_id": second["id"]}}
    choice = {"tool_choice": {"type": "auto"}}
    told.post("/messages", {**THREAD, **went_on, **choice, "messages": [{"role": "user", "content": "more?"}]})
    assert told.sequences() == [[0, 1, 2]] and told.session.warnings == []
    assert told.prompt().startswith("<|im_start|>system\nBe good.\n<tools>\n")


def test_threads_that_cannot_go_on(told: Told) -> None:
    went_on = {**THREAD, "thread": {"type": "continue", "previous_message_id": "g9.e0.i0"}, "messages": [QUESTION]}
    lost = told.post("/messages", went_on, 404)["error"]
    assert lost["type"] == "not_found_error" and lost["details"] == {"error_code": "thread_not_found"}
    for fields in ({"system": "Be bad."}, {"tools": [CLAUDE_TOOL]}):
        refused = told.post("/messages", {**went_on, **fields}, 400)["error"]
        assert refused["type"] == "invalid_request_error" and "thread" in refused["message"]


def test_a_thread_that_goes_on_is_counted_whole_and_its_tools_are_those_to_choose_from(told: Told) -> None:
    told.says = [f"I add:\n{CALLS}<|im_end|>", "3<|im_end|>", '2, "b": 3}}\n</tool_call><|im_end|>', "3<|im_end|>"]
    create = {"thread": {"type": "create"}, "system": "Be good.", "tools": [CLAUDE_TOOL]}
    first = told.post("/messages", {**THREAD, **create, "messages": [QUESTION]})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    went_on: Body = {"thread": {"type": "continue", "previous_message_id": first["id"]}}
    went_on["messages"] = [{"role": "user", "content": results}]
    counted = told.post("/messages/count_tokens", went_on)
    asked = {**THREAD, **went_on}
    assert counted["input_tokens"] == told.post("/messages", asked)["usage"]["input_tokens"]
    for choice in ({"type": "tool", "name": "nope"}, {"type": "tool", "name": "add"}):
        status = 400 if choice["name"] == "nope" else 200
        answer = told.post("/messages", {**asked, "tool_choice": choice}, status)
        if status == 400:
            assert "names 'nope', which is not among the tools. Name one of: add." in answer["error"]["message"]
    plain = told.post("/messages", {**THREAD, "thread": {"type": "create"}, "messages": [QUESTION]})
    went_on = {"thread": {"type": "continue", "previous_message_id": plain["id"]}, "messages": [QUESTION]}
    refused = told.post("/messages", {**THREAD, **went_on, "tool_choice": {"type": "any"}}, 400)
    assert "it requires a tool call, but the request has no tools" in refused["error"]["message"]


def test_the_tokens_of_another_model_are_not_counted(told: Told) -> None:
    told.gateway.sessions.models = ["mine"]  # pyright: ignore[reportAttributeAccessIssue]
    error = told.post("/messages/count_tokens", {"messages": [QUESTION]}, 404)["error"]
    assert error["type"] == "not_found_error"


CLAUDE_CODE = {
    "max_tokens": 500,
    "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
    "thinking": {"budget_tokens": 31999, "type": "enabled", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.b03; cc_entrypoint=sdk-py;"},
        {"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "ToolSearch", "description": "finds tools", "input_schema": {"type": "object", "properties": {}}},
        {**CLAUDE_TOOL, "defer_loading": True},
    ],
}


def test_claude_code(told: Told) -> None:
    """Claude Code moves its cache marks in each request, and learns of further tools from the result of a tool."""
    search = '<tool_call>\n{"name": "ToolSearch", "arguments": {}}\n</tool_call>'
    told.says = [f"I look.\n{search}<|im_end|>", f"{CALLS}<|im_end|>", "3<|im_end|>"]
    marked = {"cache_control": {"type": "ephemeral"}}
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "1+2?", **marked}]}]
    first = told.post("/messages?beta=true", {**CLAUDE_CODE, "messages": messages})
    assert first["context_management"] == {"applied_edits": []}
    prompt = told.prompt()
    assert "ToolSearch" in prompt and '"add"' not in prompt and "billing" not in prompt
    call = first["content"][-1]
    found = {"type": "tool_result", "tool_use_id": call["id"], "is_error": False}
    found["content"] = [{"type": "tool_reference", "tool_name": "add"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [found | marked]},
    ]
    second = told.post("/messages?beta=true", {**CLAUDE_CODE, "messages": messages})
    assert '"name": "add", "description": "adds"' in told.prompt()
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "3", "is_error": False}
        for call in second["content"]
    ]
    messages += [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": results}]
    told.post("/messages?beta=true", {**CLAUDE_CODE, "messages": messages})
    assert told.sequences() == [[0, 1, 2]]
    assert told.session.warnings == ["the client asks for thinking, a setting that the model does not have"]


def test_a_tool_that_is_found_and_is_not_there(told: Told) -> None:
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "sub"}]}
    refused = told.post("/messages", {**CLAUDE_CODE, "messages": [{"role": "user", "content": [found]}]}, 400)
    assert "tool_reference names 'sub', which is not among the tools" in refused["error"]["message"]


def test_what_is_asked_of_the_context_and_is_not_done_is_a_warning(told: Told) -> None:
    told.says = ["3<|im_end|>", "3<|im_end|>"]
    edits = [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}}]
    asked = {"max_tokens": 9, "context_management": {"edits": edits}, "output_config": {"effort": "low"}}
    told.post("/messages", {**asked, "messages": [QUESTION], "tools": [{**CLAUDE_TOOL, "strict": True}]})
    told.post("/responses", {"input": "1+2?", "truncation": "auto", "reasoning": {"summary": "detailed"}})
    assert told.session.warnings == [
        "the client asks for reasoning effort 'low', a setting that the model does not have",
        "the client sets strict for add: the engine cannot hold arguments to a schema, so check them",
        "the client asks for clear_tool_uses_20250919: the gateway leaves the context as it is",
        "the client asks for truncation: the gateway leaves the context as it is",
    ]


@pytest.mark.parametrize("told", [{"context": 50}], indirect=True)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for(told: Told) -> None:
    messages = [{"role": "user", "content": "hello " * 2000}]
    refused = told.post("/messages", {"max_tokens": 9, "messages": messages}, 400)["error"]
    assert refused["type"] == "invalid_request_error" and refused["message"].startswith("prompt is too long: ")
    for path, body in (("/chat/completions", {"messages": messages}), ("/responses", {"input": messages})):
        error = told.post(path, body, 400)["error"]
        assert error["message"].startswith("This model's maximum context length is exceeded: ")
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
