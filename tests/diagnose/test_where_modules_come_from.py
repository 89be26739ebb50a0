"""A folder that somebody unpacked may hold files called as modules are: no command runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clew.record.run import RunDirectory

CLEW = Path(__file__).parent.parent.parent / "clew"
NAMES = ("numpy", "torch", "json", "yaml", "typer", "typing", "rich", "pyarrow", "pathlib", "transformers")
SCRIPT = Path(sys.executable).with_name("clew")
MODULE = (sys.executable, "-m", "clew")

COMMANDS = {
    "show": (*MODULE, "show", "{run}"),
    "status": (SCRIPT, "status", "{run}"),
    "diff": (*MODULE, "diff", "{run}", "{run}"),
    "config": (SCRIPT, "config", "{run}/config.yaml"),
    "reward": (SCRIPT, "replay", "{run}", "--step", "0", "--reward"),  # which loads user code, in worker processes too
    "ranks": (*MODULE, "replay", "{run}", "--step", "0", "--ranks", "2"),  # which starts processes of its own
}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.slow] * (each == "ranks")) for each in COMMANDS]
)
def test_no_command_imports_what_lies_in_the_current_folder(
    run: RunDirectory, folder: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "planted_rewards.py").write_text((folder / "planted_rewards.py").read_text())
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/{name} was imported', 'w'); raise SystemExit(9)\n")
    words = [str(word).format(run=run.path) for word in COMMANDS[command]]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not [*tmp_path.glob("* was imported")]
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_clew_starts_python_without_the_current_folder() -> None:
    """-P for every process of Python that Clew starts."""
    started = [
        (path.relative_to(CLEW), line.strip())
        for path in CLEW.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\[sys\.executable", line)
    ]
    assert len(started) >= 3
    assert [each for each in started if '[sys.executable, "-P", ' not in each[1]] == []
