"""Several servers under `clew train`: how each is started, and what happens when one ends by an error of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clew.config import Config
from clew.errors import ConfigError, Interrupted, LaunchError
from clew.launch import supervisor
from clew.launch.supervisor import Child
from clew.record.run import RunDirectory, Server
from tests.record.test_run import SUMMARY


def config(tmp_path: Path, devices: str | None, **inference: Any) -> Config:
    return Config.model_validate(
        {
            "experiment": "e",
            "root": str(tmp_path),
            "model": {"path": "m", "device": "cpu"},
            "data": {"path": "d"},
            "inference": inference,
            "launch": {"devices": devices},
        }
    )


def started(tmp_path: Path, devices: str | None, **inference: Any) -> dict[str, list[str]]:
    """The commands of the processes, without Python's own words."""
    children = supervisor._children(
        config(tmp_path, devices, **inference), ["run.yaml"], RunDirectory(tmp_path / "e" / "0")
    )
    return {role: child.command[4:] for role, child in children.items()}


def test_each_server_has_a_name_and_a_port_of_its_own(tmp_path: Path) -> None:
    assert started(tmp_path, "embedded.d2", listen="127.0.0.1:7000") == {
        "server": ["serve", "run.yaml", "--name", "server"],
        "server-1": ["serve", "run.yaml", "inference.listen=127.0.0.1:7001", "--name", "server-1"],
    }
    assert list(started(tmp_path, "embedded.d2+d1")) == ["server", "server-1", "rollout", "trainer"]
    assert list(started(tmp_path, "d2")) == ["rollout", "trainer"]
    assert list(started(tmp_path, None)) == ["server", "rollout", "trainer"]


def test_devices_and_an_option_of_the_server_that_contradict_each_other(tmp_path: Path) -> None:
    assert (
        config(tmp_path, "vllm.d1t2", args={"tensor_parallel_size": 2}).inference.options["tensor-parallel-size"] == 2
    )
    for name in ("tensor_parallel_size", "--tensor-parallel-size"):
        with pytest.raises(ValueError, match=r"says tensor-parallel-size=2, and inference\.args has 4"):
            config(tmp_path, "vllm.d1t2", args={name: 4})
    with pytest.raises(ValueError, match=r"says tensor-parallel-size=2, and inference\.args has 4"):
        config(tmp_path, "sglang.d1t2", args={"tp-size": 4})


def test_both_names_of_an_option_count_the_workers_that_receive_weights(tmp_path: Path) -> None:
    for name in ("tp-size", "tensor-parallel-size"):
        assert config(tmp_path, None, backend="sglang", args={name: 2}).inference.shares == 2


@pytest.mark.parametrize("variable", ["CLEW_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS"])
def test_servers_that_run_already_are_attached_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "node1:7000,node2:7000")
    commands = started(tmp_path, "d1", backend="sglang")
    assert commands["server-1"] == ["serve", "run.yaml", "--name", "server-1", "--attach", "node2:7000"]
    assert list(commands) == ["server", "server-1", "rollout", "trainer"]
    assert list(started(tmp_path, "d1")) == ["rollout", "trainer"], "they are servers of clew serve"
    monkeypatch.setenv(variable, "http://node1:7000/v1")
    with pytest.raises(ConfigError, match=rf"{variable} holds 'http://node1:7000/v1', expected host:port"):
        started(tmp_path, "d1", backend="sglang")
    monkeypatch.setenv(variable, "127.0.0.1:99999")  # the client ended with a traceback
    with pytest.raises(ConfigError, match=rf"{variable} holds '127\.0\.0\.1:99999', expected host:port"):
        started(tmp_path, "d1", backend="sglang")
    monkeypatch.setenv(variable, "localhost:7000,127.0.0.1:7000")
    with pytest.raises(ConfigError, match=rf"{variable} holds one server twice: "):
        started(tmp_path, "d1", backend="sglang")


def child_of(run: RunDirectory, name: str, program: str) -> Child:
    return Child(name, [sys.executable, "-c", program], run, dict(os.environ))


