"""The exit codes of the command line: sound, found, could not run, not judged, a defect, interrupted."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from clew.errors import ClewError, ConfigError, Interrupted, LaunchError
from clew.launch.ranks import check_world, run_ranks
from tests.forked import Forked, clew

ENDS: dict[str, BaseException | None] = {
    "soundly": None,
    "found": SystemExit(1),
    "badly": ConfigError("a field"),
    "unjudged": SystemExit(3),
    "on-a-full-disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "broken": RuntimeError("a defect"),
    "interrupted": Interrupted("before step 3"),
    "by-hand": KeyboardInterrupt(),
    "without-a-reader": BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),
}


def run(how: str) -> None:
    """A command that ends as `ENDS` says."""
    import clew.cli.main

    @clew.cli.main.app.command("end")
    def end() -> None:
        if (error := ENDS[how]) is not None:
            raise error

    sys.argv = ["clew", "end"]
    clew.cli.main.main()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("soundly", 0),
        ("found", 1),
        ("badly", 2),
        ("unjudged", 3),
        ("on-a-full-disk", 2),
        ("broken", 70),
        ("interrupted", 130),
        ("by-hand", 130),
        ("without-a-reader", 141),
    ],
)
def test_a_command_ends_with(how: str, code: int) -> None:
    with Forked(run, how) as ended:
        said = ended.communicate(60)[1]
    assert ended.returncode == code, said
    assert ("Traceback" in said) == (how == "broken")


def end_with_the_size_of_the_world() -> None:
    import clew.cli.main

    @clew.cli.main.app.command("end")
    def end() -> None:
        raise ConfigError(f"{os.environ.get('WORLD_SIZE', 'no')} ranks")

    sys.argv = ["clew", "end"]
    clew.cli.main.main()


@pytest.mark.parametrize("size", ["2", "", "$SLURM_NTASKS"])
def test_a_number_of_ranks_that_no_launcher_has_set_is_ignored(size: str) -> None:
    with Forked(end_with_the_size_of_the_world, variables={"WORLD_SIZE": size}) as ended:
        said = ended.communicate(60)[1]
    assert (ended.returncode, said) == (2, "clew: no ranks\n")


def test_a_number_of_ranks_that_is_none_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "")
    with pytest.raises(ConfigError, match=r"launch\.ranks is 1"):
        check_world(1)


def test_bad_input_and_bad_usage_are_2(tmp_path: Path) -> None:
    for arguments in (["show", str(tmp_path / "nowhere")], ["show"], ["replay", str(tmp_path / "none.yaml")]):
        with clew(*arguments, cwd=tmp_path) as ended:
            said = ended.communicate(60)[1]
        assert ended.returncode == 2, said


def test_an_argument_of_an_agent_that_cannot_be_read_is_bad_usage(tmp_path: Path) -> None:
    for arg, why in (("wide=[1", "not YAML"), ("day=2026-02-30", "not YAML"), ("verbose", "expected KEY=VALUE")):
        with clew("agent", "stress", "mine.Agent", "--data", "none.jsonl", "--arg", arg, cwd=tmp_path) as ended:
            said = ended.communicate(60)[1]
        assert ended.returncode == 2 and f"--arg {arg}: {why}" in said, said


RANK = """
import os
from pathlib import Path
from clew.errors import ConfigError, Interrupted
from clew.launch import ranks
{tells}
raise SystemExit({code})
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let `run_ranks` run this program as every rank."""
    package = folder / "stub"
    package.mkdir()
    (package / "rank.py").write_text(program)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{package / "rank.py"}"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(sys, "executable", str(python))


HALF = "Path(os.environ[ranks.ERROR_VARIABLE]).write_text({!r})"


@pytest.mark.parametrize(
    ("tells", "code", "expected"),
    [
        ("ranks.report_failure(Interrupted('before step 3'))", 130, Interrupted),
        ("ranks.report_failure(ConfigError('a field'))", 2, LaunchError),
        ("ranks.report_failure(SystemExit(1))", 1, 1),
        ("ranks.report_failure(SystemExit(3))", 3, 3),
        (HALF.format('{"message": {"mess'), 2, LaunchError),
        (HALF.format('{"message": "torch\'s own"}'), 2, LaunchError),
    ],
)
def test_the_ranks_of_a_command_end_it_with_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str, code: int, expected: type[ClewError] | int
) -> None:
    stand_in(tmp_path, monkeypatch, RANK.format(tells=tells, code=code))
    with pytest.raises(SystemExit if isinstance(expected, int) else expected) as ended:
        run_ranks(2, ["replay"])
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == expected


ABORTS = """
import os, time
if os.environ["RANK"] == "1":
    os.write(2, b"terminate called without an active exception\\n")
    os.abort()
