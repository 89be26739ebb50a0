"""weights.via=collective: the trainer broadcasts its weights to servers, which die, freeze and come late."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from clew.config import Config
from clew.errors import EngineError
from clew.inference import weight_group
from clew.inference.protocol import EngineUnreachable
from clew.inference.serve import serve
from clew.loop import inference_servers, weight_sender
from clew.loop.inference_servers import InferenceServers
from clew.loop.publisher import Publisher
from clew.loop.stopwatch import Clock
from clew.loop.weight_sender import buckets, host_for
from clew.record.run import RunDirectory, Server
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import read_broadcast
from clew.training.engine import TrainEngine
from tests.inference.test_server import ServerProcess, with_engine
from tests.models import tiny_model, tiny_tokenizer
from tests.rollout.test_server_pool import FROZEN_S, until
from tests.training.sequences import make_batch, make_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", tie=True)
    return tmp_path


@contextmanager
def publishing(folder: Path) -> Iterator[tuple[TrainEngine, Publisher, RunDirectory]]:
    config = make_config(folder / "model", weights={"via": "collective"})
    run = RunDirectory(folder / "runs" / "test" / "0")
    control = InferenceServers(run, frozen_s=FROZEN_S)
    with closing(control), closing(Publisher(config, run, control, Clock())) as publisher:
        yield TrainEngine(config), publisher, run


@contextmanager
def servers(folder: Path, *serves: Callable[..., None]) -> Iterator[list[ServerProcess]]:
    started = [ServerProcess(folder, serve=each) for each in serves]
    try:
        yield started
    finally:
        for server in started:
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            server.process.communicate(timeout=60)


def version_of(server: ServerProcess) -> int:
    return with_engine(server, lambda engine: engine.version())


def serves(server: ServerProcess, version: int) -> bool:
    try:
        return version_of(server) == version
    except EngineUnreachable:
        return False


def test_servers_receive_the_weights_and_no_file_holds_them(folder: Path) -> None:
    with servers(folder, serve, serve) as both, publishing(folder) as (engine, publisher, run):
        for version in range(3):
            publisher(engine)
            assert [version_of(server) for server in both] == [version] * 2
            engine.train_step(make_batch(seed=version))
        newest = run.newest_weights()
        assert newest is not None and newest.version == 2
        assert [file.name for file in Path(newest.path).iterdir() if file.suffix != ".json"] == []
        digests = read_broadcast(newest)["digests"]
        assert digests.keys() == load_file(folder / "model" / "model.safetensors").keys(), "a tied lm_head goes once"
        assert list((run.path / "weights").iterdir()) == [Path(newest.path)]


def test_a_server_that_starts_later_asks_and_is_sent_the_weights(folder: Path) -> None:
    with publishing(folder) as (engine, publisher, run), ThreadPoolExecutor(1) as starting:
        engine.train_step(make_batch())
        publisher(engine)  # to none
        late = starting.submit(ServerProcess, folder)
        until(publisher.wanted)
        run.remove_server("server")
        until(publisher.wanted)  # taken out, it asks again
        publisher(engine)
        server = late.result(60)
        try:
            assert version_of(server) == 1
            assert [(each.ready, each.wants_weights) for each in run.servers()] == [(True, False)]
        finally:
            server.end()


@pytest.mark.parametrize("failures", [1, 3])
def test_a_meeting_point_that_cannot_be_opened_counts_as_a_failed_broadcast(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    def fails_at_first(host: str, port: int, size: int, **options: Any) -> Any:
        if len(tried) < failures:
            tried.append(size)
            raise weight_group.MemberLost("no port is free")
        return opens(host, port, size, **options)

    tried: list[int] = []
    opens = weight_group.meeting_point
    monkeypatch.setattr(weight_group, "meeting_point", fails_at_first)
    with servers(folder, serve) as [server], publishing(folder) as (engine, publisher, _):
        if failures < weight_sender.TRIES:
            publisher(engine)
            assert version_of(server) == 0 and len(tried) == failures
        else:
            with pytest.raises(EngineError, match=r"reached no server in 3 broadcasts: .*no port is free"):
                publisher(engine)


def serve_and_fall_in_mid_broadcast(config: Config, number: signal.Signals, **options: Any) -> None:
    """Serve, and be sent a signal when the first bucket of version 1 has come."""
    from clew.inference import local

    def fall(sent: Broadcast, group: weight_group.Group, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        for bucket in whole(sent, group, device):
            if sent.version == 1 and not fallen:
                fallen.append(sent)
                os.kill(os.getpid(), number)
            yield bucket

    fallen: list[Broadcast] = []
    whole, local.receive_buckets = local.receive_buckets, fall
    serve(config, **options)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_in_mid_broadcast_is_taken_out_and_the_others_serve_the_weights(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=4))
    monkeypatch.setattr(weight_sender, "BUCKET", 10_000)
    bad = functools.partial(serve_and_fall_in_mid_broadcast, number=number)
    with servers(folder, serve, bad) as both, publishing(folder) as (engine, publisher, run):
        publisher(engine)
        assert [version_of(server) for server in both] == [0, 0]
        engine.train_step(make_batch())
        publisher(engine)
        assert version_of(both[0]) == 1
        assert [server.name for server in run.servers() if server.ready] == ["server"]
        assert f"server server-1 ({both[1].address}) did not receive the weights, and is taken out" in caplog.text
        if number == signal.SIGSTOP:
            both[1].process.send_signal(signal.SIGCONT)
            until(publisher.wanted)
            publisher(engine)
            until(lambda: [server.ready for server in run.servers()] == [True, True])
            until(lambda: serves(both[1], 1))


def test_an_attached_server_that_froze_in_mid_broadcast_is_sent_the_weights_when_it_answers_again(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=4))
    monkeypatch.setattr(weight_sender, "BUCKET", 10_000)
    monkeypatch.setenv("CLEW_LLM_SERVER_TOKEN", "secret")
    bad = functools.partial(serve_and_fall_in_mid_broadcast, number=signal.SIGSTOP)
    with servers(folder, serve, bad) as both:
        monkeypatch.setenv("CLEW_LLM_SERVER_ADDRS", ",".join(server.address for server in both))
        with publishing(folder) as (engine, publisher, run):
            publisher(engine)
            assert [version_of(server) for server in both] == [0, 0]
            engine.train_step(make_batch())
            publisher(engine)
            lost = both[1].address
            assert f"server {lost} ({lost}) did not receive the weights, and is taken out" in caplog.text
            assert [(each.address, each.ready) for each in run.inference_servers()] == [
                (both[0].address, True),
                (lost, False),
            ]
            assert not publisher.wanted()
            both[1].process.send_signal(signal.SIGCONT)
            until(publisher.wanted)
            publisher(engine)
            assert [(each.ready, each.wants_weights) for each in run.inference_servers()] == [(True, False)] * 2
            assert [version_of(server) for server in both] == [1, 1]


def answer_and_receive_nothing(config: Config, **options: Any) -> None:
    """Serve, and answer everything but a broadcast, as in front of an attached engine whose workers are stopped."""
    from clew.inference import local

    def hang(sent: Broadcast, group: weight_group.Group, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        for bucket in whole(sent, group, device):
            if sent.version == 1:
                time.sleep(60)
            yield bucket

    whole, local.receive_buckets = local.receive_buckets, hang
    serve(config, **options)


def test_a_server_that_hangs_in_a_broadcast_and_still_answers_is_taken_out(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer waited 600 s for it, although the broadcast had broken off."""
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=4))
    monkeypatch.setattr(inference_servers, "ANSWER_TIMEOUT_S", 3.0)
    monkeypatch.setattr(weight_sender, "BUCKET", 10_000)
    with servers(folder, serve, answer_and_receive_nothing) as both, publishing(folder) as (engine, publisher, run):
        publisher(engine)
        assert [version_of(server) for server in both] == [0, 0]
        engine.train_step(make_batch())
        began = time.monotonic()
        publisher(engine)
        assert version_of(both[0]) == 1 and time.monotonic() - began < 30
        assert [server.name for server in run.servers() if server.ready] == ["server"]
        lost = f"server server-1 ({both[1].address}) did not receive the weights, and is taken out"
        assert lost in caplog.text and "it did not finish within 3 s after the broadcast" in caplog.text


