"""One dialect behind HTTP: a few lines in the place of the gateway, which answer with the replies they are given."""

import json
from collections.abc import Sequence

import httpx2

from clew.gateway.dialect import Dialect, ModelRequest, Refusal, Reply, Stream, ToolCall
from clew.gateway.interactions import Interaction
from clew.gateway.reply_so_far import deltas_of
from clew.inference.protocol import SamplingParams

ID = "g000007.e1.i0"


def made(content="", *, reasoning="", tool_calls=(), finish_reason=None, tokens=(), stop_string=None, id=ID) -> Reply:
    """A reply to 3 tokens, of 2 tokens. tool_calls: pairs of a name and arguments."""
    interaction = Interaction(
        id=id, index=0, input_ids=[1, 2, 3], output_ids=[4, 5], logprobs=[-0.5, -0.25], versions=[0, 0],
        finish_reason="stop", text="", params=SamplingParams(), prompt=None, started_at=1e9, finished_at=1e9 + 2,
    )  # fmt: skip
    calls = [
        ToolCall(id=f"call_{id}.{number}", name=name, arguments=json.dumps(arguments))
        for number, (name, arguments) in enumerate(tool_calls)
    ]
    return Reply(
        interaction=interaction,
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        finish_reason=finish_reason or ("tool_calls" if calls else "stop"),
        stop_string=stop_string,
        tokens=tokens,
    )


class Served:
    """An ASGI application. It answers the n-th request with the n-th reply, or refuses it."""

    def __init__(self, dialect: Dialect, *answers: Reply | Refusal) -> None:
        self.requests: list[ModelRequest] = []
        self.responses: list[dict] = []
        self.events: list[tuple[str, dict]] = []
        """Events of all streams: the name and the data of each."""
        self._dialect = dialect
        self._answers = list(answers)
        transport = httpx2.ASGITransport(app=self)
        self.http_client = httpx2.AsyncClient(transport=transport)
        """HTTP client for the providers' clients."""

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        status, chunks = 200, []
        try:
            request = self._dialect.parse(json.loads(body))
            self.requests.append(request)
            if request.stream:
                chunks = [chunk async for chunk in self._stream(request)]
            else:
                self.responses.append(self._dialect.respond(request, await self._reply()))
                chunks = [json.dumps(self.responses[-1]).encode()]
        except Refusal as refusal:
            status, chunks = refusal.status, [json.dumps(self._dialect.refuse(refusal)).encode()]
        content_type = b"text/event-stream" if chunks[0].startswith(b"event") else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})
        await send({"type": "http.response.body", "body": b"".join(chunks)})

    async def _reply(self) -> Sequence[Reply]:
        answer = self._answers.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        return [answer]

    async def _stream(self, request: ModelRequest):
        async def deltas():
            if isinstance(self._answers[0], Reply):
                for delta in deltas_of(self._answers[0]):
                    yield delta

        stream = Stream(ids=[ID], created_at=1e9, input_ids=[1, 2, 3], deltas=deltas(), replies=self._reply)
        place = len(self.events)
        try:
            async for chunk in self._dialect.events(request, stream):
                yield self._noted(chunk)
        except Refusal as refusal:
            yield self._noted(self._dialect.refuse_in_stream(refusal, len(self.events) - place))
            yield self._dialect.KEEP_ALIVE

    def _noted(self, chunk: bytes) -> bytes:
        for event in chunk.decode().removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            self.events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return chunk

    def names(self) -> list[str]:
        """Return the names of the events, each of which says its name twice."""
        assert all(name == data["type"] for name, data in self.events)
        return [name for name, _ in self.events]
