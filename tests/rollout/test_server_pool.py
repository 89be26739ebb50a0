"""Several real servers of one run: which one an episode is at, and what happens when one dies, freezes or refuses."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clew.config import Config
from clew.errors import EngineError
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, SamplingParams
from clew.inference.retries import generate_through_aborts
from clew.inference.serve import serve
from clew.loop.inference_servers import InferenceServers
from clew.record.run import RunDirectory, Server
from clew.record.weights import WeightRef
from clew.rollout.server_pool import LOOK_S, ServerPool
from clew.waits import current_waits
from tests.inference.test_faulty_servers import serving
from tests.inference.test_server import ServerProcess, with_engine, write_config
from tests.models import tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]
FROZEN_S = 1.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[RunDirectory, list[ServerProcess]]]:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    servers = [ServerProcess(tmp_path), ServerProcess(tmp_path)]
    yield RunDirectory(tmp_path / "runs" / "test" / "0"), servers
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.communicate(timeout=60)


def ask(run: RunDirectory, scenario: Callable[[ServerPool], Awaitable[Any]]) -> Any:
    async def use() -> Any:
        pool = ServerPool(run, frozen_s=FROZEN_S)
        try:
            return await asyncio.wait_for(scenario(pool), 60)
        finally:
            await pool.close()

    return asyncio.run(use())


def request(number: int, turn: int = 0, tokens: int = 240) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, seed=number, stop_token_ids=())
    return GenerateRequest(PROMPT, params, id=f"g{number:06d}.e0.i{turn}")


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_has_a_name_and_an_episode_stays_where_it_began(two: Any) -> None:
    run, _ = two
    assert {server.name for server in run.servers() if server.ready} == {"server", "server-1"}
    assert (run.status / "server.json").exists() and (run.status / "server-1.json").exists()

    async def scenario(pool: ServerPool) -> None:
        before: dict[str, str] = {}
        for turn in range(3):
            await asyncio.gather(*(pool.generate(request(number, turn, 20)) for number in range(4)))
            places = dict(pool._places)
            assert sorted(map(list(places.values()).count, set(places.values()))) == [2, 2], "half of them at each"
            assert places == (before or places)
            before = places

    ask(run, scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_in_mid_generation_loses_no_request(two: Any, number: signal.Signals) -> None:
    run, servers = two

    async def all_of(pool: ServerPool) -> list[Completion]:
        return await asyncio.gather(*(generate_through_aborts(pool, request(each)) for each in range(6)))

    async def scenario(pool: ServerPool) -> list[Completion]:
        asking = asyncio.ensure_future(all_of(pool))
        while not all(pool._busy[server.address, server.process.pid] for server in servers):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        servers[1].process.send_signal(number)
        return await asking

    plain = ask(run, all_of)
    disturbed = ask(run, scenario)
    assert [each.output_ids for each in disturbed] == [each.output_ids for each in plain]
    assert all(len(each.output_ids) == len(each.versions) == 240 for each in disturbed)


def test_a_request_that_is_not_answered_says_which_server_it_waits_for(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(600)
        return web.Response()

    async def scenario(pool: ServerPool) -> list[str]:
        asking = asyncio.ensure_future(generate_through_aborts(pool, request(0)))
        await asyncio.sleep(0.5)
        asking.cancel()
        return [wait.what for wait in current_waits()]

    with serving(answer) as address:
        run.register_server(Server(name="server-1", address=address, pid=os.getpid(), ready=True))
        assert ask(run, scenario) == ["completion g000000.e0.i0", f"an answer of server-1 ({address})"]


def test_the_requests_of_a_server_that_is_taken_out_go_elsewhere(tmp_path: Path) -> None:
    """One that hangs in an update, and still answers, held them back for 600 s, and the trainer waited for them."""
    run = RunDirectory(tmp_path / "run")
    asked = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate":
            asked.set()
            await asyncio.sleep(600)
        return web.json_response({})

    async def scenario(pool: ServerPool) -> None:
        generating = asyncio.ensure_future(pool.generate(request(0)))
        await asyncio.to_thread(asked.wait, 20)
        await asyncio.sleep(3 * FROZEN_S)
        assert not generating.done(), "it still answers"
        run.register_server(replace(entry, ready=False))
        with pytest.raises(EngineUnreachable, match="it was taken out until it has loaded the newest weights"):
            await generating

    with serving(answer) as address:
        entry = Server(name="server-1", address=address, pid=os.getpid(), ready=True)
        run.register_server(entry)
        ask(run, scenario)


def test_a_server_whose_generations_fail_is_asked_ever_more_rarely_although_it_tells_its_version(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path / "run")
    asked: list[float] = []

    async def answer(http: web.Request) -> web.Response:
        if http.path == "/generate":
            asked.append(time.monotonic())
            assert http.transport is not None
            http.transport.abort()
        return web.json_response({"weight_version": "5"})

    async def scenario(pool: ServerPool) -> None:
        asking = asyncio.ensure_future(generate_through_aborts(pool, request(0)))
        while len(asked) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()

    with serving(answer) as address:
        run.register_server(Server(name="server-1", address=address, pid=os.getpid(), ready=True))
        ask(run, scenario)
    assert asked[3] - asked[2] > 1.0, "0.25 s, 0.5 s, 1 s"


def test_a_server_that_froze_in_mid_update_is_taken_out_and_returns_with_the_newest_weights(
    two: Any, tmp_path: Path
) -> None:
    run, servers = two
    tiny_model(run.path / "weights" / "version-000005", seed=1)
    ref = WeightRef(version=5, path=str(run.path / "weights" / "version-000005"), digest="")
    servers[1].process.send_signal(signal.SIGSTOP)
    run.announce_weights(ref)
    with closing(InferenceServers(run, frozen_s=FROZEN_S)) as control:
        control.load(ref)
    assert [server.name for server in run.servers() if server.ready] == ["server"]
    completions = ask(run, lambda pool: asyncio.gather(*(pool.generate(request(each, 0, 5)) for each in range(4))))
    assert {version for each in completions for version in each.versions} == {5}
    servers[1].process.send_signal(signal.SIGCONT)
    until(lambda: [server.ready for server in run.servers()] == [True, True])

    async def scenario(pool: ServerPool) -> None:
        completions = await asyncio.gather(*(pool.generate(request(each, 0, 5)) for each in range(4)))
        assert len(set(pool._places.values())) == 2
        assert {version for each in completions for version in each.versions} == {5}

    until(lambda: run.servers()[1].ready)
    ask(run, scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_attached_server_that_fails_an_update_is_taken_out_until_it_has_loaded_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "version-5", seed=5)
    monkeypatch.setenv("CLEW_LLM_SERVER_TOKEN", "secret")
    servers = [ServerProcess(tmp_path), ServerProcess(tmp_path)]
    monkeypatch.setenv("CLEW_LLM_SERVER_ADDRS", ",".join(server.address for server in servers))
    run, lost = RunDirectory(tmp_path / "another run"), servers[1]

    async def addresses(pool: ServerPool) -> set[str]:
        completions = await asyncio.gather(*(pool.generate(request(each, 0, 5)) for each in range(4)))
        assert {version for each in completions for version in each.versions} == {5}
        return set(pool._places.values())

    ref = WeightRef(version=5, path=str(tmp_path / "version-5"), digest="")
    try:
        with closing(InferenceServers(run, frozen_s=FROZEN_S)) as control:
            lost.process.send_signal(number)
            run.announce_weights(ref)
            control.load(ref)
            assert f"server {lost.address} ({lost.address}) did not load version 5, and is taken out" in caplog.text
            assert [server.address for server in control.ready()] == [servers[0].address]
            assert not control.wanted(), "it does not answer"
            if number == signal.SIGKILL:
                lost.process.communicate(timeout=60)
                lost.config_path = write_config(tmp_path, "test", lost.address)
                lost.start()
            assert ask(run, addresses) == {servers[0].address}, "it may answer by now, and has the old weights"
            lost.process.send_signal(signal.SIGCONT)
            until(lambda: not control.wanted() and len(control.ready()) == 2)
            assert ask(run, addresses) == {server.address for server in servers}
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            server.process.communicate(timeout=60)


@pytest.mark.parametrize("version", [0, 7])
def test_an_attached_server_with_other_weights_loads_the_newest_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """The server was restarted while nobody asked it anything, or another run has loaded version 7."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "version-5", seed=5)
    monkeypatch.setenv("CLEW_LLM_SERVER_TOKEN", "secret")
    server = ServerProcess(tmp_path)
    monkeypatch.setenv("CLEW_LLM_SERVER_ADDRS", server.address)
    run, ref = RunDirectory(tmp_path / "another run"), WeightRef(version=5, path=str(tmp_path / "version-5"), digest="")

    def ask_for_one() -> Completion:
        return ask(run, lambda pool: generate_through_aborts(pool, request(0, 0, 5)))

    try:
        with closing(InferenceServers(run)) as control:
            run.announce_weights(ref)
            control.load(ref)
            before = ask_for_one()
            tiny_model(tmp_path / "model", seed=9)
            if version:
                other = WeightRef(version=version, path=str(tmp_path / "model"), digest="")
                with_engine(server, lambda engine: engine.load_weights(other))
            else:
                server.process.kill()
                server.process.communicate(timeout=60)
                server.config_path = write_config(tmp_path, "test", server.address)
                server.start()
            with ThreadPoolExecutor() as asking:
                after = asking.submit(ask_for_one)
                until(lambda: control.wanted() or after.done())
                assert after.result().output_ids == before.output_ids
            assert after.result().versions == [5] * 5
            loads = control.ready()[0].loads
        with closing(InferenceServers(run)) as resumed:
            assert [(known.loaded, known.loads) for known in resumed.ready()] == [(5, 2)] == [(5, loads)]
        monkeypatch.delenv("CLEW_LLM_SERVER_ADDRS")
        assert run.inference_servers() == [], "a later start without the variable uses servers of its own"
    finally:
        server.process.kill()
        server.process.communicate(timeout=60)
    assert f"{server.address}: its tokens are of version {version}, and it was given version 5" in caplog.text


