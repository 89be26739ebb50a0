"""Engines tell tokens while those after them are still being drawn: this process, a server, SGLang's and vLLM's shapes.

The shapes are those of the servers' documents; no such server runs here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from aiohttp import web

from clew.errors import EngineError
from clew.inference.client import HTTPEngine
from clew.inference.embedded import build_engine
from clew.inference.local import LocalEngine
from clew.inference.protocol import EngineUnreachable, GenerateRequest, RequestTooLong, SamplingParams
from clew.inference.retries import generate_through_aborts
from clew.inference.vllm import VLLMEngine
from clew.models.loading import load_model, load_tokenizer
from tests.models import tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]
PARAMS = SamplingParams(max_new_tokens=24, seed=5, stop_token_ids=())


def cumulative(ids: list[int], end: dict[str, Any] | None = None, new: int | None = None) -> dict[str, Any]:
    """SGLang's event: all tokens so far, or the last `new`."""
    shown = ids if new is None else ids[len(ids) - new :]
    meta = {
        "id": "x",
        "finish_reason": end,
        "completion_tokens": len(ids),
        "weight_version": "7",
        "output_token_logprobs": [(-0.5 * token, token, None) for token in shown],
    }
    return {"text": "", "output_ids": shown, "meta_info": meta}


def chunk(ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    """vLLM's event: the new tokens."""
    logprobs = {"token_logprobs": [-0.5 * token for token in ids]} if ids else None
    return {"choices": [{"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason, **more}]}


@asynccontextmanager
async def saying(*events: Any, cut: bool = False) -> AsyncIterator[str]:
    """A server that answers everything with these events; cut: and dies."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    async with served(answer) as address:
        yield address


@asynccontextmanager
async def served(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The address of a server that answers every POST so."""
    application = web.Application()
    application.router.add_post("/{tail:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def heard_of(*events: Any, cut: bool = False, vllm: bool = False) -> tuple[Any, list[int]]:
    """The completion, and the tokens that were told before."""

    async def run() -> tuple[Any, list[int]]:
        told: list[tuple[int, float]] = []
        async with saying(*events, cut=cut) as address:
            engine = VLLMEngine(address, "m", 256) if vllm else HTTPEngine(address)
            try:
                completion = await engine.generate(
                    GenerateRequest(PROMPT, PARAMS, on_token=lambda *token: told.append(token))
                )
            finally:
                await engine.close()
        assert [logprob for _, logprob in told] == completion.logprobs == [-0.5 * token for token, _ in told]
        return completion, [token for token, _ in told]

    return asyncio.run(run())


@pytest.mark.parametrize("new", [None, 1])
def test_sglangs_stream_with_all_tokens_so_far_or_with_the_new_ones(new: int | None) -> None:
    end = {"type": "stop", "matched": 3}
    completion, told = heard_of(
        cumulative([1], new=new), cumulative([1, 2], new=new), cumulative([1, 2, 3], end=end, new=new)
    )
    assert (completion.output_ids, told) == ([1, 2, 3], [1, 2, 3])
    assert (completion.versions, completion.finish_reason, completion.matched) == ([7, 7, 7], "stop", 3)


@pytest.mark.parametrize("vllm", [False, True])
def test_events_that_a_proxy_writes_in_another_form(vllm: bool) -> None:
    """The space after "data:" is optional, and a stream may have comments and other fields."""
    events = [chunk([1]), chunk([2], "length")] if vllm else [cumulative([1]), cumulative([1, 2], {"type": "length"})]

    async def answer(_: web.Request) -> web.Response:
        lines = "".join(f"event: message\r\ndata:{json.dumps(event)}\r\n\r\n" for event in events)
        return web.Response(text=f": ping\r\n\r\n{lines}data:[DONE]\r\n\r\n", content_type="text/event-stream")

    async def ask() -> list[int]:
        async with served(answer) as address:
            engine = VLLMEngine(address, "m", 256) if vllm else HTTPEngine(address)
            try:
                return (await engine.generate(GenerateRequest(PROMPT, PARAMS, on_token=lambda *_: None))).output_ids
            finally:
                await engine.close()

    assert asyncio.run(ask()) == [1, 2]


def test_the_last_event_of_a_stream_decides_which_weights_made_its_tokens() -> None:
    last = cumulative([1, 2, 3], end={"type": "length"})
    last["meta_info"]["weight_versions"] = [
        {"version": "6", "start": 0, "end": 1},
        {"version": "8", "start": 1, "end": 3},
    ]
    completion, told = heard_of(cumulative([1]), cumulative([1, 2]), last)
    assert (completion.versions, told) == ([6, 8, 8], [1, 2, 3])
    last["output_ids"] = [3]
    last["meta_info"] |= {
        "output_token_logprobs": [(-1.5, 3, None)],
        "weight_versions": [{"version": "8", "start": 0, "end": 1}],
    }
    completion, _ = heard_of(cumulative([1], new=1), cumulative([1, 2], new=1), last)
    assert completion.versions == [7, 7, 8]


@pytest.mark.parametrize(
    "last, reason, matched",
    [
        (chunk([3], "stop", stop_reason=None), "stop", 3),
        (chunk([3], "stop", stop_reason="END"), "stop", "END"),
        (chunk([3], "length"), "length", None),
        (chunk([], "length"), "length", None),
    ],
)
def test_vllms_stream(last: dict[str, Any], reason: str, matched: Any) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3}}
    completion, told = heard_of(chunk([1, 2]), last, usage, vllm=True)
    assert completion.output_ids == told == [1, 2, *last["choices"][0]["token_ids"]]
    assert (completion.finish_reason, completion.matched) == (reason, matched)


@pytest.mark.parametrize("vllm", [False, True])
def test_a_server_that_dies_in_mid_stream_costs_only_what_it_had_not_told(vllm: bool) -> None:
    events = [chunk([1]), chunk([2])] if vllm else [cumulative([1]), cumulative([1, 2])]
    completion, told = heard_of(*events, cut=True, vllm=vllm)
    assert (completion.output_ids, told, completion.finish_reason) == ([1, 2], [1, 2], "abort")
    with pytest.raises(EngineUnreachable):
        heard_of(cut=True, vllm=vllm)


def test_an_error_in_a_stream_is_raised_as_any_other() -> None:
    with pytest.raises(EngineError, match=r"refused /generate \(400\): top_p is 7"):
        heard_of({"error": {"message": "top_p is 7", "code": 400}})
    with pytest.raises(EngineUnreachable, match="a step failed"):
        heard_of({"error": {"message": "a step failed", "code": 503}})


@pytest.mark.parametrize("threaded", [False, True])
def test_an_engine_in_this_process_tells_each_token_once_also_across_aborts(tmp_path: Any, threaded: bool) -> None:
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    core = build_engine(load_model(str(tmp_path), "float32", torch.device("cpu")), load_tokenizer(str(tmp_path)))

    async def run(aborting: bool) -> tuple[Any, list[int]]:
        engine, told = LocalEngine(core, threaded=threaded), []
        at = [3, 9, 10] if aborting else []
        work = asyncio.ensure_future(
            generate_through_aborts(
                engine, GenerateRequest(PROMPT, PARAMS, on_token=lambda token, _: told.append(token))
            )
        )
        while not work.done():
            await asyncio.sleep(0)
            if at and len(told) >= at[0]:
                del at[0]
                await engine.abort()
        await engine.close()
        assert len(at) < 3 if threaded and aborting else not at  # its thread may be done before all aborts were sent
        return await work, told

    plain, told = asyncio.run(run(aborting=False))
    assert plain.output_ids == told and len(told) == 24
    aborted, told = asyncio.run(run(aborting=True))
    assert aborted.output_ids == told == plain.output_ids


def test_what_a_listener_raises_is_not_the_engines_failure(tmp_path: Any) -> None:
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    core = build_engine(load_model(str(tmp_path), "float32", torch.device("cpu")), load_tokenizer(str(tmp_path)))

    async def run() -> None:
        raised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
        engine = LocalEngine(core)

        def listen(token: int, logprob: float) -> None:
            raise ValueError("a mistake")

        completion = await engine.generate(GenerateRequest(PROMPT, PARAMS, on_token=listen))
        assert len(completion.output_ids) == 24 == len(raised) and engine.failure is None

    asyncio.run(run())


@pytest.mark.parametrize("status, error", [(400, EngineError), (503, EngineUnreachable)])
def test_sglang_refuses_in_a_stream_by_an_abort_with_a_status(status: int, error: type[EngineError]) -> None:
    """Otherwise what it will never do would be asked of it again, as after any abort, forever."""
    ended = {"type": "abort", "message": "Failed to compile json grammar", "status_code": status}
    event = {"meta_info": {"finish_reason": ended, "completion_tokens": 1, "output_token_logprobs": []}}
    with pytest.raises(EngineError, match="Failed to compile json grammar") as refused:
        heard_of(event)
    assert type(refused.value) is error


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_no_more_is_asked_of_a_server_than_its_context_has_room_for(name: str) -> None:
    async def run() -> None:
        asked: list[Any] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append(await request.json())
            return web.json_response(chunk([1], "length") if name == "vllm" else cumulative([1], {"type": "length"}))

        async with served(answer) as address:
            engine = VLLMEngine(address, "m", 13) if name == "vllm" else HTTPEngine(address, context=13)
            try:
                await engine.generate(GenerateRequest([7] * 3, PARAMS))
                await engine.generate(GenerateRequest([7] * 12, PARAMS))
                with pytest.raises(RequestTooLong, match=r"13 tokens, and .* a context of 13"):
                    await engine.generate(GenerateRequest([7] * 13, PARAMS))
            finally:
                await engine.close()
        fields = asked if name == "vllm" else [each["sampling_params"] for each in asked]
        assert [each["max_tokens" if name == "vllm" else "max_new_tokens"] for each in fields] == [10, 1]

    asyncio.run(run())
