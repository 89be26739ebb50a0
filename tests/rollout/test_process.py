"""`clew rollout` as a process, with the real server as a process: killed, restarted, asked to end."""

import asyncio
import json
import signal
import time
from typing import Any, cast

import psutil
import pytest

from clew.config import dump, load
from clew.dotted import digest_of, file_of
from clew.errors import DataError
from clew.reading import read_json
from clew.record import rows as record_rows
from clew.record.run import RunDirectory
from clew.rollout.process import make_runner
from tests.forked import clew
from tests.models import tiny_model, tiny_tokenizer
from tests.record.test_run import SUMMARY
from tests.rollout.scripted import ROWS, config_for

CODE = "tests.rollout.user_code"


def prepare(tmp_path, **sections):
    """A model, data and a configuration file. Returns the file and the run directory."""
    tiny_model(tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sections["data"] = {"path": str(tmp_path / "rows.jsonl")} | sections.get("data", {})
    sections["launch"] = {"mode": "local", "threads": 1}
    config = config_for(tmp_path, **sections)
    (tmp_path / "config.yaml").write_text(dump(config))
    return tmp_path / "config.yaml", RunDirectory(config.run_path)


class Processes:
    """Starts commands of clew, and leaves none behind."""

    def __init__(self, file):
        self.file = file
        self.started = []

    def __call__(self, command, **variables):
        log = self.file.with_name(f"{command}-{len(self.started)}.log")
        process = clew(command, str(self.file), output=log, variables=variables)
        self.started.append(process)
        return process

    def logs(self):
        return "\n".join(path.read_text() for path in sorted(self.file.parent.glob("*.log")))


@pytest.fixture
def start(tmp_path):
    processes = Processes(tmp_path / "config.yaml")
    yield processes
    for process in processes.started:
        process.close()


def until(condition, start, *processes, seconds=180.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, f"ended with {process.returncode}:\n{start.logs()}"
        assert time.monotonic() < deadline, f"timed out:\n{start.logs()}"
        time.sleep(0.02)
    return found


def rollout_status(run):
    path = run.status / "rollout.json"
    return read_json(path) if path.exists() else {"waits": [], "pid": None}


def waits_for(run, what, process):
    status = rollout_status(run)
    return status["pid"] == process.pid and any(what in wait["what"] for wait in status["waits"])


def take_batch(run, version, config_batch=3):
    """Do what the trainer does: commit, publish, and remove the groups."""
    groups = sorted(run.inbox.names())[:config_batch]
    run.steps.commit(version, {**SUMMARY, "groups": groups})
    run.inbox.publish(version + 1)
    run.inbox.remove(groups)


@pytest.mark.slow
def test_rollout_survives_kills_of_itself_and_of_the_server_and_ends_with_the_run(tmp_path, start):
    _, run = prepare(tmp_path, training={"steps": 3})
    rollout = start("rollout")
    until(lambda: waits_for(run, "the first weights", rollout), start, rollout)
    run.inbox.publish(0)
    until(lambda: waits_for(run, "an inference server", rollout), start, rollout)
    server = start("serve")
    until(lambda: len(run.inbox.names()) == 3, start, rollout, server)
    for table in run.inbox.scan().values():
        for row in record_rows.from_table(table):
            assert set(row.versions[row.loss_mask].tolist()) == {0} and (row.logprobs[row.loss_mask] < 0).all()

    server.kill()  # and back at another port, with the groups of version 1 waiting for it
    server.wait()
    take_batch(run, 0)
    until(lambda: waits_for(run, "an inference server", rollout), start, rollout)
    server = start("serve")
    until(lambda: len(run.inbox.names()) == 3, start, rollout, server)

    server.send_signal(signal.SIGSTOP)
    take_batch(run, 1)
    until(lambda: len(run.inbox.running()) == 3, start, rollout)
    rollout.kill()
    rollout.wait()
    server.send_signal(signal.SIGCONT)
    rollout = start("rollout")
    until(lambda: len(run.inbox.names()) == 3, start, rollout, server)
    take_batch(run, 2)
    assert rollout.wait(20) == 0, start.logs()
    assert run.steps.consumed() == {f"g{number:06d}" for number in range(9)}
    assert rollout_status(run)["doing"] == "ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_within_two_seconds_with_its_stuck_reward_workers(tmp_path, start, number):
    _, run = prepare(tmp_path, rollout={"reward": f"{CODE}.stuck_in_c", "reward_workers": 2}, data={})
    run.inbox.publish(0)
    server, rollout = start("serve"), start("rollout")
    until(lambda: waits_for(run, "reward", rollout), start, server, rollout)
    workers = psutil.Process(rollout.pid).children()
    assert len(workers) == 2
    began = time.monotonic()
    rollout.send_signal(number)
    assert rollout.wait(10) == 128 + number, start.logs()
    assert time.monotonic() - began < 8.0
    psutil.wait_procs(workers, timeout=1)
    assert not any(worker.is_running() for worker in workers)
    assert run.inbox.names() == set() and run.rejected_groups() == set()


@pytest.mark.slow
def test_the_server_may_be_named_by_the_environment(tmp_path, start):
    _, run = prepare(tmp_path)
    server = start("serve")
    (entry,) = until(lambda: [each for each in run.servers() if each.ready], start, server)
    run.remove_server(entry.name)
    run.inbox.publish(0)
    rollout = start("rollout", CLEW_LLM_SERVER_ADDRS=entry.address)
    until(lambda: len(run.inbox.names()) == 3, start, rollout, server)


@pytest.mark.parametrize(("sections", "says"), [
    ({"data": {"prompt": "question"}}, "has no column 'question'"),
    ({"data": {"limit": 2}}, "rollout.batch_groups is 3"),
    ({"rollout": {"workflow": "clew.rollout.workflows.SingleTurm"}}, "Did you mean 'SingleTurn'"),
])  # fmt: skip
def test_what_cannot_work_ends_it_at_once(tmp_path, start, sections, says):
    prepare(tmp_path, **sections)
    rollout = start("rollout")
    assert rollout.wait(30) == 2
    assert says in " ".join(start.logs().split()) and "Traceback" not in start.logs()


def test_a_prompt_longer_than_the_context_is_a_failed_episode_that_says_so(tmp_path, start):
    _, run = prepare(tmp_path, rollout={"reward": f"{CODE}.patient"})
    long = [row | {"prompt": row["prompt"] * 200} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    run.inbox.publish(0)
    server, rollout = start("serve"), start("rollout")
    assert rollout.wait(60) == 2, start.logs()
    assert server.poll() is None
    logs = " ".join(start.logs().split())
    assert "episodes failed" in logs and "context" in logs and "256" in logs


def test_prompts_and_held_out_prompts_are_read_from_the_configured_split(tmp_path, monkeypatch):
    file, run = prepare(tmp_path, data={"path": "org/train", "split": "test"}, eval={"path": "org/held_out"})
    asked = []

    def load_rows(path, *, split, **_):
        asked.append((path, split))
        if len(asked) == 2:
            raise DataError("that is all")
        return ROWS

    monkeypatch.setattr("clew.rollout.process.load_rows", load_rows)
    with pytest.raises(DataError, match="that is all"):
        make_runner(load(file), run, cast(Any, None))
    assert asked == [("org/train", "test"), ("org/held_out", "test")]


def test_a_file_that_was_edited_before_rollout_started_again_is_announced(tmp_path, caplog):
    file, run = prepare(tmp_path)
    config = load(file)
    digest = digest_of(cast(Any, file_of(cast(Any, config.rollout.reward))))
    for step, recorded in enumerate((digest, "0" * 16)):
        run.steps.write_data(step, record_rows.to_table([]))
        run.steps.commit(step, {**SUMMARY, "step": step, "code": {"rollout.reward": recorded}})
        asyncio.run(make_runner(config, run, cast(Any, None)).close())
        assert len(caplog.messages) == step
    assert f"rollout.reward={CODE}.exact, has changed since step 1 (digest {'0' * 16}, now {digest})" in caplog.text