def test_an_attached_server_that_refuses_twice_is_given_up_and_tried_again_by_the_next_trainer(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered, servers = two
    run = RunDirectory(tmp_path / "another run")
    ref = WeightRef(version=5, path=str(tmp_path / "model"), digest="")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{refusing.server_port}"
        monkeypatch.setenv("CLEW_LLM_SERVER_ADDRS", f"{servers[0].address},{address}")
        monkeypatch.setenv("CLEW_LLM_SERVER_TOKEN", registered.servers()[0].token)
        run.announce_weights(ref)
        with closing(InferenceServers(run)) as control:
            control.load(ref)
            assert [server.address for server in control.ready()] == [servers[0].address]
            until(lambda: control.wanted() or "is given up" in caplog.text)
            assert [server.address for server in control.ready()] == [servers[0].address]
        with closing(InferenceServers(run)) as control:
            assert len(control.ready()) == 2
        refusing.shutdown()


def serve_until_half_an_update(config: Config, number: signal.Signals, **options: Any) -> None:
    """Serve, and be sent a signal when half of the tensors of version 5 are loaded."""
    from clew.inference import engine_core as core

    def copy_half(model: Any, path: str, weights: Iterator[Any]) -> None:
        if path.endswith("5"):
            own = model.state_dict()
            for _ in range(len(own) // 2):
                name, tensor = next(weights)
                own[name].data.copy_(tensor)
            os.kill(os.getpid(), number)
        whole(model, path, weights)

    whole, core.copy_weights = core.copy_weights, copy_half
    serve(config, **options)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_in_mid_update_is_named_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    run = RunDirectory(tmp_path / "runs" / "test" / "0")
    good = ServerProcess(tmp_path)
    bad = ServerProcess(tmp_path, serve=functools.partial(serve_until_half_an_update, number=number))
    refs = []
    for version in (5, 6):
        tiny_model(folder := run.path / "weights" / f"version-{version}", seed=version)
        refs.append(WeightRef(version=version, path=str(folder), digest=""))
    try:
        with closing(InferenceServers(run, frozen_s=FROZEN_S)) as control:
            began = time.monotonic()
            run.announce_weights(refs[0])
            control.load(refs[0])
            assert time.monotonic() - began < FROZEN_S + 5
            assert f"server server-1 ({bad.address}) did not load version 5, and is taken out" in caplog.text
            assert [server.name for server in run.servers() if server.ready] == ["server"]
            completion = ask(run, lambda pool: pool.generate(request(0, 0, 5)))
            assert completion.versions == [5] * 5
            run.announce_weights(refs[1])
            control.load(refs[1])
        if number == signal.SIGKILL:
            bad.process.communicate(timeout=60)
            bad.start()
        bad.process.send_signal(signal.SIGCONT)
        until(lambda: [server.ready for server in run.servers()] == [True, True])
        until(lambda: with_engine(bad, lambda engine: engine.version()) == 6)
    finally:
        for server in (good, bad):
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            server.process.communicate(timeout=60)


class Refuses(BaseHTTPRequestHandler):
    """A server whose updates fail."""

    def do_GET(self) -> None:
        self.answer(200, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(400, b'{"success": false, "message": "1 tensors differ: lm_head.weight"}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Freezes(Refuses):
    """A server that refuses one request, then answers nothing to the next, and then nothing at all."""

    frozen = threading.Event()
    ended = threading.Event()
    refused = False

    def do_GET(self) -> None:
        if self.frozen.is_set():
            self.ended.wait()
        else:
            super().do_GET()

    def do_POST(self) -> None:
        if type(self).refused:
            self.frozen.set()
            self.ended.wait()
        else:
            type(self).refused = True
            super().do_POST()


def test_a_server_that_was_restarted_at_its_address_and_freezes_cancels_no_episode(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    async def ask_before_and_after_a_restart(pool: ServerPool) -> None:
        address = f"127.0.0.1:{freezing.server_port}"
        run.register_server(Server(name="server", address=address, pid=1, ready=True))
        with pytest.raises(EngineError, match="1 tensors differ"):
            await pool.generate(request(0))
        run.register_server(Server(name="server", address=address, pid=2, ready=True))
        await asyncio.sleep(LOOK_S * 1.5)
        with pytest.raises(EngineUnreachable, match="has not answered"):
            await pool.generate(request(1))
        assert [pid for _, pid in pool._watches] == [2], "nothing watches a process that is gone"

    with ThreadingHTTPServer(("127.0.0.1", 0), Freezes) as freezing:
        threading.Thread(target=freezing.serve_forever, daemon=True).start()
        ask(run, ask_before_and_after_a_restart)
        Freezes.ended.set()
        freezing.shutdown()


class FailsToPause(Refuses):
    """A server that cannot be paused for a while."""

    pauses = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).pauses += self.path == "/pause_generation"
        self.answer(500 if self.path == "/pause_generation" and self.pauses in (2, 3) else 200, b"{}")


def test_a_lease_is_prolonged_again_after_the_only_server_failed_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    with ThreadingHTTPServer(("127.0.0.1", 0), FailsToPause) as failing, caplog.at_level(logging.WARNING):
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        run.register_server(Server(name="server", address=f"127.0.0.1:{failing.server_port}", pid=1, ready=True))
        with closing(InferenceServers(run, lease_s=0.3)) as control, control.released():
            until(lambda: FailsToPause.pauses > 4, seconds=10)
        failing.shutdown()
    assert caplog.text.count("Cannot keep the servers paused") == 2


class Starts(Refuses):
    """A server that is listed, and still loads its weights."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(503, b"starting: the weights are being loaded")


def test_many_requests_that_find_the_same_server_starting_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    with ThreadingHTTPServer(("127.0.0.1", 0), Starts) as starting, caplog.at_level(logging.WARNING):
        threading.Thread(target=starting.serve_forever, daemon=True).start()
        run.register_server(Server(name="server", address=f"127.0.0.1:{starting.server_port}", pid=1, ready=True))

        async def ask_at_once(pool: ServerPool) -> list[Any]:
            return await asyncio.gather(*(pool.generate(request(n)) for n in range(10)), return_exceptions=True)

        answers = ask(run, ask_at_once)
        starting.shutdown()
    assert all(isinstance(answer, EngineUnreachable) for answer in answers)
    assert caplog.text.count("starting: the weights are being loaded") < 5


def test_a_request_that_waits_for_a_server_warns_once_of_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that loads for a minute would otherwise fill the terminal, as it is asked every two seconds."""
    run = RunDirectory(tmp_path / "run")
    reasons = ["starting", "starting", "starting", "draining", "starting"]

    async def answer(http: web.Request) -> web.Response:
        if http.path != "/generate" or len(reasons) == 1:
            return web.json_response({"weight_version": "5"})
        return web.Response(status=503, text=reasons.pop(0))

    async def scenario(pool: ServerPool) -> None:
        asking = asyncio.ensure_future(generate_through_aborts(pool, request(0)))
        while len(reasons) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()

    with serving(answer) as address, caplog.at_level(logging.WARNING):
        run.register_server(Server(name="server-1", address=address, pid=os.getpid(), ready=True))
        ask(run, scenario)
    warnings = [message.rpartition(" ")[2] for message in caplog.messages if "may be tried again" in message]
    assert warnings == ["starting", "draining"]


def test_an_update_that_fails_on_the_only_server_says_what_to_do(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{refusing.server_port}"
        run.register_server(Server(name="server", address=address, pid=1, ready=True))
        words = r"1 tensors differ: lm_head\.weight\. No other server .* start the run again"
        with closing(InferenceServers(run)) as control, pytest.raises(EngineError, match=words):
            control.load(WeightRef(version=5, path=str(tmp_path), digest=""))
        refusing.shutdown()


def test_an_update_that_fails_on_one_of_several_takes_that_one_out_and_says_which(
    two: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = two
    ref = WeightRef(version=5, path=str(run.path.parent.parent.parent / "model"), digest="")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing, caplog.at_level(logging.ERROR):
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{refusing.server_port}"
        run.register_server(Server(name="server-2", address=address, pid=1, ready=True))
        with closing(InferenceServers(run)) as control:
            control.load(ref)
        refusing.shutdown()
    assert {server.name for server in run.servers()} == {"server", "server-1"}
    assert f"server server-2 ({address}) did not load version 5, and is taken out" in caplog.text
    assert "1 tensors differ: lm_head.weight" in caplog.text
    completion = ask(run, lambda pool: pool.generate(request(0, 0, 5)))
    assert completion.versions == [5] * 5
