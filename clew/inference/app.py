"""The HTTP application of `clew serve`.

`/generate` is plain ASGI: with the smallest models, a step takes a millisecond, and each layer between socket and
engine costs noticeable time. Everything else goes through Starlette.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clew.errors import EngineError
from clew.http_server import ASGI, LARGE_BODY, LARGE_TEXT, Message, Receive, Send, max_text, respond
from clew.inference.generate_api import Call, RequestedSequence, answer, parse_call
from clew.inference.local import LocalEngine
from clew.inference.protocol import (
    Completion,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    RequestTooLong,
    Timings,
)
from clew.inference.remote import RemoteEngine
from clew.models.vision import Vision
from clew.reading import wrong_field
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef
from clew.waits import waiting

PAUSE_LEASE_S = 60.0
"""Seconds that a pause lasts if the caller names no lease_s, and that memory stays released outside a pause."""

MAX_LEASE_S = 600.0
"""Maximum seconds of a pause; a caller who needs a longer one renews it."""

ServedEngine = LocalEngine | RemoteEngine


class Application:
    """ASGI application of `clew serve`. `clew.http_server.Guard`, which stands before it, decides who may call it."""

    def __init__(
        self,
        engine: ServedEngine,
        model_path: str,
        beside: ASGI | None = None,
        weights_below: Iterable[Path] = (),
    ) -> None:
        """Create the application.

        Args:
            model_path: Folder or hub name of the model that the engine serves.
            beside: Application that answers all requests outside SGLang's interface.
            weights_below: Folders that weights may be loaded from, including their subfolders.
        """
        self.engine = engine
        self._weights_below = [folder.resolve() for folder in weights_below]
        folder = Path(model_path).expanduser()
        self.model_path = str(folder.resolve()) if folder.is_dir() else model_path
        self.ready = asyncio.Event()
        """Set when the newest weights have been loaded. Until then, requests for generation are refused or wait."""
        self.updating = asyncio.Lock()
        """Lock held during each weight update, so that `clew serve` does not load the same weights again."""
        administration = _Administration(self)
        routes = administration.routes()
        self._admin = Starlette(routes=routes, exception_handlers={EngineError: administration.refused})
        self._admin_paths = {route.path for route in routes}
        self._beside = beside or self._admin

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(receive, send)
        elif scope["type"] != "http" or scope["path"] in self._admin_paths:
            await self._admin(scope, receive, send)
        else:
            if scope["type"] == "http" and scope["method"] == "POST" and not self.ready.is_set():
                with waiting("the newest weights", unblocks="the inference engine"):
                    await self.ready.wait()
            await self._beside(scope, receive, send)

    def refuse_foreign_weights(self, path: str) -> None:
        """Raise EngineError unless a folder, and each file of weights in it, lies below `weights_below`."""
        folder = Path(path).resolve()
        for place in (folder, *(file.resolve() for file in folder.glob("*.safetensors"))):
            if not any(place.is_relative_to(allowed) for allowed in self._weights_below):
                above = place if place.parent == Path(place.anchor) else place.parent
                allowed = ", ".join(map(str, self._weights_below)) or "nowhere"
                raise EngineError(
                    f"Cannot load weights from {path}: {place} lies outside the folders that this server loads from "
                    f"({allowed}). Start it with `clew serve --allow-weights {above}`."
                )

    def refuse_while_starting(self) -> None:
        if not self.ready.is_set():
            raise EngineUnreachable("", "starting: the weights are being loaded")

    async def _generate(self, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        gone: asyncio.Future[None] | None = None
        try:
            self.refuse_while_starting()
            content, stop_ids = orjson.loads(body), self.engine.core.default_stop_ids
            large = len(body) > LARGE_BODY
            call = await asyncio.to_thread(parse_call, content, stop_ids) if large else parse_call(content, stop_ids)
            requests = [
                GenerateRequest(
                    await self._ids(wanted),
                    wanted.params,
                    wanted.images,
                    wanted.rid or f"clew-{secrets.token_hex(8)}",  # for `/abort_request`
                    sampling_mask=call.sampling_mask,
                )
                for wanted in call.sequences
            ]
            if call.stream:
                await self._stream(call, requests, receive, send)
                return
            answers = [asyncio.ensure_future(self._one(call, each)) for each in enumerate(requests)]
            work = answers[0] if call.single else asyncio.gather(*answers)
            gone = asyncio.ensure_future(_disconnected(receive, work))
            try:
                content = await work
            finally:
                for task in (gone, *answers):  # if one prompt is refused, nobody gets the others' answers
                    task.cancel()
            await respond(send, 200, content)
        except asyncio.CancelledError:
            if gone is None or not gone.done():  # the server is ending; otherwise the client has gone
                raise
        except orjson.JSONDecodeError as error:
            await respond(send, 400, {"error": {"message": f"the body is not JSON: {error}"}})
        except EngineError as error:
            content = self._refusal(error)
            await respond(send, content["error"]["code"], content)

    def _refusal(self, error: BaseException) -> dict[str, Any]:
        """Return an error as JSON. From its code, clients see whether to send the request again."""
        code = 500 if isinstance(error, FaultyAnswer) else 400
        if isinstance(error, EngineUnreachable) or self.engine.failure is not None:  # not the request's fault
            code = 503
        return {"error": {"message": str(error), "type": type(error).__name__, "code": code}}

    async def _one(self, call: Call, numbered: tuple[int, GenerateRequest]) -> dict[str, Any]:
        index, request = numbered
        return self.part_of_response(call, index, request, await self.engine.generate(request))

    def part_of_response(
        self, call: Call, index: int, request: GenerateRequest, completion: Completion
    ) -> dict[str, Any]:
        """Return the part of the response with the sequence of this index in the call."""
        if call.return_logprob and completion.wrong_logprobs:  # nobody may train on them unknowingly
            raise EngineError(completion.wrong_logprobs)
        text = ""
        if call.with_text and self.engine.core.tokenizer is not None:
            text = call.sequences[index].text_of(completion, self.engine.core.tokenizer)
        return answer(request.id, request, completion, text=text, logprobs=call.return_logprob)

    async def _ids(self, wanted: RequestedSequence) -> list[int]:
        """Return the prompt's tokens, with placeholders of images expanded to the tokens that stand for them."""
        vision = self.engine.core.vision
        if wanted.images and vision is not None:
            return await asyncio.to_thread(self._ids_with_images, wanted, vision)
        if not isinstance(wanted.prompt, str):
            return wanted.prompt
        if len(wanted.prompt) < LARGE_TEXT:
            return self._tokenized(wanted.prompt)
        return await asyncio.to_thread(self._tokenized, wanted.prompt)  # so that other requests need not wait

    def _tokenized(self, text: str) -> list[int]:
        tokenizer = self.engine.core.tokenizer
        if tokenizer is None:
            raise EngineError("text needs a tokenizer, and this server has none. Send input_ids.")
        if len(text) > (limit := max_text(self.engine.core.context)):
            raise RequestTooLong(
                f"the prompt has {len(text)} characters; for this model's context at most {limit} are read."
            )
        return tokenizer(text)["input_ids"]

    def _ids_with_images(self, wanted: RequestedSequence, vision: Vision) -> list[int]:
        if not isinstance(wanted.prompt, str):
            return vision.expanded_ids(wanted.prompt, wanted.images)
        expands = wanted.prompt.count(vision.placeholder) == len(wanted.images)
        return self._tokenized(vision.expanded(wanted.prompt, wanted.images) if expands else wanted.prompt)

    async def _stream(self, call: Call, requests: list[GenerateRequest], receive: Receive, send: Send) -> None:
        """Answer with server-sent events.

        As with SGLang, each event has the whole output so far; if the call asks for `deltas`, it has only what is new.
        The last event always has the whole output.
        """
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        for request in requests:
            self.engine.core.check(request)  # refusals come before the first event
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
            }
        )
        streams = [_SequenceStream(self, call, request, index, events) for index, request in enumerate(requests)]
        answers = [asyncio.ensure_future(stream.run()) for stream in streams]
        work = asyncio.gather(*answers)
        work.add_done_callback(lambda _: events.put_nowait(None))
        gone = asyncio.ensure_future(_disconnected(receive, work))
        try:
            while (event := await events.get()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            if not work.cancelled() and (error := work.exception()):
                message = orjson.dumps(self._refusal(error))
                await send({"type": "http.response.body", "body": b"data: " + message + b"\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            for task in (gone, *answers):
                task.cancel()


class _SequenceStream:
    """One sequence of a call, which is sent as events while its tokens come."""

    def __init__(
        self,
        application: Application,
        call: Call,
        request: GenerateRequest,
        index: int,
        events: asyncio.Queue[bytes | None],
    ) -> None:
        self._application, self._call, self._request = application, call, request
        self._index, self._events = index, events
        self._ends = request.params.stop_ids(application.engine.core.default_stop_ids)
        self._output: list[int] = []
        self._logprobs: list[float] = []
        self._version = self._passed_on = 0

    async def run(self) -> None:
        completion = await self._application.engine.generate(replace(self._request, on_token=self._on_token))
        self._put(self._application.part_of_response(self._call, self._index, self._request, completion))

    def _on_token(self, token: int, logprob: float) -> None:
        if not self._output:  # not earlier: the request may have waited for an update to end
            self._version = self._application.engine.core.version
        self._output.append(token)
        self._logprobs.append(logprob)
        # The token that ends the completion is sent only in the last event. If it were sent earlier and the last event
        # were lost, a client would send the request again and continue past its end. With stop strings, the newest
        # token is held back, too: it may complete one.
        ready = len(self._output) - bool(self._request.params.stop)
        if token in self._ends or not ready:
            return
        shown = slice(self._passed_on if self._call.deltas else 0, ready)
        self._passed_on = ready
        ids, logprobs = self._output[shown], self._logprobs[shown]
        part = Completion(
            output_ids=ids, logprobs=logprobs, versions=[self._version] * len(ids), finish_reason="length"
        )
        event = self._application.part_of_response(self._call, self._index, self._request, part)
        event["meta_info"] |= {"finish_reason": None, "completion_tokens": ready}
        self._put(event)

    def _put(self, event: dict[str, Any]) -> None:
        if not self._call.single:
            event["index"] = self._index
        self._events.put_nowait(b"data: " + orjson.dumps(event) + b"\n\n")


async def _disconnected(receive: Receive, work: asyncio.Future[Any]) -> None:
    """Cancel `work` when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def weight_ref(body: dict[str, Any], next_version: int) -> WeightRef:
    """Return the weights that the body of `/update_weights_from_disk` names.

    Args:
        next_version: Version of the weights if the body has no weight_version.

    Raises:
        EngineError: A field is wrong; the message names it.
    """
    path, version, clew = body.get("model_path"), body.get("weight_version", next_version), body.get("clew") or {}
    if not isinstance(path, str) or "\0" in path:
        expected = "expected a folder with *.safetensors that this server can read"
        raise EngineError(f"Cannot load weights: model_path is {path!r}, {expected}.")
    if isinstance(version, bool) or not (str(version).isascii() and str(version).isdigit() and int(version) < 2**31):
        raise EngineError(f"weight_version is {version!r}, expected a whole number of steps.")
    if not isinstance(clew, dict):
        raise EngineError(f"clew is {type(clew).__name__}, expected an object with digest, probe_ids, probe_logprob.")
    ids, logprob = clew.get("probe_ids", []), clew.get("probe_logprob", 0.0)
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise EngineError("clew.probe_ids: expected a list of integers.")
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not math.isfinite(logprob):
        raise EngineError(f"clew.probe_logprob is {logprob!r}, expected a number.")
    return WeightRef(
        version=int(version), path=path, digest=str(clew.get("digest", "")), probe_ids=ids, probe_logprob=float(logprob)
    )


async def _read(request: Request) -> dict[str, Any]:
    """Return the body of a request, {} if it has none. Raises EngineError if it is not a JSON object."""
    body = await request.body()
    try:
        content = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineError(f"the body is {type(content).__name__}, expected a JSON object.")
    return content


def _check_tags(body: dict[str, Any]) -> None:
    if body.get("tags") not in (None, ["kv_cache"]):
        raise EngineError(f'tags is {body["tags"]!r}: this server gives back only its cache, tags ["kv_cache"].')


class _Administration:
    """The endpoints other than `/generate`, modelled on SGLang's."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._engine = application.engine

    def routes(self) -> list[Route]:
        posts = (
            self.pause_generation,
            self.continue_generation,
            self.release_memory_occupation,
            self.resume_memory_occupation,
            self.abort_request,
            self.update_weights_from_disk,
            self.receive_weights,
            self.flush_cache,
        )
        return [
            Route("/health", self.health),
            Route("/health_generate", self.health),  # polled by scripts that start SGLang
            Route("/model_info", self.model_info),
            Route("/get_model_info", self.model_info),  # its name in older versions of SGLang
            *(Route(f"/{post.__name__}", post, methods=["POST"]) for post in posts),
        ]

    async def refused(self, request: Request, error: Exception) -> Response:
        away = isinstance(error, EngineUnreachable) or self._engine.failure is not None
        return JSONResponse({"error": {"message": str(error)}}, 503 if away else 400)

    async def health(self, request: Request) -> Response:
        if self._application.ready.is_set() and not self._engine.core.broken:
            return Response(status_code=200)
        return Response(self._engine.core.broken or "starting", 503)

    async def model_info(self, request: Request) -> Response:
        self._application.refuse_while_starting()
        core = self._engine.core
        return JSONResponse(
            {
                "model_path": self._application.model_path,
                "tokenizer_path": self._application.model_path,
                "is_generation": True,
                "has_image_understanding": core.vision is not None,
                "weight_version": str(await self._engine.version()),
                "max_context_length": core.context,
                "running": core.running(),
                "waiting": len(core.waiting),
                "paused": self._engine.paused,
                "released": self._engine.released,
                "cache_bytes": core.cache_bytes(),
            }
        )

    async def pause_generation(self, request: Request) -> Response:
        body = await _read(request)
        if body.get("mode", "abort") != "abort":
            raise EngineError(f'pause mode {body["mode"]!r}: this server knows only "abort".')
        lease = body.get("lease_s", PAUSE_LEASE_S)
        if type(lease) not in (int, float) or not 0 < lease <= MAX_LEASE_S:  # a bool is an int
            raise EngineError(f"lease_s is {lease!r}, expected seconds, above 0 and at most {MAX_LEASE_S:g}.")
        await self._engine.pause(lease)
        return JSONResponse({"message": f"Generation paused; it resumes by itself after {lease:g} s.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued.", "status": "ok"})

    async def release_memory_occupation(self, request: Request) -> Response:
        _check_tags(await _read(request))
        await self._engine.release_memory(PAUSE_LEASE_S)
        return JSONResponse({"message": "The cache's memory is free; requests wait.", "status": "ok"})

    async def resume_memory_occupation(self, request: Request) -> Response:
        _check_tags(await _read(request))
        await self._engine.resume_memory()
        return JSONResponse({"message": "The cache's memory may be taken again.", "status": "ok"})

    async def abort_request(self, request: Request) -> Response:
        body = await _read(request)
        if not body.get("abort_all") and not body.get("rid"):
            raise EngineError("expected rid, or abort_all: true.")
        await self._engine.abort(None if body.get("abort_all") else str(body["rid"]))
        return Response(status_code=200)

    async def receive_weights(self, request: Request) -> Response:
        """Receive the weights that the trainer broadcasts. `/update_weights_from_disk` then serves them.

        SGLang does not have this endpoint.
        """
        content = await _read(request)
        try:
            sent = TypeAdapter(Broadcast).validate_python(content)
        except ValidationError as error:
            raise EngineError(wrong_field(error.errors()[0])) from None
        message = f"version {sent.version} is received"
        return await self._update(message, lambda: self._engine.receive_weights(sent))

    async def update_weights_from_disk(self, request: Request) -> Response:
        ref = weight_ref(await _read(request), self._engine.core.version + 1)

        async def load() -> Timings:
            self._application.refuse_foreign_weights(ref.path)
            return await self._engine.load_weights(ref)

        return await self._update(f"version {ref.version} is loaded", load)

    async def _update(self, message: str, change: Callable[[], Awaitable[Timings]]) -> Response:
        """Make a change to the weights, and answer with `message`, or with the error of a refused change."""
        try:
            async with self._application.updating:
                seconds = await change()
        except asyncio.CancelledError:
            raise EngineUnreachable("", "the server is ending, and did not load the weights") from None
        except EngineUnreachable:  # the engine died or froze; before it serves again, it loads the newest weights
            raise
        except EngineError as error:
            if self._engine.failure is not None:
                raise
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        serves = {"weight_version": str(self._engine.core.version), "clew": seconds}
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0, **serves})

    async def flush_cache(self, request: Request) -> Response:
        """Do nothing: the embedded engine keeps nothing to flush, and vLLM and SGLang are flushed at each load."""
        return Response("Cache flushed.\n")
