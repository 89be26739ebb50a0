"""The run directory: everything that a run knows, in one place, in formats that other tools read.

See DESIGN's drawing in docs/record.md. Processes find one another here; there is no other registry.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from clew import config as configuration
from clew.config import Config
from clew.errors import RecordError
from clew.processes import hold_lock
from clew.reading import STRICT, Count, Flag, Moment, Number, check, read_json
from clew.record import chain, rows
from clew.record.files import remove_strays, write_bytes, write_json
from clew.record.inbox import Inbox
from clew.record.media import Media
from clew.record.steps import Steps
from clew.record.warned import kept_warnings
from clew.record.weights import WeightRef
from clew.waits import Reporter

PACKAGES = ("clew", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An inference server, as servers.json has it."""

    name: str
    address: str
    """host:port"""
    pid: Count
    ready: Flag
    """It has loaded the newest weights, or answers 503 until it has."""
    token: str = ""
    """What calls that change its state need."""


@with_config(STRICT)
class Changed(TypedDict):
    """A change of the configuration: the first step with it, and the old and the new value of each field."""

    step: Count
    fields: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


@with_config(STRICT)
class Facts(TypedDict, total=False):
    """Content of run.json; whoever wrote it may have added more."""

    clew_format: int
    created: Moment
    packages: dict[str, str]
    python: str
    platform: str
    git: str | None
    trainer: str | None
    parameters: list[str]
    changes: list[Changed]
    foreign: str


class Evaluated(TypedDict):
    """Content of an evaluation's JSON; besides, there are numbers named pass@1 and so on."""

    version: Count
    reward: NotRequired[Number | None]
    rewards: NotRequired[dict[str, Number | None]]
    length: NotRequired[Number | None]
    truncated: NotRequired[Number | None]
    episodes: NotRequired[Number | None]
    failed: NotRequired[Number | None]


