"""Providers, as a process of their own: what speaks the dialects, wants its own key and takes no token ids.

    python -m tests.stress.providers LATENCY_S

/chance/v1 answers by chance, /steady/v1 the same to the same, /few/v1 like it, but refuses more than FEW at once;
/mute/v1 does not answer.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.app import application, disconnected, key_of
from clew.gateway.episode_engine import EpisodeEngine, Resources
from clew.gateway.gateway_thread import ServingThread
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.stress.standin import StandIn, byte_tokenizer

KEY = "sk-theirs"
FEW = 3


class Steady(StandIn):
    """Provider whose answers follow from the prompt alone."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, id=""))


class Strangers:
    """Each request is one by itself, with an ID that no other has."""

    models = None

    def __init__(self, engine: StandIn, tokenizer: Any) -> None:
        sampling = SamplingParams(max_new_tokens=512)
        self._resources = Resources(
            engine=engine, tokenizer=tokenizer, sampling=sampling, seed=0, prompt_column="prompt", reward=None
        )
        self._numbers = itertools.count()

    def find(self, key: str) -> AgentSession:
        return AgentSession(EpisodeEngine(self._resources, f"g{next(self._numbers):06d}.e0"), Limits())

    def own(self, key: str) -> AgentSession:
        return self.find(key)

    def start(self, key: str) -> tuple[AgentSession, str]:
        raise NotImplementedError

    def end(self, key: str) -> None:
        raise NotImplementedError


class Providers:
    """ASGI."""

    def __init__(self, latency_s: float) -> None:
        tokenizer = byte_tokenizer()
        chance, steady = (kind(tokenizer, latency_s=latency_s) for kind in (StandIn, Steady))
        self._apps = {"chance": application(Strangers(chance, tokenizer))}
        self._apps |= dict.fromkeys(("steady", "few"), application(Strangers(steady, tokenizer)))
        self._busy = self._refused = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        http = Request(scope)
        kind, _, path = http.url.path[1:].partition("/")
        if http.method != "POST" or kind not in (*self._apps, "mute"):
            await JSONResponse({"error": {"message": "not found"}}, 404)(scope, receive, send)
        elif key_of(http) != KEY:
            await JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)(scope, receive, send)
        elif kind == "mute":
            await disconnected(Request(scope, receive))
        elif kind == "few" and self._busy >= FEW:
            self._refused += 1
            message = f"Rate limit reached for requests; see req-7f-{self._refused}"
            await JSONResponse({"error": {"message": message, "code": "rate_limit"}}, 429)(scope, receive, send)
        else:
            self._busy += kind == "few"
            try:
                await self._apps[kind]({**scope, "path": f"/{path}"}, receive, send)
            finally:
                self._busy -= kind == "few"


@contextmanager
def providing(latency_s: float) -> Iterator[str]:
    """The address of the process, while it runs."""
    command = [sys.executable, "-m", "tests.stress.providers", str(latency_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()  # that ends it


if __name__ == "__main__":
    thread = ServingThread(GZipMiddleware(Providers(float(sys.argv[1])), minimum_size=1))
    print(thread.base_url.removesuffix("/v1"), flush=True)
    sys.stdin.read()
    thread.stop()
