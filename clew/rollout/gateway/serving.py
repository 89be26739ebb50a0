"""The gateway beside an inference server, in one process: `clew serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.config import Config
from clew.record.run import RunDirectory
from clew.rollout.gateway.app import application
from clew.rollout.gateway.paths import AnyBase
from clew.rollout.gateway.served import ServedSessions
from clew.rollout.session import resources
from clew.vision import Sight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY_KEY = "sk-clew"
"""On a loopback address any will do."""


class ServedGateway:
    """What `clew.inference.server.serve` has beside itself."""

    def __init__(self, sessions: ServedSessions, tokenizer: PreTrainedTokenizerBase, token: str) -> None:
        self.app = AnyBase(application(sessions))
        self._sessions = sessions
        self._chat = tokenizer.chat_template is not None
        self._token = token

    def launched(self, address: str) -> None:
        """Print how to reach it, in lines that can be pasted."""
        key = ANY_KEY if not self._token else self._sessions.start(self._token)[1]
        model = self._sessions.models[0] if self._sessions.models else "any"
        path, asked = ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
        if not self._chat:
            path, asked = "completions", {"prompt": "Hello"}
        body = json.dumps({"model": model, **asked, "max_tokens": 16})
        print(
            f"OpenAI     http://{address}/v1    Anthropic  http://{address}\n"
            f"export OPENAI_BASE_URL=http://{address}/v1 OPENAI_API_KEY={key}\n"
            f"export ANTHROPIC_BASE_URL=http://{address} ANTHROPIC_API_KEY={key}\n"
            f"curl http://{address}/v1/{path} -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' "
            f"-d '{body}'",
            flush=True,
        )
        if self._token:
            print(
                f"This key is one session's. For another: curl -X POST http://{address}/rl/start_session "
                f"-H 'Authorization: Bearer {self._token}'",
                flush=True,
            )

    async def run(self) -> None:
        """End sessions that nobody uses, and all of them at the end."""
        try:
            await self._sessions.end_idle()
        finally:
            await self._sessions.close()


def gateway_beside(config: Config, record: Path | None) -> Callable[[Any, str], ServedGateway]:
    """Made by the server once it has its engine."""

    def make(engine: Any, token: str) -> ServedGateway:
        core = engine.core
        return gateway_on(config, engine, core.tokenizer, config.model.path, record, token, vision=core.vision)

    return make


def gateway_on(
    config: Config,
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    record: Path | None,
    token: str,
    *,
    vision: Sight | None,
) -> ServedGateway:
    """In front of an engine of this event loop. model: its folder or hub name. token: of who may open sessions; empty
    where any key will do. vision: of a model and an engine that take images."""
    media = RunDirectory(record).media if record is not None else None
    shared = resources(config, engine, tokenizer, None, vision=vision, media=media)
    names = dict.fromkeys([model, Path(model).name])
    sessions = ServedSessions(shared, list(names), token=token, record=record)
    return ServedGateway(sessions, tokenizer, token)
