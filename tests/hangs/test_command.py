"""The command `clew hang`: bad input, dumps from elsewhere, and what it starts with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clew.hang.collect import parse_dump
from clew.hang.jobs import with_peers


def clew_hang(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clew", "hang", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def dump(name: str = "all_reduce") -> str:
    frames = [
        {"name": name, "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1, "locals": []},
        {"name": "train", "filename": "train.py", "line": 7, "locals": []},
    ]
    thread = {"pid": 7, "thread_name": "MainThread", "os_thread_id": 7, "active": False, "owns_gil": False}
    return json.dumps([{**thread, "frames": frames}])


def test_a_pid_that_does_not_exist_is_named() -> None:
    ended = clew_hang("--pid", "4194305")
    assert ended.returncode == 2 and "4194305" in ended.stderr and "no such process" in ended.stderr


def test_one_job_at_a_time(tmp_path: Path) -> None:
    assert clew_hang(str(tmp_path), "--pid", "1").returncode == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = clew_hang(str(tmp_path))
    assert ended.returncode == 2 and "no run directory" in ended.stderr


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    ended = clew_hang("--from", str(tmp_path))
    assert ended.returncode == 2 and "no file there is a report" in ended.stderr


def test_dumps_with_hostile_names_are_read_and_shown_safely(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(dump())
    (tmp_path / "rank1\x1b[2J.json").write_text("[{")
    (tmp_path / "rank1.json").write_text(dump("barrier"))
    (tmp_path / "rank2.pkl").write_bytes(b"\x80\x04.")
    ended = clew_hang("--from", str(tmp_path))
    assert "\x1b" not in ended.stdout and "\\x1b" in ended.stdout
    assert "rank2.pkl was not read" in ended.stdout
    assert "all_reduce" in ended.stdout and "barrier" in ended.stdout


def test_stacks_are_shown_together(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank{rank}.json").write_text(dump())
    ended = clew_hang("--from", str(tmp_path), "--stacks")
    assert ended.returncode == 0 and "4 x 0-3" in ended.stdout


@pytest.mark.parametrize("text", ["{}", "[1]", "null", '[{"frames": 3}]', "nonsense"])
def test_what_is_no_dump_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_dump(text)


def test_a_stopped_process_is_named_and_its_report_can_be_judged_again(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        ended = clew_hang("--pid", str(process.pid), "--json", str(tmp_path / "report.json"))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert ended.returncode == 1 and f"kill -CONT {process.pid}" in ended.stdout
    again = clew_hang("--from", str(tmp_path))
    assert again.returncode == 1 and "stopped" in again.stdout


WAITING = """
import sys, time
from pathlib import Path
from clew.processes import hold_lock
from clew.waits import Reporter, waiting

held = hold_lock(Path(sys.argv[1]) / "trainer.lock", "trainer")
with Reporter(Path(sys.argv[1]), "trainer") as reporter, waiting(
    "batch for step 7", unblocks="rollout", numbers=lambda: "8 groups wanted, 5 ready"
):
    reporter.write()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("rollout_was_killed", [False, True])
def test_a_run_of_clew_is_judged_by_its_own_waits(tmp_path: Path, rollout_was_killed: bool) -> None:
    status = tmp_path / "status"
    command = [sys.executable, "-c", WAITING, str(status)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        if rollout_was_killed:
            killed = {"pid": 4194305, "doing": "rollout", "waits": [], "updated": 0.0, "host": os.uname().nodename}
            (status / "rollout.json").write_text(json.dumps(killed))
        with ThreadPoolExecutor() as pool:
            ended, of_pid = pool.map(lambda asked: clew_hang(*asked), [[str(tmp_path)], ["--pid", str(process.pid)]])
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert ended.returncode == of_pid.returncode == 1, ended.stdout + ended.stderr + of_pid.stderr
    assert of_pid.stdout.splitlines()[0] == ended.stdout.splitlines()[0]  # its lock says to which run it belongs
    if rollout_was_killed:
        assert ended.stdout.startswith("dead") and "rollout (pid 4194305) has ended" in ended.stdout
    else:
        assert "waits for batch for step 7 (8 groups wanted, 5 ready); rollout unblocks it" in ended.stdout


def test_a_process_without_python_is_not_judged() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        ended = clew_hang("--pid", str(process.pid))
    finally:
        process.kill()
        process.wait()
    assert ended.returncode == 3 and "o stack could be read" in ended.stdout


def test_the_command_needs_no_torch_and_little_time() -> None:
    code = (
        "import sys, clew.cli.hang;"
        "from clew.hang import dumps, examine, gpus_and_nccl, html_report, nodes, report, task_dumps;"
        "assert not {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_ranks_of_another_launch_with_the_same_port_are_not_below_a_launcher() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, "MASTER_ADDR": "clew-test", "MASTER_PORT": "1"}
    # `torchrun` among its first words makes a launcher of it; it is no rank itself.
    start = f"import os, subprocess; subprocess.run({sleep}, env={{**os.environ, 'RANK': '0'}})"
    launcher = subprocess.Popen([sys.executable, "-c", start, "torchrun"], env=environment, start_new_session=True)
    orphan = subprocess.Popen(sleep, env={**environment, "RANK": "0"})
    try:
        deadline = time.monotonic() + 20
        while len(with_peers([launcher.pid])) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = [pid for pid in with_peers([launcher.pid]) if pid != launcher.pid]
        assert len(ranks) == 1 and orphan.pid not in ranks
        assert {*with_peers([orphan.pid])} == {orphan.pid, *ranks}
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        orphan.kill()
        launcher.wait()
        orphan.wait()


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(dump())
    page = tmp_path / "report.html"
    ended = clew_hang("--from", str(tmp_path), "--stacks", "--html", str(page))
    assert ended.returncode == 2 and "leave out --stacks, or the files" in ended.stderr
    ended = clew_hang("--from", str(tmp_path), "--native")
    assert ended.returncode == 2 and "Cannot read C frames" in ended.stderr
    ended = clew_hang("--html", str(page))  # the only job, if there is one
    assert (ended.returncode == 2 and "Cannot choose a job" in ended.stderr) or page.exists()
