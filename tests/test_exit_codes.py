"""The exit codes of the command line: sound, found, could not run, not judged, a defect, interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clew.errors import ClewError, ConfigError, Interrupted, LaunchError
from clew.launch.ranks import place
from tests.forked import Forked, clew

ENDS: dict[str, BaseException | None] = {
    "soundly": None,
    "found": SystemExit(1),
    "badly": ConfigError("a field"),
    "unjudged": SystemExit(3),
    "broken": RuntimeError("a defect"),
    "interrupted": Interrupted("before step 3"),
    "by-hand": KeyboardInterrupt(),
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
        ("broken", 70),
        ("interrupted", 130),
        ("by-hand", 130),
    ],
)
def test_a_command_ends_with(how: str, code: int) -> None:
    with Forked(run, how) as ended:
        said = ended.communicate(60)[1]
    assert ended.returncode == code, said
    assert ("Traceback" in said) == (how == "broken")


def test_bad_input_and_bad_usage_are_2(tmp_path: Path) -> None:
    for arguments in (["show", str(tmp_path / "nowhere")], ["show"], ["replay", str(tmp_path / "none.yaml")]):
        with clew(*arguments, cwd=tmp_path) as ended:
            said = ended.communicate(60)[1]
        assert ended.returncode == 2, said


RANK = """
import os
from pathlib import Path
from clew.errors import ConfigError, Interrupted
from clew.launch import ranks
{tells}
raise SystemExit({code})
"""
HALF = "Path(os.environ[ranks.ERROR_VARIABLE]).write_text({!r})"


@pytest.mark.parametrize(
    ("tells", "code", "expected"),
    [
        ("ranks.tell(Interrupted('before step 3'))", 130, Interrupted),
        ("ranks.tell(ConfigError('a field'))", 2, LaunchError),
        ("ranks.tell(SystemExit(1))", 1, 1),
        ("ranks.tell(SystemExit(3))", 3, 3),
        (HALF.format('{"message": {"mess'), 2, LaunchError),
        (HALF.format('{"message": "torch\'s own"}'), 2, LaunchError),
    ],
)
def test_the_ranks_of_a_command_end_it_with_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str, code: int, expected: type[ClewError] | int
) -> None:
    package = tmp_path / "stub"
    package.mkdir()
    (package / "rank.py").write_text(RANK.format(tells=tells, code=code))
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{package / "rank.py"}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit if isinstance(expected, int) else expected) as ended:
        place(2, ["replay"])
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == expected
