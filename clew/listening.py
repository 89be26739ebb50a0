"""What every HTTP server of Clew's has alike: uvicorn, and an event loop that nobody may hold up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

LARGE_TEXT = 50_000
"""Characters of a text whose tokens are made beside the event loop: some 20 ms."""


class Listener(uvicorn.Server):
    """Serves an ASGI application on the running event loop; `should_exit = True` ends it. Signals are its owner's:
    uvicorn's own handler would raise them again, past all clean-up."""

    def __init__(self, application: Any) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                loop="none",
                http="httptools",
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=3600,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