class RunDirectory:
    """Paths and files of one run. Opening it creates what is missing and checks the format."""

    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Raises RecordError when the directory is of a newer format.

        make: make the folders that are missing. Whoever only reads changes nothing; see `open_run`.
        """
        self.path = path
        self.run_json = path / "run.json"
        if self.run_json.exists():
            rows.check_format(self.run_json, self.facts().get("clew_format", 0))
        self.config_path = path / "config.yaml"
        self.warnings_path = path / "warnings.jsonl"
        self.status = path / "status"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.reports = path / "reports"
        self.rejected = path / "rejected"
        self.evals = path / "evals"
        if make:
            for folder in (self.status, self.logs, self.checkpoints, self.reports, self.rejected, self.evals):
                folder.mkdir(parents=True, exist_ok=True)
            for name in ("inbox", "steps"):
                (path / name).mkdir(exist_ok=True)
        self.inbox = Inbox(path / "inbox")
        self.steps = Steps(path / "steps")
        self.media = Media(path / "media")

    def hold(self, role: str) -> IO[str]:
        """Be the one `role` ("trainer", "rollout", "server") of this run until the process ends. Raises RecordError."""
        return hold_lock(self.status / f"{role}.lock", role)

    @contextmanager
    def report(self, process: str) -> Iterator[Reporter]:
        """Write what this process is doing into status/, and append its warnings to warnings.jsonl."""
        with Reporter(self.status, process) as reporter, kept_warnings(self.warnings_path, reporter):
            yield reporter

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

    def changes(self, config: Config) -> dict[str, list[Any]]:
        """Return the fields in which `config` differs from config.yaml, with the old and the new value of each. The
        fields that name the run directory do not count: it may have been moved."""
        if not self.config_path.exists():
            return {}
        before, now = (
            configuration.flat(each.model_dump(mode="json")) for each in (configuration.load(self.config_path), config)
        )
        names = [name for name in now if name not in ("root", "experiment", "trial")]
        return {name: [before.get(name), now[name]] for name in names if before.get(name) != now[name]}

    def describe(self, config: Config | None, *, step: int = 0, **facts: Any) -> None:
        """Write config.yaml and run.json: format, packages, git revision, platform, and `facts` (threads, topology).

        Call it only when a step is about to be trained with `config`, so that config.yaml says what was trained.

        Args:
            config: None where another trainer has one of its own.
            step: the next step. What changed from an earlier step to it is added to `changes` in run.json.
        """
        before = self.facts() or {"created": time.time()}
        if config is not None:
            if step and (changed := self.changes(config)):
                facts["changes"] = [*before.get("changes", []), {"step": step, "fields": changed}]
            write_bytes(self.config_path, configuration.dump(config).encode())
        described = {
            "clew_format": rows.FORMAT,
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "platform": platform.platform(),
            **facts,
            "git": facts["git"] if "git" in facts else _git_revision(),
        }
        write_json(self.run_json, {**before, **described})

    def facts(self) -> dict[str, Any]:
        """What run.json says; empty before the first `describe`."""
        return read_json(self.run_json, Facts) if self.run_json.exists() else {}

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
        """Write an evaluation. Its JSON is written last and says that it is complete; `rows` in it is the digest of the
        file with its sequences."""
        path = self.evals / f"version-{version:06d}.parquet"
        rows.write_table(path, rows.to_table(sequences))
        said = {"version": version, **summary, "rows": chain.digest(path.read_bytes())}
        write_bytes(path.with_suffix(".json"), chain.sealed(said))

    def read_eval(self, version: int) -> dict[str, Any] | None:
        """The summary of an evaluation, None while it is not complete."""
        path = self.evals / f"version-{version:06d}.json"
        return read_evaluation(path) if path.exists() else None

    def newest_eval(self) -> dict[str, Any] | None:
        """The newest complete evaluation."""
        path = max(self.evals.glob("version-*.json"), default=None)
        return read_evaluation(path) if path else None

    def read_evals(self) -> list[dict[str, Any]]:
        """All complete evaluations, by version."""
        return [read_evaluation(path) for path in sorted(self.evals.glob("version-*.json"))]

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
        self._change_servers(lambda servers: {**servers, server.name: server})

    def remove_server(self, name: str) -> None:
        """Take a server out of servers.json."""
        self._change_servers(lambda servers: {key: value for key, value in servers.items() if key != name})

    def servers(self) -> list[Server]:
        """The servers that are registered, ready or not, alive or not."""
        path = self.path / "servers.json"
        return list(read_json(path, dict[str, Server]).values()) if path.exists() else []

    def _change_servers(self, change: Any) -> None:
        with (self.status / "servers.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for microseconds
            path = self.path / "servers.json"
            there = read_json(path, dict[str, Server]) if path.exists() else {}
            # private: it has their tokens
            write_json(path, {name: asdict(server) for name, server in change(there).items()}, private=True)


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read an evaluation's JSON. Raises RecordError when it is something else."""
    found = read_json(path, Evaluated)
    check(path, {name: value for name, value in found.items() if name.startswith("pass@")}, dict[str, Number | None])
    return found


def changes_in_words(changes: Mapping[str, Sequence[Any]]) -> str:
    """Return changed fields as one line, such as "training.lr 0.001 -> 0.01"; see `RunDirectory.changes`."""
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())


def warn_of_changes(log: logging.Logger, config: Config, run: RunDirectory, step: int, until: int) -> None:
    """Announce what changed in the configuration since the run was last trained.

    Args:
        step: the next one.
        until: the step before which the run ends.
    """
    if not (changed := run.changes(config)):
        return
    if step < until:
        log.warning("from step %d on the configuration is another: %s", step, changes_in_words(changed))
    else:
        log.warning(
            "no step is left to train, so these changes of the configuration have no effect, and config.yaml stays as "
            "it is: %s",
            changes_in_words(changed),
        )


def open_run(path: Path | str) -> RunDirectory:
    """Open a run directory that must exist already, to read it: no file or folder is made. Raises RecordError."""
    path = Path(path)
    if not (path / "status").is_dir():
        raise RecordError(
            f"{path} is no run directory: it holds no status/. A run lies in ROOT/EXPERIMENT/TRIAL, "
            f"for example runs/addition/0."
        )
    return RunDirectory(path, make=False)


def _git_revision() -> str | None:
    """The commit of the working directory, with "+" when it has changes; None outside git."""
    try:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if revision.returncode != 0:
            return None
        # A repository's own configuration may name a program that watches files, which `status` would run.
        status = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "-uno"]
        changes = subprocess.run(status, capture_output=True, text=True, timeout=10)
        return revision.stdout.strip() + ("+" if changes.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return None
