"""Client of `clew serve` that implements `protocol.Engine` over HTTP; the clients of SGLang and vLLM derive from it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NoReturn

import aiohttp
import numpy as np
import orjson
from aiohttp.http_exceptions import ContentEncodingError

from clew.config import TOKEN_VARIABLE
from clew.errors import EngineError, ImageError
from clew.inference.protocol import (
    FINISH_REASONS,
    Completion,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    RequestTooLong,
    SamplingParams,
    SchemaUnsupported,
    Span,
    Timings,
    spans_of,
)
from clew.printing import sentence
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef

Take = Callable[[Any, str], Any]
"""Function (answer or event of a stream, address of the server) -> what the caller needs from it."""

LONGEST_MESSAGE = 2000
"""Number of characters of a server's own message that are shown."""

LONGEST_PAGE = 200
"""Number of characters that are shown of an answer that is not JSON."""

AWAY = (429, 502, 503, 504)
"""Statuses of a server that is busy, starting or draining, and of a proxy whose server is away."""

MOST_TOKENS = 2**24
"""Number of tokens above which a span of one version in an answer is taken for a mistake."""

LARGEST_VERSION = 2**31 - 1
"""Largest version that the record holds."""

LARGEST_LOGPROB = 1e-3
"""Largest logprob above 0 that rounding can explain, in nats."""

LOWEST_LOGPROB = -9999.0
"""Logprob that vLLM sends in place of NaN, minus infinity or none. A token that was drawn has a larger one."""

ADDRESS_HINT = "Is this the host:port that the inference server printed?"

HEALTH_S = 2.0
"""Seconds between two checks of whether a server answers."""

FROZEN_S = 30.0
"""Seconds without an answer after which a server counts as frozen."""