def corrupt(config: Config, **options: Any) -> None:
    """Serve, and receive other numbers than were sent."""
    from clew.inference import local

    def other(sent: Broadcast, group: weight_group.Group, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        for bucket in whole(sent, group, device):
            next(iter(bucket.values())).view(-1)[0] += 1
            yield bucket

    whole, local.receive_buckets = local.receive_buckets, other
    serve(config, **options)


def test_numbers_that_changed_on_their_way_are_named_by_their_tensor(folder: Path) -> None:
    with servers(folder, corrupt), publishing(folder) as (engine, publisher, run):
        with pytest.raises(
            EngineError, match=r"1 of the tensors .* not those that the trainer sent, such as model\.embed"
        ):
            publisher(engine)
        assert run.inbox.published() is None


def refuse(config: Config, **options: Any) -> None:
    """Serve, and take part in no broadcast to its end."""
    from clew.inference import local

    def none(sent: Broadcast, group: weight_group.Group, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        raise weight_group.MemberLost("this one is odd")
        yield {}

    local.receive_buckets = none
    serve(config, **options)


@pytest.mark.parametrize(("bad", "reason"), [(corrupt, "not those that the trainer sent"), (refuse, "this one is odd")])
def test_a_server_that_fails_each_time_ends_and_the_others_go_on(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bad: Callable[..., None],
    reason: str,
) -> None:
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=4))
    with servers(folder, serve, bad) as [good, wrong], publishing(folder) as (engine, publisher, run):
        engine.train_step(make_batch())
        publisher(engine)
        assert run.inbox.published() == 1
        until(publisher.wanted)
        publisher(engine)
        assert f"server server-1 ({wrong.address}) did not" in caplog.text and "is given up" in caplog.text
        wrong.process.wait(60)
        errors = wrong.process.stderr.read()
        assert "The trainer has given this server up" in errors and reason in errors
        assert [(server.name, server.ready) for server in run.servers()] == [("server", True)]
        assert version_of(good) == 1


