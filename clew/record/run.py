"""The run directory: everything that a run knows, in one place, in formats that other tools read.

See DESIGN's drawing in docs/record.md. Processes find one another here; there is no other registry.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from clew import config as configuration
from clew.config import Config
from clew.errors import RecordError
from clew.processes import hold_lock
from clew.record import rows
from clew.record.files import read_json, remove_strays, write_bytes, write_json
from clew.record.inbox import Inbox
from clew.record.media import Media
from clew.record.steps import Steps
from clew.record.weights import WeightRef

PACKAGES = ("clew", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An inference server, as servers.json has it."""

    name: str
    address: str
    """host:port"""
    pid: int
    ready: bool
    """It has loaded the newest weights, or answers 503 until it has."""
    token: str = ""
    """What its administrative endpoints ask for; empty where only this machine can reach them."""


class RunDirectory:
    """Paths and files of one run. Opening it creates what is missing and checks the format."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError when the directory is of a newer format."""
        self.path = path
        self.run_json = path / "run.json"
        if self.run_json.exists():
            rows.check_format(self.run_json, read_json(self.run_json).get("clew_format", 0))
        self.config_path = path / "config.yaml"
        self.status = path / "status"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.reports = path / "reports"
        self.rejected = path / "rejected"
        self.evals = path / "evals"
        for folder in (self.status, self.logs, self.checkpoints, self.reports, self.rejected, self.evals):
            folder.mkdir(parents=True, exist_ok=True)
        self.inbox = Inbox(path / "inbox")
        self.steps = Steps(path / "steps")
        self.media = Media(path / "media")

    def hold(self, role: str) -> IO[str]:
        """Be the one `role` ("trainer", "rollout", "server") of this run until the process ends. Raises RecordError."""
        return hold_lock(self.status / f"{role}.lock", role)

    def clean_after_trainer(self) -> None:
        """Complete the index, and remove what a killed trainer left half-written. Only a trainer calls it."""
        self.steps.repair()
        remove_strays(self.path, "config.yaml", "run.json", "weights.json")
        remove_strays(self.inbox.folder, "version.json")

    def clean_after_rollout(self) -> set[str]:
        """Remove what a killed rollout process left: half-written files, and failed episodes of groups that are to be
        made again. Only a rollout process calls it. Returns the groups whose fate is settled."""
        remove_strays(self.inbox.folder, "g*.arrows", "running.json")
        for folder in (self.rejected, self.evals):
            remove_strays(folder, "*")
        settled = self.finished_groups()
        for path in self.rejected.glob("g*.e*.parquet"):
            if path.name.partition(".")[0] not in settled:
                path.unlink()
        return settled

    def checkpointed(self) -> list[int]:
        """The versions of which there are checkpoints, oldest first."""
        return sorted(int(path.parent.name[5:]) for path in self.checkpoints.glob("step-*/checkpoint.json"))

    # What the run is -------------------------------------------------------------------------------------------------

    def describe(self, config: Config | None, **facts: Any) -> None:
        """Write config.yaml and run.json: format, packages, git revision, platform, and `facts` (threads, topology).

        config: None where another trainer has one of its own."""
        if config is not None:
            write_bytes(self.config_path, configuration.dump(config).encode())
        before = read_json(self.run_json) if self.run_json.exists() else {"created": time.time()}
        described = {
            "clew_format": rows.FORMAT,
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "platform": platform.platform(),
            "git": _git_revision(),
            **facts,
        }
        write_json(self.run_json, {**before, **described})

    def facts(self) -> dict[str, Any]:
        """What run.json says; empty before the first `describe`."""
        return read_json(self.run_json) if self.run_json.exists() else {}

    def prune(self, before: int) -> None:
        """Remove the data of the steps before `before`, and images that nothing refers to any more."""
        self.steps.prune(before)
        self.media.prune(self._shown)

    def _shown(self) -> set[str]:
        """The names of the images that any sequence on record refers to."""
        files = [path for folder in (self.steps.folder, self.rejected, self.evals) for path in folder.glob("*.parquet")]
        tables = [*map(rows.read_table, files), *self.inbox.scan().values()]
        return {name for table in tables for row in rows.images_of(table) for name in row}

    # Groups ----------------------------------------------------------------------------------------------------------

    def reject(self, name: str, sequences: Sequence[rows.Sequence]) -> None:
        """File a group that was filtered out or failed, or one failed episode of a group, each row with its reason."""
        rows.write_table(self.rejected / f"{name}.parquet", rows.to_table(sequences))

    def rejected_groups(self) -> set[str]:
        """The groups that were rejected as a whole."""
        return {path.stem for path in self.rejected.glob("g*.parquet") if "." not in path.stem}

    def finished_groups(self) -> set[str]:
        """Every group whose fate is settled: waiting, in a step, or rejected. All others are issued again."""
        return self.inbox.names() | self.steps.consumed() | self.steps.pending_groups() | self.rejected_groups()

    # Evaluations -----------------------------------------------------------------------------------------------------

    def write_eval(self, version: int, sequences: Sequence[rows.Sequence], summary: dict[str, Any]) -> None:
        """File an evaluation; its JSON (written last) says that it is complete."""
        rows.write_table(self.evals / f"version-{version:06d}.parquet", rows.to_table(sequences))
        write_json(self.evals / f"version-{version:06d}.json", {"version": version, **summary})

    def read_eval(self, version: int) -> dict[str, Any] | None:
        """The summary of an evaluation, None while it is not complete."""
        path = self.evals / f"version-{version:06d}.json"
        return read_json(path) if path.exists() else None

    def newest_eval(self) -> dict[str, Any] | None:
        """The newest complete evaluation."""
        path = max(self.evals.glob("version-*.json"), default=None)
        return read_json(path) if path else None

    def read_evals(self) -> list[dict[str, Any]]:
        """All complete evaluations, by version."""
        return [read_json(path) for path in sorted(self.evals.glob("version-*.json"))]

    # Weights and servers ---------------------------------------------------------------------------------------------

    def announce_weights(self, ref: WeightRef) -> None:
        """Say where the newest weights lie, before any server is asked to load them."""
        ref.write(self.path / "weights.json")

    def newest_weights(self) -> WeightRef | None:
        """What a server that starts has to load; None before the trainer has written any."""
        path = self.path / "weights.json"
        return WeightRef.read(path) if path.exists() else None

    def register_server(self, server: Server) -> None:
        """Enter (or update) a server in servers.json. A server registers before it looks for the newest weights, and
        the trainer announces weights before it looks for servers: so one of the two sees the other."""
        self._change_servers(lambda servers: {**servers, server.name: asdict(server)})

    def remove_server(self, name: str) -> None:
        """Take a server out of servers.json."""
        self._change_servers(lambda servers: {key: value for key, value in servers.items() if key != name})

    def servers(self) -> list[Server]:
        """The servers that are registered, ready or not, alive or not."""
        path = self.path / "servers.json"
        return [Server(**entry) for entry in read_json(path).values()] if path.exists() else []

    def _change_servers(self, change: Any) -> None:
        with (self.status / "servers.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for microseconds
            path = self.path / "servers.json"
            write_json(path, change(read_json(path) if path.exists() else {}))


def open_run(path: Path | str) -> RunDirectory:
    """Open a run directory that must exist already. Raises RecordError."""
    path = Path(path)
    if not (path / "status").is_dir():
        raise RecordError(
            f"{path} is no run directory: it holds no status/. A run lies in ROOT/EXPERIMENT/TRIAL, "
            f"for example runs/addition/0."
        )
    return RunDirectory(path)


def _git_revision() -> str | None:
    """The commit of the working directory, with "+" when it has changes; None outside git."""
    try:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if revision.returncode != 0:
            return None
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
        return revision.stdout.strip() + ("+" if changes.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return None
