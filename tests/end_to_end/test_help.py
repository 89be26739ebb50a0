"""`clew --help`, and the example of each command, pasted; those of agents in `test_agents.py`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clew.cli.agent import agent_app
from clew.cli.main import app
from tests.end_to_end.project import ROOT

COMMANDS = {info.name or info.callback.__name__: info.callback for info in app.registered_commands if info.callback}
COMMANDS |= {f"agent {info.name}": info.callback for info in agent_app.registered_commands if info.callback}


def variables(**more: str) -> dict[str, str]:
    return os.environ | {"COLUMNS": "120", "CLEW_PARENT_PID": str(os.getpid())} | more


def run(*arguments: str, cwd: Path, seconds: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=seconds, env=variables(**more))


def command_of(example: str, *more: str) -> list[str]:
    """Return what a shell makes of it; a copy of the examples is as good as the checkout."""
    program, *arguments = example.split()
    assert program == "clew"
    return [sys.executable, "-m", "clew", *arguments, *more]


def paste(checkout: Path, name: str, *more: str) -> str:
    """Run the example of a command; its output."""
    shown = run(*command_of(examples()[name], *more), cwd=checkout)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return shown.stdout


def examples() -> dict[str, str]:
    """The example in each command's help."""
    found = {}
    for name, callback in COMMANDS.items():
        lines = [line.strip() for line in (callback.__doc__ or "").splitlines() if line.strip().startswith("Example:")]
        assert len(lines) == 1, f"clew {name} --help has {len(lines)} examples"
        found[name] = lines[0].removeprefix("Example: ")
    return found


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    shown = run(sys.executable, "-X", "importtime", "-m", "clew", "--help", cwd=tmp_path)
    assert shown.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "typer" in imported and "clew.cli.main" in imported
    heavy = {"torch", "transformers", "numpy", "pyarrow", "pydantic", "omegaconf", "yaml", "aiohttp", "rich.console"}
    assert not imported & heavy
    for name in (
        "train",
        "sft",
        "serve",
        "rollout",
        "learn",
        "status",
        "show",
        "replay",
        "diff",
        "blame",
        "doctor",
        "agent",
    ):
        assert re.search(rf"^\s+{name}\s+\w", shown.stdout, re.MULTILINE), shown.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_one_sentence_and_one_example(name: str) -> None:
    first, _, rest = (COMMANDS[name].__doc__ or "").strip().partition("\n")
    assert first.endswith(".") and not re.search(r"\.\s+[A-Z]", first), "one sentence"
    assert rest.strip() == f"Example: {examples()[name]}" and examples()[name].startswith(f"clew {name}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the examples, and the material that `make demo` makes; few held-out problems."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = run(sys.executable, "-m", "examples.addition.make", "--out", "runs/addition/material", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    held_out = tmp_path / "runs" / "addition" / "material" / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:20]))
    return tmp_path


@pytest.mark.slow
def test_each_example_works_when_pasted(checkout: Path) -> None:
    runs = checkout / "runs" / "addition"
    assert "max_lag: 2" in paste(checkout, "config")
    doctor = run(*command_of(examples()["doctor"]), cwd=checkout)  # it may find something bad about this machine
    assert doctor.returncode in (0, 1) and "shared memory" in doctor.stdout, doctor.stderr

    assert "5 steps are trained" in paste(checkout, "sft")
    shutil.copytree(runs / "sft-try", runs / "sft", symlinks=True)  # as if it had been the demo's
    assert "trained 5 steps" in paste(checkout, "train")
    shutil.copytree(runs / "try", runs / "grpo", symlinks=True)
    assert "trainer" in paste(checkout, "status")
    assert "3, committed" in paste(checkout, "show")
    assert "step 3: every stage agrees with the record" in paste(checkout, "replay")
    assert "every stage of every step agrees" in paste(checkout, "diff")
    assert "step 3: 512 sequences, worst first by gradient" in paste(checkout, "blame")
    assert "addition-grpo-step-000003.stages.clew.zip" in paste(checkout, "bundle")
    assert "exported 3 steps: runs/addition/exported/step-000000.pt" in paste(checkout, "export")
    assert "imported 1 step: runs/addition/imported" in paste(checkout, "import")

    processes = {}  # in three terminals; they go on with the run that the example of `train` began
    for name in ("serve", "rollout", "learn"):
        with (checkout / f"{name}.txt").open("w") as output:
            processes[name] = subprocess.Popen(
                command_of(examples()[name]), cwd=checkout, stdout=output, stderr=output, env=variables()
            )
    index = runs / "try" / "steps" / "index.jsonl"
    try:
        deadline = time.monotonic() + 300
        while index.read_text().count("\n") < 7:
            for name, process in processes.items():
                assert process.poll() is None, (name, (checkout / f"{name}.txt").read_text())
            assert time.monotonic() < deadline, (checkout / "learn.txt").read_text()
            time.sleep(0.1)
        assert "CLEW_LLM_SERVER_ADDRS=127.0.0.1:" in (checkout / "serve.txt").read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