def test_a_server_that_did_not_receive_a_version_refuses_it(folder: Path) -> None:
    with servers(folder, serve) as [server], publishing(folder) as (engine, publisher, run):
        publisher(engine)
        newest = run.newest_weights()
        assert newest is not None
        other = dataclasses.replace(newest, version=9)
        with pytest.raises(
            EngineError, match=r"version 9 was broadcast \(weights\.via\), and this server did not get it"
        ):
            with_engine(server, lambda engine: engine.load_weights(other))
        assert version_of(server) == 0, "it still serves what it had"


def test_buckets_hold_as_much_as_fits_and_a_larger_tensor_is_alone() -> None:
    tensors = {str(size): torch.empty(size, dtype=torch.uint8) for size in (4, 6, 3, 20, 1, 9)}
    assert buckets(tensors, limit=10) == [2, 1, 1, 2]


def test_the_trainers_address_is_that_which_the_server_reaches() -> None:
    assert host_for("127.0.0.1:8000") == "127.0.0.1" == host_for("localhost:8000")


def test_a_broadcast_that_not_every_member_joins_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=0.5))
    leader = weight_group.meeting_point("127.0.0.1", 0, 2, leads=True)
    store = weight_group.meeting_point("127.0.0.1", leader.port, 2)
    with pytest.raises(weight_group.MemberLost, match=r"^not every member joined within 0\.5 s$"):
        weight_group.Group(store, "some", "gloo", 0, 2)


def refuse_to_join(config: Config, **options: Any) -> None:
    """Serve, and join no broadcast."""
    from clew.inference import local

    none: Any = None
    local.joined = lambda sent, worker: local.receive_buckets(sent, none, none)
    refuse(config, **options)


@pytest.mark.parametrize("bad", [refuse_to_join, None])
def test_nobody_waits_for_a_server_that_died_before_a_broadcast_or_refused_it(
    folder: Path, caplog: pytest.LogCaptureFixture, bad: Callable[..., None] | None
) -> None:
    """The trainer and the other servers waited 30 s for it, three times if it refused."""
    with servers(folder, serve, bad or serve) as [good, wrong], publishing(folder) as (engine, publisher, _):
        engine.train_step(make_batch())
        if bad is None:
            wrong.process.kill()
            wrong.process.wait()
        began = time.monotonic()
        publisher(engine)
        assert version_of(good) == 1 and time.monotonic() - began < 15
        assert f"server server-1 ({wrong.address}) did not receive the weights, and is taken out" in caplog.text
        assert "broke off: a server failed before all had joined" in caplog.text


def come_late(config: Config, **options: Any) -> None:
    """Serve, and join the first broadcast only when the trainer has given it up."""
    from clew.inference import local

    def late(sent: Broadcast, worker: int) -> Any:
        if not delayed:
            delayed.append(sent)
            time.sleep(6)
        return joins(sent, worker)

    delayed: list[Broadcast] = []
    joins, local.joined = local.joined, late
    serve(config, **options)


def test_a_server_that_comes_after_the_trainer_has_given_up_does_not_wait_for_it(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo waited 150 s for the trainer to connect, because the meeting point was still open."""
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=4))
    with servers(folder, come_late) as [server], publishing(folder) as (engine, publisher, _):
        began = time.monotonic()
        publisher(engine)
        assert version_of(server) == 0 and time.monotonic() - began < 60
        assert "broke off: not every member joined within 4 s" in caplog.text


@pytest.mark.slow
def test_a_server_whose_name_is_gone_is_taken_out_and_the_others_are_updated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a pod ends with the pod. The run ended with a traceback."""
    with servers(folder, serve), publishing(folder) as (engine, publisher, run):
        run.register_server(Server(name="gone", address="gone.invalid:8000", pid=1, ready=True))
        publisher(engine)
        assert [server.name for server in run.servers() if server.ready] == ["server"]


@pytest.mark.parametrize("sections", [{"launch": {"mode": "inline"}}, {"training": {"lora_rank": 4}}])
def test_what_cannot_be_broadcast_is_refused(sections: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"weights\.via=collective sends all weights"):
        make_config("model", weights={"via": "collective"}, **sections)
