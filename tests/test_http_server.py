"""Raw requests to a `GuardedServer`: who may call it, how much a client may send, and how slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clew import http_server
from clew.http_server import Access, GuardedServer, is_loopback, respond

TOKEN, KEY = "the-run's-token", "sk-clients"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Echo a request."""
    message = await receive() if scope["method"] == "POST" else {"body": b""}
    await respond(send, 200, {"path": scope["path"], "bytes": len(message["body"])})


@contextmanager
def listening_with(access: Access) -> Iterator[int]:
    """Yield a port served by a thread."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = GuardedServer(echo, access)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening_with(Access(token=TOKEN)) as port:
        yield port


@pytest.fixture(scope="module")
def open_port() -> Iterator[int]:
    """Port of a server with `loopback=False`."""
    access = Access(loopback=False, token=TOKEN, key=KEY, has_session=lambda key: key == "sk-session")
    with listening_with(access) as port:
        yield port


def ask(port: int, line: str, *headers: str, body: bytes = b"{}", version: str = "1.1") -> tuple[int, Any]:
    """Return status and body of the answer to `line`, such as GET /health. Host is localhost unless in `headers`."""
    given = [*headers]
    if version == "1.1" and not any(each.lower().startswith("host:") for each in headers):
        given.append("Host: localhost")
    if body and line.startswith("POST"):
        given.append(f"Content-Length: {len(body)}")
    else:
        body = b""
    head = "\r\n".join([f"{line} HTTP/{version}", *given, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(head.encode("latin-1") + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(content) if content[:1] == b"{" else content


JSON = "Content-Type: application/json"
BEARER = f"Authorization: Bearer {TOKEN}"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:9000", "[::1]", "127.0.0.2:1"])
def test_on_loopback_loopback_hosts_are_allowed_with_any_port(port: int, host: str) -> None:
    assert ask(port, "POST /generate", f"Host: {host}", JSON) == (200, {"path": "/generate", "bytes": 2})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example:80",
        "localhost.",
        "0.0.0.0:80",
        "10.0.0.1",
        "127.1",
        "2130706433",
        "localhost@evil.example",
        "localhost:80:80",
        "[::1",
        "127.0.0.1.evil.example",
    ],
)
def test_on_loopback_another_host_is_refused(port: int, host: str) -> None:
    status, answer = ask(port, "POST /generate", f"Host: {host}", JSON)
    assert status == 403 and "listens on loopback" in answer["error"]["message"]
    assert ask(port, "GET /health", f"Host: {host}")[0] == 403
    assert ask(port, "POST /pause_generation", f"Host: {host}", JSON, BEARER)[0] == 403


def test_no_host_and_two_hosts_are_refused(port: int) -> None:
    assert ask(port, "GET /health", version="1.0")[0] == 403
    assert ask(port, "GET /health", "Host: localhost", version="1.0")[0] == 200
    assert ask(port, "GET /health", "Host: localhost", "Host: evil.example")[0] in (400, 403)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:5173", 200),
        ("https://127.0.0.1", 200),
        ("HTTP://[::1]:1", 200),
        ("null", 403),
        ("", 403),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost@evil.example", 403),
        ("http://localhost:80/path", 403),
        ("file://localhost", 403),
    ],
)
def test_web_pages_of_other_sites_are_refused(port: int, origin: str, status: int) -> None:
    for line in ("POST /generate", "GET /model_info", "OPTIONS /generate", "POST /v1/chat/completions"):
        assert ask(port, line, f"Origin: {origin}", JSON)[0] == status


def test_changes_of_a_server_need_the_token_also_on_loopback(port: int) -> None:
    changes = ["pause_generation", "continue_generation", "abort_request", "update_weights_from_disk", "flush_cache"]
    changes += ["release_memory_occupation", "resume_memory_occupation", "rl/start_session"]
    for path in [*changes, "pause_generation/", "/pause_generation", "Pause_Generation", "%70ause_generation"]:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for credentials in (
                "X: y",
                "Authorization: Bearer None",
                "Authorization: Basic eDp5",
                "x-api-key: sk-clew",
            ):
                status, answer = ask(port, f"{method} /{path}", JSON, credentials)
                assert status == 401 and "CLEW_LLM_SERVER_TOKEN" in answer["error"]["message"]
    for credentials in (BEARER, f"AUTHORIZATION: BEARER {TOKEN}", f"x-api-key: {TOKEN}"):
        assert ask(port, "POST /pause_generation", JSON, credentials)[0] == 200
    assert ask(port, f"POST http://evil.example/pause_generation?token={TOKEN}", JSON)[0] == 401  # absolute form


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/v1/messages", "/chat/completions"])
@pytest.mark.parametrize("credentials", ["X: y", "Authorization: Bearer None", "x-api-key: sk-mine"])
def test_sampling_needs_no_token_on_loopback(port: int, path: str, credentials: str) -> None:
    assert ask(port, f"POST {path}", JSON, credentials)[0] == 200


def test_a_body_needs_a_json_type(port: int) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        status, answer = ask(port, "POST /generate", f"Content-Type: {kind}")
        assert status == 415 and "-H 'Content-Type: application/json'" in answer["error"]["message"]
    assert ask(port, "POST /generate")[0] == 415
    assert ask(port, "POST /generate", "content-type: Application/JSON; charset=utf-8")[0] == 200
    assert ask(port, "POST /generate", body=b"")[0] == 200  # there is no body to read


def test_beyond_loopback_calls_need_a_key_and_hosts_may_have_any_name(open_port: int) -> None:
    cluster = "Host: node7.cluster:80"
    for line in ("POST /generate", "GET /model_info", "GET /v1/models", "POST /rl/set_reward"):
        assert ask(open_port, line, JSON, cluster, "Authorization: Bearer None")[0] == 401
        for key in (KEY, TOKEN, "sk-session"):
            assert ask(open_port, line, JSON, cluster, f"Authorization: Bearer {key}")[0] == 200
    assert ask(open_port, "GET /health", cluster)[0] == 200
    for key, status in ((KEY, 401), ("sk-session", 401), (TOKEN, 200)):
        assert ask(open_port, "POST /rl/start_session", JSON, f"Authorization: Bearer {key}")[0] == status
    with_key = f"Authorization: Bearer {KEY}"
    assert ask(open_port, "POST /generate", JSON, with_key, cluster, "Origin: http://node7.cluster:80")[0] == 200
    assert ask(open_port, "POST /generate", JSON, with_key, cluster, "Origin: http://evil.example")[0] == 403


def test_oversized_bodies_are_refused_early(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer = ask(port, "POST /generate", JSON, "Content-Length: 50000000", body=b"")
    assert status == 413 and "32 MiB" in answer["error"]["message"]
    monkeypatch.setattr(http_server, "MAX_BODY", 10_000)
    chunks = b"".join(b"%x\r\n" % 5000 + b" " * 5000 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
        client.sendall((head + JSON + "\r\n\r\n").encode() + chunks)
        assert b" 413 " in client.recv(65536)
    monkeypatch.setattr(http_server, "MAX_VALUES", 10)
    assert ask(port, "POST /generate", JSON, body=b"[" + b"1," * 20 + b"1]")[0] == 413


def test_a_large_body_is_read_whole(port: int) -> None:
    body = b'"' + b"x" * (30 * 2**20) + b'"'
    assert ask(port, "POST /generate", JSON, body=body) == (200, {"path": "/generate", "bytes": len(body)})


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /gene",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX: y",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /gen",
        b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_an_unfinished_request_is_given_up(port: int, beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALL_S", 0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(beginning)
        while client.recv(65536):  # first any answer, then the end; otherwise this times out
            pass


def test_a_trickle_is_given_up_and_an_idle_connection_is_not(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALL_S", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    resting, trickling = (socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2))
    with resting, trickling:
        resting.sendall(whole)
        assert received(resting).endswith(b"}")
        with pytest.raises(OSError):
            trickling.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n" + JSON.encode())
            trickling.sendall(b"\r\n\r\n")
            for _ in range(600):
                trickling.sendall(b" ")
                time.sleep(0.05)
        resting.sendall(whole)
        assert b" 200 " in received(resting)


def received(client: socket.socket) -> bytes:
    """Read an answer that ends with }."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536)
    return answer


def test_headers_without_end_are_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        answer = b""
        try:
            for _ in range(100):
                client.sendall(b"X: " + b"y" * 10_000 + b"\r\n")
            answer = client.recv(65536)
        except OSError:
            return  # closed before its answer could be read
        assert b" 400 " in answer or not answer


def test_is_loopback() -> None:
    assert is_loopback("localhost") and is_loopback("[::1]:80") and not is_loopback("localhost\n")
