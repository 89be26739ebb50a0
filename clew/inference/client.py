"""Client that implements `protocol.Engine` over HTTP, for `clew serve` and SGLang, whose native shapes they share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NoReturn

import aiohttp
import numpy as np
import orjson

from clew.errors import EngineError, ImageError
from clew.inference.protocol import (
    Completion,
    EngineUnreachable,
    GenerateRequest,
    RequestTooLong,
    SamplingParams,
    SchemaUnsupported,
    Span,
    spans_of,
)
from clew.record.weights import WeightRef

LONGEST_MESSAGE = 2000
"""Number of characters of a server's own message that are shown."""

HEALTH_S = 2.0
"""Seconds between two looks whether a server answers."""

FROZEN_S = 30.0
"""Seconds without an answer after which a server counts as frozen."""


class HTTPEngine:
    """Client of one inference server. Use it from one event loop, and `close` it."""

    kind = ""
    """Name of the engine, for messages and for the record; "" for a `clew serve`."""

    def __init__(self, address: str, token: str = "", context: int | None = None) -> None:
        """Create the client; it connects with the first request.

        Args:
            address: host:port.
            token: Token that the server's administrative endpoints ask for (SGLang: its --api-key).
            context: Maximum tokens of a prompt with its completion; for servers that refuse longer requests instead of
                ending them with "length".
        """
        self.address = address
        self.context = context
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._url = f"http://{address}"
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Complete one sequence; see the protocol.

        Raises:
            EngineUnreachable: The server is away or not ready.
        """
        body: dict[str, Any] = {
            "input_ids": request.input_ids,
            "sampling_params": sampling_fields(self._fitting(request)),
            "return_logprob": True,
            "clew": {
                "continues": request.params.continues,
                "exact_stop": True,
                "text": False,
                "deltas": True,
                "sampling_mask": request.sampling_mask,
            },
        }
        if request.images:
            body["image_data"] = [base64.b64encode(image).decode() for image in request.images]
        if request.id:
            body["rid"] = request.id
        if request.on_token is None:
            return completion_of(await self._post("/generate", body), self.name)
        return await self._streamed("/generate", body, request)

    def _fitting(self, request: GenerateRequest) -> SamplingParams:
        """Return the request's parameters with no more tokens than there is room for.

        Raises:
            RequestTooLong: There is no room for even one token.
        """
        params = request.params
        if self.context is None:
            return params
        room = self.context - len(request.input_ids)
        if room < 1:
            raise RequestTooLong(
                f"the prompt has {len(request.input_ids)} tokens, and {self.address} a context of {self.context}."
            )
        return replace(
            params, max_new_tokens=min(params.max_new_tokens, room), min_new_tokens=min(params.min_new_tokens, room)
        )

    @property
    def name(self) -> str:
        """Name of the server on record."""
        return f"{self.kind} {self.address}".strip()

    async def _streamed(self, path: str, body: dict[str, Any], request: GenerateRequest) -> Completion:
        """Return a completion whose tokens are passed on as they come.

        If the server goes away in the middle, the tokens so far are returned as an aborted completion.
        """
        whole = Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")
        assert request.on_token is not None
        masks: list[list[int]] = []
        try:
            async for event in self._events(path, {**body, "stream": True}):
                if (new := self._new_of(event, len(whole.output_ids))) is None:
                    continue
                masks += new.sampling_mask or []  # `clew serve` sends all with the last event, vLLM with each its own
                whole = replace(
                    new,
                    output_ids=whole.output_ids + new.output_ids,
                    logprobs=whole.logprobs + new.logprobs,
                    versions=whole.versions + new.versions,
                    sampling_mask=masks or None,
                )
                for token, logprob in zip(new.output_ids, new.logprobs, strict=True):
                    request.on_token(token, logprob)
        except EngineUnreachable:
            if not whole.output_ids:
                raise
            span = Span(start=0, end=len(whole.output_ids), server=self.name, version=None)
            whole = replace(whole, sampled_by=[span])
            if request.sampling_mask and request.params.cuts and len(masks) != len(whole.output_ids):
                wrong = f"{self.name} went away before it said which tokens top_p, top_k or min_p had left"
                return replace(whole, sampling_mask=None, wrong_logprobs=wrong)
        return whole

    def _new_of(self, event: dict[str, Any], before: int) -> Completion | None:
        """Return the new tokens of an event that has `before` tokens before it; aborted unless it is the last event.

        An event has only the new tokens or all so far, but always says how many there are by now.
        """
        meta = event["meta_info"]
        if status := (meta["finish_reason"] or {}).get("status_code"):  # SGLang's refusal, once a stream has begun
            self._refuse("/generate", status, orjson.dumps(meta["finish_reason"]))
        part = completion_of(event, self.name)
        start = len(part.output_ids) - (meta["completion_tokens"] - before)
        return replace(
            part, output_ids=part.output_ids[start:], logprobs=part.logprobs[start:], versions=part.versions[start:]
        )

    async def load_weights(self, ref: WeightRef) -> None:
        """Have the server abort all requests, load the weights in place, score the probe, and resume.

        Raises:
            EngineError: The weights are refused, or the probe differs. The server then serves the old weights or, if it
                cannot, nothing until a load succeeds.
        """
        loaded = await self._post(
            "/update_weights_from_disk",
            {
                "model_path": ref.path,
                "weight_version": str(ref.version),
                "clew": {"digest": ref.digest, "probe_ids": ref.probe_ids, "probe_logprob": ref.probe_logprob},
            },
        )
        if not loaded.get("success"):
            raise EngineError(
                f"inference server {self.address} did not load version {ref.version}: {loaded.get('message')}"
            )

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all (None); their tokens so far are returned."""
        await self._post("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def version(self) -> int:
        """Return the version of the weights; see the protocol. It is 0 for a server that was never given weights."""
        version = str((await self._request("GET", "/model_info", None)).get("weight_version"))
        return int(version) if version.isdigit() else 0

    async def pause(self, lease_s: float = 60.0) -> None:
        """Abort all running requests and start none, for at most lease_s seconds."""
        await self._post("/pause_generation", {"mode": "abort", "lease_s": lease_s})

    async def resume(self) -> None:
        """End a pause."""
        await self._post("/continue_generation", {})

    async def release_memory(self, lease_s: float = 60.0) -> None:
        """Pause, and free the memory of the server's cache; call `pause` again to extend the lease."""
        await self.pause(lease_s)
        await self._post("/release_memory_occupation", {"tags": ["kv_cache"]})

    async def resume_memory(self) -> None:
        """End the pause that `release_memory` began; the cache may take memory again."""
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await self.resume()

    async def frozen(self, after_s: float) -> None:
        """Return when the server has not answered anything for `after_s` seconds.

        The HTTP side of a server answers while its engine computes, loads weights or is paused.
        """
        loop = asyncio.get_running_loop()
        pause = min(HEALTH_S, after_s / 4)
        answered = loop.time()
        while loop.time() - answered < after_s:
            await asyncio.sleep(pause)
            if await self.answers(pause):
                answered = loop.time()

    async def answers(self, within_s: float = HEALTH_S) -> bool:
        """Return whether the server answers at all, be it that it is starting."""
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._connected().get(self._url + "/health", timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _routes(self) -> dict[str, Any]:
        """Return the server's endpoints, by path.

        Raises:
            EngineError: It does not say which, so it is no inference server.
        """
        try:
            return dict((await self._request("GET", "/openapi.json", None))["paths"])
        except EngineUnreachable:
            raise
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"Cannot use {self.address}: it is no vLLM or SGLang server, as GET /openapi.json lists no endpoints "
                f"({type(error).__name__}: {error}). Give the host:port that the inference server printed."
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._request("POST", path, orjson.dumps(body))

    async def _request(self, method: str, path: str, body: bytes | None) -> Any:
        async with self._answered(method, path, body) as response:
            content = await response.read()
        return orjson.loads(content) if content[:1] in (b"{", b"[") else {}

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the data of server-sent events.

        It raises as any request does, and also for an error that is sent as an event.
        """
        line = b""
        async with self._answered("POST", path, orjson.dumps(body)) as response:
            async for part in response.content.iter_any():
                *lines, line = (line + part).split(b"\n")
                for data in (text[6:].strip() for text in lines if text.startswith(b"data: ")):
                    if data == b"[DONE]":
                        continue
                    event = orjson.loads(data)
                    if error := event.get("error"):
                        self._refuse(path, int(error.get("code") or 400), data)
                    yield event

    @contextlib.asynccontextmanager
    async def _answered(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200, as soon as it begins.

        Raises:
            EngineUnreachable: The server is away or not ready.
            EngineError: The server refused the request; the message has the server's own words.
        """
        try:
            async with self._connected().request(method, self._url + path, data=body) as response:
                if response.status != 200:
                    self._refuse(path, response.status, await response.read())
                yield response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise EngineUnreachable(self.address, str(error) or type(error).__name__) from error

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers=self._headers,
            )
        return self._session

    def _refuse(self, path: str, status: int, content: bytes) -> NoReturn:
        if status == 503:
            raise EngineUnreachable(self.address, _message(content))
        kinds = (RequestTooLong, SchemaUnsupported, ImageError)
        refusal = next((kind for kind in kinds if b'"%s"' % kind.__name__.encode() in content), EngineError)
        raise refusal(f"inference server {self.address} refused {path} ({status}): {_message(content)}")


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as SGLang's sampling_params."""
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "sampling_seed": params.seed,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids is not None:
        fields["stop_token_ids"] = list(params.stop_token_ids)
        if not params.stop_token_ids:
            fields["ignore_eos"] = True
    if params.json_schema is not None:
        fields["json_schema"] = params.json_schema
    return fields


def completion_of(answer: dict[str, Any], server: str) -> Completion:
    """Return the completion in a response of `/generate`; an event in the middle of a stream counts as aborted.

    Args:
        answer: The response.
        server: Name of the server on record, unless it is a `clew serve` that names the one behind it.

    Raises:
        EngineError: The response lacks logprobs.
    """
    meta = answer["meta_info"]
    if "output_token_logprobs" not in meta:
        raise EngineError("the inference server returned no logprobs, so its tokens cannot be trained on.")
    pairs = meta["output_token_logprobs"]
    tokens = len(answer.get("output_ids", pairs))
    if len(pairs) not in (tokens, meta.get("completion_tokens")):  # a stream's events count differently
        raise EngineError(
            f"the inference server returned {tokens} tokens and {len(pairs)} logprobs, so they cannot be trained on."
        )
    versions: list[int] = []
    more = meta.get("clew") or {}
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(pairs)}]
    for span in spans:
        version = str(span["version"])
        versions += [int(version) if version.isdigit() else 0] * (span["end"] - span["start"])
    ended: dict[str, Any] = meta["finish_reason"] or {"type": "abort"}
    return Completion(
        output_ids=[pair[1] for pair in pairs],
        logprobs=[pair[0] for pair in pairs],
        versions=versions,
        finish_reason=ended["type"],
        matched=ended.get("matched"),
        sampling_mask=more.get("sampling_mask"),
        sampled_by=more.get("sampled_by") or spans_of(spans, server),
        routed_experts=experts_of(more.get("routed_experts")),
    )


def experts_of(encoded: str | None) -> np.ndarray | None:
    """Return an array from the base64 of a .npy file, in which vLLM and `clew serve` send routed experts."""
    return None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)


def _message(content: bytes) -> str:
    """Return the server's own error message."""
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")[:LONGEST_MESSAGE]
    if isinstance(parsed, dict):
        error = parsed.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        return str(parsed.get("message", parsed))[:LONGEST_MESSAGE]
    return str(parsed)[:LONGEST_MESSAGE]
