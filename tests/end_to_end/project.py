"""A folder as a user has it (model, data, code of their own, one YAML) and the command line, typed in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from clew.reading import read_json
from clew.record.run import RunDirectory
from tests.forked import clew
from tests.models import tiny_model, tiny_tokenizer

T = TypeVar("T")

ROOT = Path(__file__).parent.parent.parent

PATIENCE_S = 180.0
"""Time limit, on a slow and busy machine, for what takes seconds."""

USER_CODE = """\
import asyncio, time
from pathlib import Path

def digits(completion, data):
    return sum(character.isdigit() for character in completion) / 8
"""

CONFIG: dict[str, Any] = {
    "experiment": "tiny",
    "trial": "0",
    "model": {"path": "model", "device": "cpu"},
    "data": {"path": "prompts.jsonl"},
    "rollout": {"reward": "mine.digits", "batch_groups": 2, "n_samples": 4},
    "sampling": {"max_new_tokens": 8},
    "training": {"steps": 3, "lr": 1e-3},
    "launch": {"threads": 1},
}
"""Relative paths and a dotted path in the current directory: as typed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str
    """Return what the terminal showed, standard output and errors."""

    @property
    def said(self) -> str:
        """The output, with line breaks as blanks."""
        return " ".join(self.output.split())

    @property
    def error(self) -> str:
        """Return, from "clew: " on, the one message of a command that failed."""
        assert self.output.count("clew: ") == 1, self.output
        return " ".join(self.output[self.output.index("clew: ") :].split())


class Project:
    """A folder with a configuration `run.yaml`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = json.loads(json.dumps(CONFIG))
        self.started: dict[subprocess.Popen[Any], Path] = {}
        """Processes in the background, and the file that is each one's terminal."""
        self._terminals = 0
        folder.mkdir(exist_ok=True)
        tiny_model(folder / "model")
        tiny_tokenizer(folder / "model")
        self.prompts([{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(16)])
        self.code(USER_CODE)
        self.set()

    def prompts(self, rows: list[dict[str, Any]], name: str = "prompts.jsonl") -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def code(self, text: str) -> None:
        (self.folder / "mine.py").write_text(text)

    def set(self, **sections: Any) -> None:
        """Change fields of run.yaml."""
        for name, values in sections.items():
            self.config[name] = {**self.config.get(name, {}), **values} if isinstance(values, dict) else values
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.config))

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.path)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder / self.config.get("root", "runs") / self.config["experiment"] / str(self.config["trial"])

    def clew(self, command: str, *overrides: str, seconds: float = PATIENCE_S) -> Ended:
        """Run `clew COMMAND run.yaml OVERRIDES...` to its end, which must come in time, and leave no process."""
        process = self.start(command, *overrides)
        return self.end(process, seconds)

    def inline(self, *overrides: str, seconds: float = PATIENCE_S) -> Ended:
        """`clew train run.yaml launch.mode=inline OVERRIDES...`, in a fork that has everything imported."""
        return self.quick("train", "launch.mode=inline", *overrides, seconds=seconds)

    def quick(self, command: str, *overrides: str, seconds: float = PATIENCE_S) -> Ended:
        """`clew COMMAND run.yaml OVERRIDES...`, in a fork that has everything imported."""
        terminal = self._terminal()
        with clew(command, "run.yaml", *overrides, cwd=self.folder, output=terminal) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"did not end within {seconds:g} s:\n{terminal.read_text()}") from None
        return self._ended(code, terminal)

    def start(self, command: str, *overrides: str, **variables: str) -> subprocess.Popen[Any]:
        """Run it in the background, as the leader of a process group, like a command typed in a terminal."""
        terminal = self._terminal()
        with terminal.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "clew", command, "run.yaml", *overrides],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=os.environ | {"CLEW_PARENT_PID": str(os.getpid())} | variables,
            )
        self.started[process] = terminal
        return process

    def end(self, process: subprocess.Popen[Any], seconds: float = PATIENCE_S) -> Ended:
        """Wait for it."""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            shown = self.started[process].read_text()
            raise AssertionError(f"did not end within {seconds:g} s:\n{shown}\n{self._shown()}") from None
        return self._ended(code, self.started[process])

    def until(self, condition: Callable[[], T], *processes: subprocess.Popen[Any], seconds: float = PATIENCE_S) -> T:
        """Wait until the condition holds, while these processes live."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            for process in processes:
                assert process.poll() is None, f"ended with {process.returncode}:\n{self._shown()}"
            assert time.monotonic() < deadline, f"timed out:\n{self._shown()}"
            time.sleep(0.02)
        return found

    def status(self, role: str) -> dict[str, Any]:
        path = self.path / "status" / f"{role}.json"
        return read_json(path) if path.exists() else {"waits": [], "pid": 0, "doing": ""}

    def digests(self) -> list[dict[str, Any]]:
        """Return what each committed step has on record."""
        return [entry["digests"] for entry in self.run.steps.index()]

    def processes(self) -> set[psutil.Process]:
        """Return the processes that work in this folder, as all that a command starts does."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == self.folder:
                    found.add(process)
        return found

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _terminal(self) -> Path:
        self._terminals += 1
        return self.folder / f"terminal-{self._terminals}.txt"

    def _shown(self) -> str:
        """Terminals and logs, for a test that fails."""
        paths = [*sorted(self.folder.glob("terminal-*.txt")), *sorted((self.path / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def _ended(self, code: int, terminal: Path) -> Ended:
        deadline = time.monotonic() + 1.0
        while (left := self.processes() - self._alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"left over: {[process.cmdline() for process in left]}"
        return Ended(code=code, output=terminal.read_text())

    def _alive(self) -> set[psutil.Process]:
        """Return what was started in the background and has not been waited for, and its children."""
        alive = [psutil.Process(process.pid) for process in self.started if process.poll() is None]
        return {*alive, *(child for process in alive for child in process.children(recursive=True))}
