"""One base URL for every client: OpenAI's ends in /v1, Anthropic's does not and adds it itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
ASGI = Callable[[Scope, Any, Any], Awaitable[None]]

ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


class AnyBase:
    """ASGI: /v1/v1/messages and /chat/completions are what they mean."""

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.startswith("/v1/v1/"):
            scope = {**scope, "path": path[3:]}
        elif path.startswith(ENDPOINTS):
            scope = {**scope, "path": f"/v1{path}"}
        await self._app(scope, receive, send)