class HTTPEngine:
    """Client of one inference server. Use it from one event loop, and `close` it."""

    kind = ""
    """Name of the engine, for messages and for the record; "" for a `clew serve`."""
    needs_version = True
    """True if an answer that does not say which version made its tokens is refused."""
    takes_images = False
    """True once the server has shown that it takes images beside token IDs."""
    idle_s = 600.0
    """Seconds for which an idle connection is kept. It must be less than the server's own limit: the server may
    otherwise close the connection just as the next request is sent."""

    def __init__(self, address: str, token: str = "", context: int | None = None) -> None:
        """Create the client of a server; it connects with the first request.

        Args:
            address: host:port; for a server that expects TLS, https://host:port.
            token: Token that the server's administrative endpoints ask for (SGLang: its --api-key).
            context: Maximum tokens of a prompt with its completion; for servers that refuse longer requests instead of
                ending them with "length".
        """
        self.address = address
        self.context = context
        self.vocab: int | None = None
        """Number of token IDs of the model; None: not known."""
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._url = address if "://" in address else f"http://{address}"
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        body = self._generate_body(request)
        if request.on_token is None:
            return await self._in_one_answer("/generate", body, request)
        return await self._streamed("/generate", body, request)

    def _generate_body(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the body of a call of `/generate`."""
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
        return body

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
    def advice(self) -> str:
        """Advice about the server's logprobs for the user who attaches it; "" if they are right at any temperature."""
        return ""

    def wrong_logprobs(self, params: SamplingParams, masked: bool = False) -> str:
        """Return why the logprobs of a request with these parameters are not what training needs; "" if they are.

        Args:
            masked: True if the answer says for each token from which tokens it was drawn.
        """
        return ""

    def name_of(self, address: str) -> str:
        """Return the name under which the record lists the server at an address."""
        return f"{self.kind} {address}".strip()

    def _check_request(self, answer: dict[str, Any], request: GenerateRequest, address: str) -> None:
        """Raise FaultyAnswer if an answer, or an event of a stream, belongs to another request."""
        answered = self._answered_id(answer)
        if request.id and answered is not None and answered != request.id:
            raise FaultyAnswer(
                address,
                f"it was asked for request {request.id}, but answered request {answered}. Does a proxy in front of it "
                f"cache answers, or send them to the wrong client?",
            )

    def _answered_id(self, answer: dict[str, Any]) -> str | None:
        """Return the ID of the request that an answer belongs to; None if it does not say."""
        return (answer.get("meta_info") or {}).get("id")

    async def _in_one_answer(self, path: str, body: dict[str, Any], request: GenerateRequest) -> Completion:
        """Return a completion that comes in one answer."""

        def take(answer: dict[str, Any], address: str) -> Completion:
            self._check_request(answer, request, address)
            if "meta_info" in answer and not answer["meta_info"]["finish_reason"]:
                raise ValueError("finish_reason null")
            completion = self._new_of(answer, 0, address)
            assert completion is not None, "the answer has no completion"
            _check_masks(completion.sampling_mask, completion.output_ids, self.vocab)
            self._check(completion, len(completion.output_ids), request, address)
            return completion

        return await self._post(path, body, take)

    async def _streamed(self, path: str, body: dict[str, Any], request: GenerateRequest) -> Completion:
        """Return a completion whose tokens are passed on as they come.

        If the server goes away in the middle, or sends something that cannot be right, the tokens so far are returned
        as an aborted completion. If there are none yet, the error is raised.
        """
        so_far = Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")
        assert request.on_token is not None
        masks: list[list[int]] = []
        versions: list[int] = []
        server = self.address

        def take(event: dict[str, Any], address: str) -> Completion | None:
            nonlocal server, versions
            server, before = address, len(so_far.output_ids)
            self._check_request(event, request, address)
            new = self._new_of(event, before, address)
            if new is not None:
                if new.sampling_mask is not None:  # `clew serve` sends all at the end, vLLM each event's own
                    _check_masks(new.sampling_mask, (so_far.output_ids + new.output_ids)[len(masks) :], self.vocab)
                self._check(new, before + len(new.output_ids), request, address)
                versions = final_versions(event) or versions + new.versions
            return new

        try:
            async for new in self._events(path, {**body, "stream": True}, take):
                if new is None:
                    continue
                masks += new.sampling_mask or []
                so_far = replace(
                    new,
                    output_ids=so_far.output_ids + new.output_ids,
                    logprobs=so_far.logprobs + new.logprobs,
                    versions=versions,
                    sampling_mask=masks or None,
                )
                for token, logprob in zip(new.output_ids, new.logprobs, strict=True):
                    request.on_token(token, logprob)
        except (EngineUnreachable, FaultyAnswer):
            if so_far.finish_reason != "abort":
                return so_far  # it is complete: only the end mark is missing
            if not so_far.output_ids:
                raise
            name = self.name_of(server)
            span = Span(start=0, end=len(so_far.output_ids), server=name, version=None)
            so_far = replace(so_far, sampled_by=[span], finish_reason="abort", matched=None)
            truncates = request.params.truncates(self.vocab or math.inf)
            if request.sampling_mask and truncates and len(masks) != len(so_far.output_ids):
                wrong = f"{name} went away before it said which tokens were left by top_p, top_k or min_p"
                return replace(so_far, sampling_mask=None, wrong_logprobs=wrong)
        return so_far

    def _check(self, new: Completion, total: int, request: GenerateRequest, address: str) -> None:
        """Raise FaultyAnswer if the new tokens of a completion cannot be right.

        Args:
            total: Number of tokens that the completion has by now, including the new ones.
        """
        wrong = wrong_numbers(new, self.vocab)
        if total > request.params.max_new_tokens:
            wrong = f"it returned {total} tokens, and was asked for at most {request.params.max_new_tokens}"
        elif not total and new.finish_reason != "abort":
            wrong = f"it returned no tokens, and finish_reason {new.finish_reason!r}"
        if wrong:
            raise FaultyAnswer(address, f"{wrong}: nothing to train on. Look into its log, or restart it.")

    def _new_of(self, event: dict[str, Any], before: int, address: str) -> Completion | None:
        """Return the new tokens of an answer, or of an event that has `before` tokens before it.

        The completion counts as aborted unless this is the last event. None: the event has none (vLLM's usage).
        """
        meta = event["meta_info"]
        if status := (meta["finish_reason"] or {}).get("status_code"):  # SGLang's refusal, once a stream has begun
            self._refuse(address, "/generate", status, orjson.dumps(meta["finish_reason"]))
        part = completion_of(event, self.name_of(address), labelled=self.needs_version)
        if not before and meta["finish_reason"]:
            return part
        # An event has only the new tokens, or all so far, but always says how many there are by now.
        start = len(part.output_ids) - (meta["completion_tokens"] - before)
        if start < 0:
            raise ValueError(
                f"{before} tokens before, {len(part.output_ids)} now, completion_tokens {meta['completion_tokens']}"
            )
        return replace(
            part, output_ids=part.output_ids[start:], logprobs=part.logprobs[start:], versions=part.versions[start:]
        )

    async def load_weights(self, ref: WeightRef) -> Timings:
        """Have the server abort all requests, load the weights in place, score the probe, and resume.

        Returns:
            The seconds that each part took. The server served no requests during that time.

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
        if "clew" not in loaded:
            raise EngineError(
                f"inference server {self.address} is no `clew serve`, so nothing checks that it loaded version "
                f"{ref.version}. If it is vLLM or SGLang, set inference.backend to that."
            )
        serves = str(loaded.get("weight_version"))
        with contextlib.suppress(EngineUnreachable):  # it may be starting, and wait for these weights
            serves = str(await self.version())
        if serves != str(ref.version):
            raise EngineError(
                f"inference server {self.address} answered that it loaded version {ref.version}, and serves version "
                f"{serves}. Does another run load weights into it, or does a proxy stand between it and the trainer? "
                f"Give each run a server of its own."
            )
        return self._timings("/update_weights_from_disk", loaded)

    async def receive_weights(self, sent: Broadcast) -> Timings:
        """Have the server take part in a broadcast. `load_weights` then has the result checked.

        A server with vLLM or SGLang behind it aborts all requests first; one with the embedded engine keeps serving.
        """
        return self._timings("/receive_weights", await self._post("/receive_weights", asdict(sent)))

    def _timings(self, path: str, answer: dict[str, Any]) -> Timings:
        """Return the timings in an answer of a `clew serve`; empty if it has none."""
        with _readable(self.address, path, orjson.dumps(answer)):
            return {part: float(seconds) for part, seconds in answer.get("clew", {}).items()}

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all (None). Their calls of `generate` then return the tokens so far."""
        await self._post("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def version(self) -> int:
        """Return the version of the weights; 0 if the server labels them otherwise, or was never given any."""
        version = str((await self._request("GET", "/model_info", None)).get("weight_version"))
        return int(version) if version.isdigit() else 0

    async def pause(self, lease_s: float = 60.0) -> None:
        """Abort all running requests and start none, for at most lease_s seconds."""
        await self._post("/pause_generation", {"mode": "abort", "lease_s": lease_s})

    async def resume(self) -> None:
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
        """Wait until the server has not answered anything for `after_s` seconds."""
        # The HTTP side of a server answers while its engine computes, loads weights or is paused.
        loop = asyncio.get_running_loop()
        pause = min(HEALTH_S, after_s / 4)
        answered = loop.time()
        while (left := answered + after_s - loop.time()) > 0:
            await asyncio.sleep(min(pause, left))
            # On a CPU, it answers between two steps of the embedded engine, which may take longer than `pause`.
            if await self.answers(max(pause, min(after_s / 3, answered + after_s - loop.time()))):
                answered = loop.time()

    async def answers(self, within_s: float = HEALTH_S) -> bool:
        """Return whether the server answers at all, even if only to say that it is starting."""
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._connected().get(self._url + "/model_info", timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _routes(self) -> dict[str, Any]:
        """Return the server's endpoints, by path.

        Raises:
            EngineError: It does not list them, so it is not an inference server.
        """
        try:
            return await self._request("GET", "/openapi.json", None, lambda answer, _: dict(answer["paths"]))
        except FaultyAnswer as error:
            raise EngineError(
                f"Cannot use {self.address}: it is no vLLM or SGLang server, as GET /openapi.json lists no endpoints "
                f"({error}). Give the host:port that the inference server printed."
            ) from None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, path: str, body: dict[str, Any], take: Take | None = None) -> Any:
        return await self._request("POST", path, orjson.dumps(body), take)

    async def _request(self, method: str, path: str, body: bytes | None, take: Take | None = None) -> Any:
        """Return the JSON object of an answer, or what `take` makes of the answer and of the server's address.

        Raises:
            FaultyAnswer: The answer is a web page or broken JSON, or `take` cannot read it; see also `_answered`.
        """
        async with self._answered(method, path, body) as response:
            content, address = await response.read(), response.url.authority
            with _readable(address, path, content):
                # "<" begins a web page: it goes to the parser, to be refused there. Other text, or none, counts as {}.
                answer = orjson.loads(content) if content[:1] in (b"{", b"[", b"<") else {}
                if take is None and not isinstance(answer, dict):
                    raise ValueError("it is no JSON object")
                return answer if take is None else take(answer, address)

    async def _events(self, path: str, body: dict[str, Any], take: Take) -> AsyncIterator[Any]:
        """Yield what `take` makes of the data of each server-sent event, and of the server's address.

        Raises:
            EngineError: As for `_answered`; also for an error that is sent as an event.
        """
        line, ended, content, seen = b"", False, b"", False
        async with self._answered("POST", path, orjson.dumps(body)) as response:
            address = response.url.authority
            async for part in response.content.iter_any():
                content = content or part
                *lines, line = (line + part).split(b"\n")
                for data in (text[5:].strip() for text in lines if text.startswith(b"data:")):
                    seen = True
                    if ended := data == b"[DONE]":
                        continue
                    with _readable(address, path, data):
                        event = orjson.loads(data)
                        if error := event.get("error"):
                            self._refuse(address, path, int(error.get("code") or 400), data)
                        taken = take(event, address)
                    yield taken
            if content and not seen and not content.startswith(b"data:"):
                with _readable(address, path, content):
                    raise ValueError("it has no events")
            if not ended:
                raise EngineUnreachable(address, f"its answer to {path} ended in the middle")

    @contextlib.asynccontextmanager
    async def _answered(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200, as soon as it begins.

        Raises:
            EngineUnreachable: The server is away or not ready.
            FaultyAnswer: The answer does not come from an inference server, or the server fails.
            EngineError: The server refused the request; the message has the server's own words.
        """
        try:
            request = self._connected().request(method, self._url + path, data=body, allow_redirects=False)
            async with request as response:
                if response.status != 200:
                    self._refuse(self.address, path, response.status, await response.read())
                yield response
        except aiohttp.ClientResponseError as error:
            raise FaultyAnswer(
                self.address, f"it does not answer as HTTP does ({error.message}). {ADDRESS_HINT}"
            ) from error
        except aiohttp.ServerDisconnectedError as error:
            reason = "it closed the connection without an answer: it died, or this port expects TLS (https)"
            raise EngineUnreachable(self.address, reason) from error
        except aiohttp.ClientPayloadError as error:
            if isinstance(error.__cause__, ContentEncodingError):
                raise FaultyAnswer(
                    self.address, f"its answer to {path} is not compressed as its header says. {ADDRESS_HINT}"
                ) from error
            raise EngineUnreachable(self.address, f"its answer to {path} ended in the middle") from error
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise EngineUnreachable(self.address, str(error) or type(error).__name__) from error

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self.idle_s),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers=self._headers,
            )
        return self._session

    def _refuse(self, address: str, path: str, status: int, content: bytes) -> NoReturn:
        message = _message(content)
        if status in AWAY:
            raise EngineUnreachable(address, message or f"it answers with the status {status}")
        if status in (401, 403) and self.kind:  # `clew serve` says so itself
            message = sentence(message or "it wants a key")
            message = f"{message} If it was started with --api-key, give that key in {TOKEN_VARIABLE}."
        if status >= 500:
            raise FaultyAnswer(address, f"it failed at {path} ({status}): {message}")
        if status < 400 or status in (404, 405) or content.lstrip()[:1] == b"<":
            raise FaultyAnswer(address, f"it does not serve {path} ({status}): {message} {ADDRESS_HINT}")
        # `clew serve` names the type of its error in the body. These three are for the caller to handle.
        kinds = (RequestTooLong, SchemaUnsupported, ImageError)
        refusal = next((kind for kind in kinds if b'"%s"' % kind.__name__.encode() in content), EngineError)
        raise refusal(f"inference server {address} refused {path} ({status}): {message}")


@contextlib.contextmanager
def _readable(address: str, path: str, content: bytes) -> Iterator[None]:
    """Raise FaultyAnswer if the block cannot read what a server has answered."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        shown = content[:LONGEST_PAGE].decode(errors="replace")
        if not content:
            raise FaultyAnswer(address, f"its answer to {path} is empty. {ADDRESS_HINT}") from error
        raise FaultyAnswer(
            address, f"its answer to {path} cannot be read ({type(error).__name__}: {error}): {shown!r}. {ADDRESS_HINT}"
        ) from error


def wrong_numbers(completion: Completion, vocab: int | None) -> str:
    """Return why the tokens and logprobs of a completion cannot be right; "" if they can.

    Args:
        vocab: Number of token IDs; None: not known.
    """
    ids, logprobs = completion.output_ids, completion.logprobs
    if not len(ids) == len(logprobs) == len(completion.versions):
        return f"it returned {len(ids)} tokens, {len(logprobs)} logprobs and {len(completion.versions)} versions"
    # This runs for each event of a stream, and almost all are right: first check all numbers at once, which is quick.
    kinds = set(map(type, logprobs))
    numbers = kinds <= {float, int} and not math.isnan(sum(logprobs))
    if not numbers or not LOWEST_LOGPROB < min(logprobs, default=0.0) <= max(logprobs, default=0.0) <= LARGEST_LOGPROB:
        for logprob in logprobs:
            if type(logprob) not in (float, int) or not LOWEST_LOGPROB < logprob <= LARGEST_LOGPROB:  # NaN too
                return f"it returned the logprob {logprob}"
    limit = vocab or math.inf
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0 or max(ids, default=0) >= limit:
        bad = next(token for token in ids if type(token) is not int or not 0 <= token < limit)
        return f"it returned the token ID {bad!r}" + ("" if vocab is None else f", and the model has 0 to {vocab - 1}")
    return ""


def _check_masks(masks: list[list[int]] | None, output_ids: list[int], vocab: int | None) -> None:
    """Raise ValueError if the sampling masks cannot be those of the tokens. An empty mask stands for all tokens."""
    limit = vocab or 2**31
    if masks is None:
        return
    if len(masks) != len(output_ids):
        raise ValueError(f"{len(output_ids)} tokens and {len(masks)} sampling masks")
    for token, mask in zip(output_ids, masks, strict=True):
        if mask and mask.count(token) != 1:
            raise ValueError(f"the sampling mask of token {token} has it {mask.count(token)} times")
        if mask and not (set(map(type, mask)) <= {int} and min(mask) >= 0 and max(mask) < limit):
            raise ValueError(f"the sampling mask of token {token} has entries that are no tokens")


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


def completion_of(answer: dict[str, Any], server: str, *, labelled: bool = False) -> Completion:
    """Return the completion in a response of `/generate`; an event in the middle of a stream counts as aborted.

    Args:
        server: Name for the record, unless the answer itself has one: a `clew serve` names the server behind it.
        labelled: True if the answer must say which version made its tokens. If not, other labels count as 0.

    Raises:
        ValueError: The answer contradicts itself, or does not say the version.
    """
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    tokens = len(answer.get("output_ids", pairs))
    if len(pairs) not in (tokens, meta.get("completion_tokens")):  # a stream's events count differently
        raise ValueError(f"{tokens} tokens and {len(pairs)} logprobs")
    ids = [pair[1] for pair in pairs]
    if len(pairs) == tokens and answer.get("output_ids", ids) != ids:
        raise ValueError("output_ids has other tokens than output_token_logprobs")
    versions: list[int] = []
    more = meta.get("clew") or {}
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(pairs)}]
    for span, former in zip(spans, [None, *spans], strict=False):
        if former is not None and span["start"] != former["end"]:
            raise ValueError("its weight_versions do not follow one another")
        if span["end"] - span["start"] > MOST_TOKENS:
            raise ValueError(f"its weight_versions have a span of {span['end'] - span['start']} tokens")
        version = str(span["version"])
        is_version = version.isdigit() and int(version) <= LARGEST_VERSION
        if labelled and not is_version and span["end"] > span["start"]:
            raise ValueError(f"weight_version {version}")
        versions += [int(version) if is_version else 0] * (span["end"] - span["start"])
    ended: dict[str, Any] = meta["finish_reason"] or {"type": "abort"}
    if ended["type"] not in FINISH_REASONS:
        raise ValueError(f"finish_reason {ended['type']!r}")
    return Completion(
        output_ids=ids,
        logprobs=[pair[0] for pair in pairs],
        versions=versions,
        finish_reason=ended["type"],
        matched=ended.get("matched"),
        sampling_mask=more.get("sampling_mask"),
        sampled_by=spans_of(more.get("sampled_by") or spans, server),
        routed_experts=experts_of(more.get("routed_experts")),
    )


def final_versions(event: dict[str, Any]) -> list[int]:
    """Return each token's version from the last event of a stream; empty if it is not the last, or lacks some."""
    # Only once the answer is complete does a server know for sure which weights made which token.
    meta = event.get("meta_info") or {}
    if not meta.get("finish_reason") or "weight_versions" not in meta:
        return []
    versions = completion_of(event, "").versions
    return versions if len(versions) == meta["completion_tokens"] else []


def experts_of(encoded: str | None) -> np.ndarray | None:
    """Return an array from the base64 of a .npy file, in which vLLM and `clew serve` send routed experts."""
    if encoded is None:
        return None
    try:  # np.load also takes other kinds of files
        array = np.lib.format.read_array(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (Exception, MemoryError) as error:  # of many kinds: the header is parsed as Python
        raise ValueError(f"its routed experts cannot be read ({type(error).__name__}: {error})") from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(f"its routed experts are {array.dtype} of shape {array.shape}; expected [T, layers, experts]")
    return array


def _message(content: bytes) -> str:
    """Return the server's own error message."""
    try:
        said = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")[: LONGEST_PAGE if content.lstrip()[:1] == b"<" else LONGEST_MESSAGE]
    if isinstance(said, dict):
        error = said.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        said = said.get("message", said)
    return str(said)[:LONGEST_MESSAGE]
