"""The gateway beside an inference server in one process: `clew serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.config import TOKEN_VARIABLE, Config
from clew.printing import print
from clew.record.run import RunDirectory
from clew.rollout.gateway.app import application
from clew.rollout.gateway.paths import AnyBase
from clew.rollout.gateway.served import ServedSessions
from clew.rollout.session import resources
from clew.vision import Sight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY_KEY = "sk-clew"
"""API key shown to clients if any key will do, as on a loopback address."""


class ServedGateway:
    """The gateway as the application that `clew.inference.serve.serve` runs beside itself."""

    def __init__(self, sessions: ServedSessions, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
        """Make the application.

        Args:
            sessions: The sessions.
            tokenizer: Tokenizer of the model.
            key: Key that clients have to send; empty if any will do.
        """
        self.app = AnyBase(application(sessions))
        self.has_session = sessions.has_session
        self._sessions = sessions
        self._chat = tokenizer.chat_template is not None
        self._key = key

    def launched(self, address: str) -> None:
        """Print how to reach the gateway, in lines that can be pasted into a shell."""
        key = self._key or ANY_KEY
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
        if self._key:
            print(
                f"All requests with this key are one session. For another: curl -X POST http://{address}"
                f'/rl/start_session -H "Authorization: Bearer ${TOKEN_VARIABLE}"',
                flush=True,
            )

    async def run(self) -> None:
        """End sessions that nobody uses, and at the end all sessions."""
        try:
            await self._sessions.end_idle()
        finally:
            await self._sessions.close()


def gateway_beside(config: Config, record: Path | None) -> Callable[[Any, str], ServedGateway]:
    """Return a function that makes the gateway; the server calls it once it has its engine."""

    def make(engine: Any, key: str) -> ServedGateway:
        core = engine.core
        return gateway_on(config, engine, core.tokenizer, config.model.path, record, key, vision=core.vision)

    return make


def gateway_on(
    config: Config,
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    record: Path | None,
    key: str,
    *,
    vision: Sight | None,
) -> ServedGateway:
    """Return a gateway in front of an engine of this event loop.

    Args:
        config: Configuration.
        engine: The engine.
        tokenizer: Tokenizer of the model.
        model: Folder or hub name of the model.
        record: Run directory that ended sessions are filed in; None: nothing is recorded.
        key: Key that clients have to send; empty if any will do.
        vision: Image input, if the model and the engine take images.
    """
    media = RunDirectory(record).media if record is not None else None
    shared = resources(config, engine, tokenizer, None, vision=vision, media=media)
    names = dict.fromkeys([model, Path(model).name])
    sessions = ServedSessions(shared, list(names), record=record)
    return ServedGateway(sessions, tokenizer, key)
