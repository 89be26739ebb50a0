"""Replies that are held to a JSON schema: what goes over the wire to a server that speaks vLLM's or SGLang's shape, and
who refuses. The shapes are those of the servers' documents; no such server runs here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from clew.gateway.agent_session import Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.inference.detect_server import find_engine
from clew.inference.protocol import GenerateRequest, SamplingParams, SchemaUnsupported
from clew.record.run import RunDirectory
from clew.rollout.server_pool import ServerPool
from tests.gateway.chatml import CHATML, chatml_tokenizer, odd_ids
from tests.gateway.spoken import session_on

USER: Any = {"role": "user", "content": "What is the answer?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAID = '{"a": 42}'
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


class Remote:
    """A gateway in front of a server that keeps what it was asked."""

    def __init__(self, kind: str, folder: Path, template: str = CHATML) -> None:
        self.kind = kind
        self.tokenizer: Any = chatml_tokenizer(folder, template)
        self.bodies: list[dict[str, Any]] = []
        self.cut: int | None = None
        """After so many tokens its answers are cut short."""
        self.gateway = GatewayThread(Limits())
        self._serving = asyncio.run(self.gateway.call(self._serve()))
        self.engine: Any = asyncio.run(self._found()).engine
        self.engine.tokenizer = self.tokenizer
        self.key, self.session = self.gateway.open(session_on(self.engine))

    async def _serve(self) -> web.AppRunner:
        application = web.Application()
        if self.kind == "vllm":
            application.router.add_get("/v1/models", self._models)
            application.router.add_post("/v1/completions", self._completions)
        else:
            application.router.add_get("/model_info", self._model_info)
            application.router.add_get("/server_info", self._server_info)
            application.router.add_post("/generate", self._generate)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _found(self) -> Any:
        return await find_engine("http://{}:{}".format(*self._serving.addresses[0][:2]))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096, "root": "m"}]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"tokenizer_path": "m", "weight_version": "default"})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_req_input_len": 4096})

    async def _ids(self, request: web.Request) -> list[int]:
        self.bodies.append(await request.json())
        return odd_ids(self.tokenizer, SAID)[: self.cut] + ([] if self.cut else [self.tokenizer.eos_token_id])

    async def _completions(self, request: web.Request) -> web.Response:
        if (await request.json()).get("return_tokens_as_token_ids"):  # the probe of its logprobs
            likeliest = {"token_id:5": -0.5, "token_id:6": -1.5}
            return web.json_response({"choices": [{"logprobs": {"top_logprobs": [likeliest]}}]})
        ids, ended = await self._ids(request), "abort" if self.cut else "stop"
        if not self.bodies[-1].get("stream"):
            return web.json_response(_choice(ids, ended))
        events = [_choice([token], None) for token in ids] + [_choice([], ended)]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=lines, content_type="text/event-stream")

    async def _generate(self, request: web.Request) -> web.Response:
        if (body := await request.json()).get("top_logprobs_num"):  # the probe of its logprobs
            likeliest = [(-0.5, 5, None), (-0.5 - 1 / body["sampling_params"]["temperature"], 6, None)]
            return web.json_response({"meta_info": {"output_top_logprobs": [likeliest]}})
        ids = await self._ids(request)
        ended = {"type": "abort"} if self.cut else {"type": "stop", "matched": ids[-1]}
        pairs = [(-0.5, token, None) for token in ids]
        return web.json_response({"meta_info": {"output_token_logprobs": pairs, "finish_reason": ended}})

    def asked(self) -> str | None:
        """The schema that the last request had on the wire."""
        body = self.bodies[-1]
        if self.kind == "vllm":
            assert all(isinstance(token, int) for token in body["prompt"])
            return body.get("structured_outputs", {}).get("json")
        assert all(isinstance(token, int) for token in body["input_ids"])
        return body["sampling_params"].get("json_schema")

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=self.key, max_retries=0, **options)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        url = self.gateway.base_url.removesuffix("/v1")
        return anthropic.AsyncAnthropic(base_url=url, api_key=self.key, max_retries=0)

    def close(self) -> None:
        asyncio.run(self.gateway.call(self.engine.close()))
        asyncio.run(self.gateway.call(self._serving.cleanup()))
        self.gateway.stop()


def _choice(ids: list[int], reason: str | None) -> Any:
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": reason}]}


@pytest.fixture(params=["vllm", "sglang"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    made = Remote(request.param, tmp_path)
    yield made
    made.close()


async def _chat(remote: Remote, format: Any) -> str:
    async with remote.openai() as client:
        answer = await client.chat.completions.create(model="x", messages=[USER], response_format=format)
        return answer.choices[0].message.content or ""


async def _responses(remote: Remote, format: Any) -> str:
    flat: Any = {**format, **format.get("json_schema", {})}
    flat.pop("json_schema", None)
    async with remote.openai() as client:
        answer = await client.responses.create(model="x", input="What is the answer?", text={"format": flat})
        assert answer.text and answer.text.format and answer.text.format.type == format["type"]
        return answer.output_text


async def _messages(remote: Remote, format: Any) -> str:
    schema = format.get("json_schema", {}).get("schema", {"type": "object"})
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    async with remote.anthropic() as client:
        answer: Any = await client.messages.create(model="x", max_tokens=50, messages=[USER], output_config=config)
        return answer.content[0].text


@pytest.mark.parametrize("ask", [_chat, _responses, _messages])
def test_the_schema_reaches_the_server_and_the_record(remote: Remote, ask: Any) -> None:
    for format, schema in ((FORMAT, SCHEMA), ({"type": "json_object"}, {"type": "object"})):
        assert asyncio.run(ask(remote, format)) == SAID
        assert json.loads(remote.asked() or "") == schema
        recorded = remote.session.engine.interactions[-1].record_entry()
        assert json.loads(recorded["sampling"]["json_schema"]) == schema
    [warning] = remote.session.warnings
    assert "follow a JSON schema" in warning and "Do not train on them" in warning


def test_without_a_form_nothing_of_it_is_sent(remote: Remote) -> None:
    assert asyncio.run(_chat(remote, {"type": "text"})) == SAID
    assert remote.asked() is None and "structured_outputs" not in remote.bodies[0]
    assert remote.session.warnings == []


def test_the_clients_own_parser_gets_its_object(remote: Remote) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    async def ask() -> list[Any]:
        async with remote.openai() as client, remote.anthropic() as other:
            chat = await client.chat.completions.parse(model="x", messages=[USER], response_format=Answer)
            response = await client.responses.parse(model="x", input="hello", text_format=Answer)
            message = await other.messages.parse(model="x", max_tokens=50, messages=[USER], output_format=Answer)
            return [chat.choices[0].message.parsed, response.output_parsed, message.parsed_output]

    assert asyncio.run(ask()) == [Answer(a=42)] * 3
    assert json.loads(remote.asked() or "")["required"] == ["a"]


def test_with_tools_that_could_never_be_called_it_is_refused(remote: Remote) -> None:
    async def ask(**more: Any) -> str:
        async with remote.openai() as client:
            answer = await client.chat.completions.create(
                model="x", messages=[USER], response_format=FORMAT, tools=[ADD], **more
            )
            return answer.choices[0].message.content or ""

    with pytest.raises(openai.BadRequestError, match="could not call a tool") as refused:
        asyncio.run(ask())
    assert refused.value.param == "response_format" and remote.bodies == []
    assert asyncio.run(ask(tool_choice="none")) == SAID


def test_what_is_cut_short_in_its_midst_is_not_gone_on_with(remote: Remote) -> None:
    """A server begins the schema anew with the first token that it draws."""
    remote.cut = 4
    with pytest.raises(openai.InternalServerError, match="cut short what it held to a JSON schema") as failed:
        asyncio.run(_chat(remote, FORMAT))
    assert failed.value.status_code == 503 and len(remote.bodies) == 1

    remote.cut = None
    assert asyncio.run(_chat(remote, FORMAT)) == SAID
    assert [each.text for each in remote.session.engine.interactions] == [SAID]


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_begins_a_thought_does_not_make_the_object_a_thought(tmp_path: Path, stream: bool) -> None:
    begins, thinks = "<|im_start|>assistant{{ '\\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    remote = Remote("vllm", tmp_path, CHATML.replace(begins, thinks))

    async def ask() -> str:
        if not stream:
            return await _chat(remote, FORMAT)
        async with (
            remote.openai() as client,
            client.chat.completions.stream(model="x", messages=[USER], response_format=FORMAT) as events,
        ):
            return (await events.get_final_completion()).choices[0].message.content or ""

    try:
        assert asyncio.run(ask()) == SAID
        assert remote.tokenizer.decode(remote.bodies[-1]["prompt"]).endswith("<think>\n")
        assert bool(remote.bodies[-1].get("stream")) is stream
    finally:
        remote.close()


def test_in_training_nobody_holds_to_a_schema(tmp_path: Path) -> None:
    pool = ServerPool(RunDirectory(tmp_path))
    with pytest.raises(SchemaUnsupported, match="not the policy's"):
        asyncio.run(pool.generate(GenerateRequest([1], SamplingParams(json_schema="{}"))))
