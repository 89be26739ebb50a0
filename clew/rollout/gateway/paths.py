"""One base URL for all clients, although OpenAI's ends in /v1, and Anthropic's does not: its client adds /v1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
ASGI = Callable[[Scope, Any, Any], Awaitable[None]]

ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


class AnyBase:
    """ASGI middleware that serves /v1/v1/messages and /chat/completions as /v1/messages and /v1/chat/completions."""

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.startswith("/v1/v1/"):
            scope = {**scope, "path": path[3:]}
        elif path.startswith(ENDPOINTS):
            scope = {**scope, "path": f"/v1{path}"}
        await self._app(scope, receive, send)