def test_a_server_that_gives_up_leaves_the_others_and_the_last_one_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "e" / "0")
    (tmp_path / "go").mkdir()
    program = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)\nraise SystemExit('clew: no memory')"
    children = {
        name: child_of(run, name, program.format(str(tmp_path / "go" / name))) for name in ("server", "server-1")
    }
    for child in children.values():
        child.start()

    def until(condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            assert not supervisor._check(config(tmp_path, "embedded.d2"), run, children)
            time.sleep(0.01)

    (tmp_path / "go" / "server").touch()
    until(lambda: children["server"].given_up)
    assert not children["server-1"].given_up
    assert not supervisor._tell_addresses(run, children), "the other one is not ready"
    run.register_server(Server(name="server-1", address="127.0.0.1:7001", pid=os.getpid(), ready=True))
    assert supervisor._tell_addresses(run, children)
    assert capfd.readouterr().out.strip().endswith("CLEW_LLM_SERVER_ADDRS=127.0.0.1:7001")
    (tmp_path / "go" / "server").unlink()
    children["server"].start()  # as after a hang
    (tmp_path / "go" / "server-1").touch()
    until(lambda: children["server-1"].given_up)
    assert not children["server"].given_up
    (tmp_path / "go" / "server").touch()
    with pytest.raises(LaunchError, match=r"the server ended with code 1.*\n.*no memory\n\(full log: .*server.log\)"):
        until(lambda: False)


def test_an_interrupt_after_the_last_step_and_before_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, handlers = RunDirectory(tmp_path / "e" / "0"), dict[int, Any]()
    run.steps.commit(0, SUMMARY)
    trainer = child_of(run, "trainer", "import time; time.sleep(60)")  # it waits for the last evaluation
    monkeypatch.setattr(supervisor, "_children", lambda *_: {"trainer": trainer})
    monkeypatch.setattr(supervisor.signal, "signal", handlers.__setitem__)
    asked = config(tmp_path, None)
    asked = asked.model_copy(update={"training": asked.training.model_copy(update={"steps": 1})})
    with pytest.raises(Interrupted, match="interrupted at step 1 of 1; nothing recorded is lost"):
        supervisor.supervise(asked, [], lambda: handlers[signal.SIGINT](signal.SIGINT, None))


WRITES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{first}
with open({file!r}, "ab", buffering=0) as file:
    for _ in range({times}):
        file.write({data!r})
        time.sleep(0.1)
"""


DIGESTS = """
from pathlib import Path
from clew.record.run import WRITES_CHECKPOINT
from clew.waits import Reporter
with Reporter(Path({status!r}), "trainer") as reporter:
    reporter.set(doing=WRITES_CHECKPOINT)
    reporter.write()
    open({file!r}, "ab").close()
    time.sleep(3)
"""


@pytest.mark.parametrize(
    ("data", "urgent", "first"),
    [(b"weights", False, ""), (b"", False, ""), (b"weights", True, ""), (b"weights", False, DIGESTS)],
)
def test_only_a_trainer_that_writes_its_checkpoint_has_longer_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    data: bytes,
    urgent: bool,
    first: str,
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 1.0)
    run, ends = RunDirectory(tmp_path / "e" / "0"), bool(data) and not urgent
    file = run.checkpoints / ".step-000001.123" / "model.safetensors"
    file.parent.mkdir()
    first = first.format(status=str(run.status), file=str(file))
    trainer = child_of(
        run, "trainer", WRITES.format(file=str(file), times=25 if ends else 1000, data=data, first=first)
    )
    trainer.start()
    while not file.exists():
        assert trainer.process.poll() is None
        time.sleep(0.01)
    supervisor._end([trainer], run, lambda: urgent)
    assert trainer.process.returncode == (0 if ends else -signal.SIGKILL)
    assert ("the trainer writes its checkpoint" in capfd.readouterr().out) == ends


def test_an_error_that_an_earlier_start_logged_is_not_reported(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "e" / "0")
    child = child_of(run, "server", "raise SystemExit('\\nclew: out of disk')")
    child.start()
    child.process.wait()
    assert child.last_words() == "out of disk"
    child.command[-1] = "import os; print('loading', flush=True); os.kill(os.getpid(), 9)"
    child.start()
    child.process.wait()
    assert child.last_words() == "loading"
    child.command[-1] = "raise SystemExit('clew: a rank was killed. Its last lines:' + 12 * '\\na line')"
    child.start()
    child.process.wait()
    assert child.last_words().startswith("a rank was killed. Its last lines:\n")
