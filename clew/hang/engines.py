"""Asks a job's local HTTP servers whether they are paused or healthy, and whether their counters move."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException

from clew.hang.observed import Process

ANSWER_S = 1.0
"""Time limit in seconds for each answer: a server whose event loop is blocked gives none."""
BETWEEN_S = 0.5
SERVERS = re.compile(r"http/server\.py$|socketserver\.py$|/(uvicorn|aiohttp|hypercorn|starlette|fastapi|vllm|sglang)/")
"""Files in the stacks of HTTP servers. No other process that listens is asked anything."""
COUNTERS = re.compile(r"^([\w:]*(?:tokens?|_success)_total(?:\{.*\})?)\s+([\d.eE+]+)", re.M)
"""Counters of generated tokens and finished requests. Counters of HTTP requests would also count those made here."""


def answers(process: Process, ports: tuple[int, ...], source: str) -> dict[str, str]:
    """Return what an HTTP server answers; empty for any other process, which is not asked.

    A server written with http.server may count requests, or answer any path with a file. It is asked only if its own
    source mentions one of the paths that are asked for here.
    """
    files = [frame.file for thread in process.threads for frame in thread.frames]
    if not ports or process.rank is not None or not any(SERVERS.search(file) for file in files):
        return {}
    by_hand = any(file.endswith(("http/server.py", "socketserver.py")) for file in files)
    if by_hand and not any(path in source for path in ("/health", "is_paused", "/metrics")):
        return {}
    found: dict[str, str] = {}
    for port in ports[:2]:
        health = _get(port, "health")
        if health is None:
            found.setdefault("health", "no answer")
            continue  # the other port may speak HTTP
        if found.get("health", "no answer") == "no answer" or health[0] >= 500:
            found["health"] = str(health[0])
        paused = _get(port, "is_paused")
        if paused is not None and (said := _paused(paused[1])):
            found["is_paused"] = said
        before = _get(port, "metrics")
        if before is not None and COUNTERS.search(before[1]):
            time.sleep(BETWEEN_S)
            after = _get(port, "metrics")
            moved = after is not None and COUNTERS.findall(before[1]) != COUNTERS.findall(after[1])
            found["metrics"] = "moving" if moved else "still"
    return found


def _get(port: int, path: str) -> tuple[int, str] | None:
    """Return status and text of an answer; None if there was none in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/{path}", timeout=ANSWER_S) as reply:
            return reply.status, reply.read(200_000).decode(errors="replace")
    except urllib.request.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError, HTTPException):  # HTTPException: the port speaks another protocol
        return None


def _paused(text: str) -> str:
    """Return "true" or "false" as an engine says it; "" if it says neither."""
    with suppress(ValueError):
        value = json.loads(text)
        value = value.get("is_paused", value.get("paused")) if isinstance(value, dict) else value
        if isinstance(value, bool):
            return str(value).lower()
    return ""