time.sleep(60)
"""


@pytest.mark.parametrize("keeps_logs", [False, True])
def test_the_last_lines_of_a_rank_that_was_killed_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_logs: bool
) -> None:
    stand_in(tmp_path, monkeypatch, ABORTS)
    (tmp_path / "trainer-1.log").write_text("written by an earlier run\n")
    with pytest.raises(LaunchError) as ended:
        run_ranks(2, ["replay"], tmp_path if keeps_logs else None)
    where = f" (full log: {tmp_path / 'trainer-1.log'})" if keeps_logs else ""
    assert str(ended.value) == (
        f"trainer rank 1 of 2 was killed by signal 6. Its last lines{where}:\n"
        "terminate called without an active exception"
    )


LATER = """
import os, time
from pathlib import Path
from clew.errors import ConfigError, Interrupted
from clew.launch import ranks
def fail():
    raise KeyError("foo" if first else "gone")
first = os.environ["RANK"] == "{first}"
while not first and not Path(os.environ[ranks.ERROR_VARIABLE]).with_name("rank-{first}.json").exists():
    time.sleep(0.01)
print("Traceback of rank", os.environ["RANK"], flush=True)
try:
    {cause} if first else fail()
except BaseException as error:
    ranks.report_failure(error)
raise SystemExit({code} if first else 70)
"""


def test_an_interrupted_rank_whose_peers_fail_over_it_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = "ranks.report_failure(Interrupted('before step 3'))"
    stand_in(tmp_path, monkeypatch, LATER.format(first=0, cause=cause, code=130))
    with pytest.raises(Interrupted) as ended:
        run_ranks(2, ["sft"])
    assert str(ended.value) == "before step 3"


def test_a_defect_of_a_rank_is_told_with_its_type_and_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, LATER.format(first=1, cause="fail()", code=70))
    with pytest.raises(LaunchError) as ended:
        run_ranks(2, ["sft"], tmp_path)
    where = f"(full log: {tmp_path / 'trainer-1.log'})"
    said = f"trainer rank 1 of 2: KeyError at rank.py:7: 'foo'. Its last lines {where}:\nTraceback of rank 1"
    assert str(ended.value) == said


ONE_AFTER_THE_OTHER = """
import os, signal, time
from pathlib import Path
from clew.errors import ConfigError
from clew.launch import ranks
if os.environ["RANK"] == "1":
    ranks.report_failure(ConfigError("a field"))
    raise SystemExit(2)
while not Path(os.environ[ranks.ERROR_VARIABLE]).with_name("rank-1.json").exists():
    time.sleep(0.01)
time.sleep(0.2)
os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize(
    ("signal", "cause"),
    [
        ("SIGABRT", "trainer rank 1 of 2: a field"),  # its peer was gone
        ("SIGKILL", "trainer rank 0 of 2 was killed by signal 9."),  # which no peer does: this one was gone first
    ],
)
def test_an_error_that_came_before_a_crash_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str, cause: str
) -> None:
    stand_in(tmp_path, monkeypatch, ONE_AFTER_THE_OTHER.replace("{signal}", signal))
    with pytest.raises(LaunchError) as ended:
        run_ranks(2, ["replay"])
    assert str(ended.value) == cause


ENDS_BEFORE_THE_OTHER = """
import os, signal, time
from pathlib import Path
import psutil
if os.environ["RANK"] == "0":
    Path({done!r}).write_text(str(os.getpid()))
    raise SystemExit(0)
while not Path({done!r}).exists() or psutil.pid_exists(int(Path({done!r}).read_text() or os.getpid())):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(10)
"""


def test_a_signal_reaches_a_rank_that_does_not_end_when_rank_0_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, ENDS_BEFORE_THE_OTHER.format(done=str(tmp_path / "done")))
    with pytest.raises(LaunchError, match="trainer rank 1 of 2 was killed by signal 15"):
        run_ranks(2, ["replay"])
