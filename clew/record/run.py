"""The run directory: everything that is known about a run, in one place, in formats that other tools can read.

docs/record.md has a drawing of it. Processes find one another here; there is no other registry.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from clew.errors import RecordError
from clew.printing import few
from clew.processes import PATIENCE_S, hold_lock
from clew.reading import STRICT, Count, FileMissing, Flag, Moment, flat, read_json
from clew.record import chain, rows
from clew.record.evaluations import Evaluations
from clew.record.files import remove_strays, write_bytes, write_json
from clew.record.inbox import Inbox
from clew.record.media import Media
from clew.record.run_warnings import kept_warnings
from clew.record.steps import Steps
from clew.record.weights import WeightRef

if TYPE_CHECKING:  # not importing the configuration saves a reader of the record a tenth of a second
    from clew.config import Config
    from clew.waits import Reporter

WRITES_CHECKPOINT = "writing a checkpoint"
"""Phrase in the trainer's status while it digests, collects and writes a checkpoint at its end."""
PACKAGES = ("clew", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An inference server, as servers.json lists it."""

    name: str
    address: str
    """Address as host:port."""
    pid: Count
    ready: Flag
    """True if it may be asked: it has the newest weights, or answers 503 until it has loaded them."""
    wants_weights: Flag = False
    """True if it waits for the trainer to broadcast the newest weights, or to load them if it is attached."""
    given_up: str = ""
    """Reason why the trainer has given this server up, which then ends; "" if it has not."""
    loaded: Count | None = None
    """Version that the trainer had it load last, if it is attached; its answers may not be of an earlier one."""
    loads: Count = 0
    """Number of times that the trainer had it load weights, if it is attached."""
    token: str = ""
    """Token that is needed for calls that change the server's state."""

    @property
    def attached(self) -> bool:
        """True if CLEW_LLM_SERVER_ADDRS names it: it is no process of this run, and does not know the run's weights."""
        return self.pid == 0

    def __str__(self) -> str:
        return f"server {self.name} ({self.address})"


def attached_servers() -> list[Server]:
    """Return the servers that CLEW_LLM_SERVER_ADDRS names; empty if the servers of the run directory are used."""
    from clew.config import server_addresses, server_token

    token = server_token()
    return [Server(name=each, address=each, pid=0, ready=True, token=token) for each in server_addresses()]


@with_config(STRICT)
class Changed(TypedDict):
    """A change of the configuration: the first step with it, and the old and new value of each field."""

    step: Count
    fields: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


@with_config(STRICT)
class Facts(TypedDict, total=False):
    """Fields of run.json that are checked. There are others, such as `threads`, `device` and `topology`."""

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


class RunDirectory:
    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Open a run directory.

        Args:
            make: Create the folders that are missing. To only read, use `open_run`, which changes nothing.

        Raises:
            RecordError: The run is of a newer format, or its folders cannot be made.
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
        if make:
            folders = (self.status, self.logs, self.checkpoints, self.reports, self.rejected)
            try:
                for folder in (*folders, path / "inbox", path / "steps", path / "evals"):
                    folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
                raise RecordError(
                    f"Cannot make the run directory {path}: {error.filename}: {error.strerror}. Name another root."
                ) from None
        self.inbox = Inbox(path / "inbox")
        self.steps = Steps(path / "steps")
        self.evals = Evaluations(path / "evals")
        self.media = Media(path / "media")

    def hold(self, role: str, patience_s: float = PATIENCE_S) -> IO[str]:
        """Take the lock of `role` ("trainer", "rollout", "server", "server-1") of this run until the process ends.

        Raises:
            RecordError: Another process still has this role after `patience_s` seconds.
        """
        return hold_lock(self.status / f"{role}.lock", role, patience_s)

    @contextmanager
    def report(self, process: str) -> Iterator[Reporter]:
        """Write what this process is doing into status/, and append its warnings to warnings.jsonl."""
        from clew.waits import Reporter

        with Reporter(self.status, process) as reporter, kept_warnings(self.warnings_path, reporter):
            yield reporter

    def clean_after_trainer(self) -> None:
        """Complete the index and remove what a killed trainer left half-written. Only the trainer may call this."""
        self.steps.repair()
        remove_strays(self.path, "config.yaml", "run.json", "weights.json")
        remove_strays(self.inbox.folder, "version.json")

    def clean_after_rollout(self) -> set[str]:
        """Remove what a killed rollout process left behind and return the groups that are already finished.

        This removes half-written files, and failed episodes of groups that will be made again. Only the rollout process
        may call this.
        """
        remove_strays(self.inbox.folder, "g*.arrows", "running.json")
        for folder in (self.rejected, self.evals.folder):
            remove_strays(folder, "*")
        settled = self.finished_groups()
        for path in self.rejected.glob("g*.e*.parquet"):
            if path.name.partition(".")[0] not in settled:
                path.unlink()
        return settled

    def checkpointed(self) -> list[int]:
        """Return the versions that have a checkpoint, oldest first."""
        folders = chain.checkpoint_folders(self.checkpoints)
        return [chain.version_of(folder) for folder in folders if (folder / "checkpoint.json").exists()]

    def unfinished_checkpoint(self) -> int:
        """Return how many bytes are written of a checkpoint that is not complete; 0 if none is being written."""
        size = 0
        with suppress(OSError):  # it has just become complete
            for file in self.checkpoints.glob(".step-*/**/*"):
                size += file.stat().st_size
        return size

    def writes_checkpoint(self) -> bool:
        """Return whether the trainer's last status says that it writes a checkpoint."""
        with suppress(RecordError, LookupError):  # such as a status that was cut off
            return read_json(self.status / "trainer.json", dict[str, Any])["doing"] == WRITES_CHECKPOINT
        return False

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"step-{version:06d}"

    def best_in_words(self) -> str:
        """Return text to append to a line: the best evaluated checkpoint; "" if it is the newest, or there is none."""
        best, latest = self.checkpoints / "best", self.checkpoints / "latest"
        if not best.is_symlink() or best.resolve() == latest.resolve():
            return ""
        return f"  Best evaluation: {best} ({best.readlink().name})"

    @cached_property
    def supervised(self) -> bool:
        """True if `clew sft` trains this run, by its newest committed step or the batch of a step 0 that failed.

        Cached, because no later step is of another kind.
        """
        count = self.steps.count()
        if count == 0 and self.steps.has_data(0):  # no policy generated the tokens of demonstrations
            return all((row.versions < 0).all() for row in self.steps.read_data(0))
        return count > 0 and self.steps.read(count - 1).get("supervised", False)

    # What the run is -------------------------------------------------------------------------------------------------

    def changes(self, config: Config) -> dict[str, list[Any]]:
        """Return the fields in which `config` differs from config.yaml, with the old and the new value of each.

        None stands for an option, such as one in rollout.workflow_kwargs, that is not there. Fields that name the run
        directory are ignored, because it may have been moved.
        """
        from clew import config as configuration

        if not self.config_path.exists():
            return {}
        before, now = (flat(each.model_dump(mode="json")) for each in (configuration.load(self.config_path), config))
        names = [name for name in {**now, **before} if name not in ("root", "experiment", "trial")]

        def below(values: dict[str, Any], name: str) -> Any:
            """Return a value, as a path below the root if it is one: the root may have been moved, too."""
            value, root = values.get(name), f"{values['root']}/"
            return ("root", value.removeprefix(root)) if isinstance(value, str) and value.startswith(root) else value

        changed = (name for name in names if before.get(name) != now.get(name))
        return {n: [before.get(n), now.get(n)] for n in changed if below(before, n) != below(now, n)}

    def describe(self, config: Config | None, *, step: int = 0, **facts: Any) -> None:
        """Write config.yaml and run.json: format, packages, git revision, platform and `facts` (threads, topology).

        Call it only when a step is about to be trained with `config`, so that config.yaml says what was trained.

        Args:
            config: The configuration; None if another trainer writes its own.
            step: The next step. Unless it is 0, what `config` changes is added to `changes` in run.json.
        """
        from clew.config import dump

        before = self.facts() or {"created": time.time()}
        if config is not None and step and (changed := self.changes(config)):
            change = {"step": step, "fields": changed}
            earlier = [each for each in before.get("changes", []) if each != change]  # written before a kill
            facts["changes"] = [*earlier, change]
        described = {
            "clew_format": rows.FORMAT,
            "packages": installed(PACKAGES),
            "python": platform.python_version(),
            "platform": platform.platform(),
            **facts,
            "git": facts["git"] if "git" in facts else _git_revision(),
        }
        write_json(self.run_json, {**before, **described})
        if config is not None:  # last: after a kill before this line, the change is found and noted again
            write_bytes(self.config_path, dump(config).encode())

    def facts(self) -> dict[str, Any]:
        """Return the content of run.json; empty before the first `describe`."""
        return read_json(self.run_json, Facts) if self.run_json.exists() else {}

    def prune(self, before: int) -> None:
        """Remove the data of the steps before `before`, and images that nothing refers to any more."""
        self.steps.prune(before)
        self.media.prune(self._shown)

    def _shown(self) -> set[str]:
        """Return the names of the images that any recorded sequence refers to."""
        files = [
            path
            for folder in (self.steps.folder, self.rejected, self.evals.folder)
            for path in folder.glob("*.parquet")
        ]
        tables = list(self.inbox.scan().values())
        for path in files:
            with suppress(FileMissing):  # a rollout process that starts removes failed episodes of lost groups
                tables.append(rows.read_table(path))
        return {name for table in tables for row in rows.images_of(table) for name in row}

    # Groups ----------------------------------------------------------------------------------------------------------

    def reject(self, name: str, sequences: Sequence[rows.Sequence]) -> None:
        """Write a rejected group, or one failed episode of a group, to rejected/. Each row has its reason."""
        rows.write_table(self.rejected / f"{name}.parquet", rows.to_table(sequences))

    def rejected_groups(self) -> set[str]:
        return {path.stem for path in self.rejected.glob("g*.parquet") if "." not in path.stem}

    def finished_groups(self) -> set[str]:
        """Return the IDs of the groups that are settled: waiting, in a step, or rejected. All others are made again."""
        return self.inbox.names() | self.steps.consumed() | self.steps.pending_groups() | self.rejected_groups()

    # Weights and servers ---------------------------------------------------------------------------------------------

    def announce_weights(self, ref: WeightRef) -> None:
        """Write where the newest weights are, before any server is asked to load them."""
        write_json(self.path / "weights.json", asdict(ref))

    def newest_weights(self) -> WeightRef | None:
        """Return the weights that a starting server has to load; None before the trainer has written any."""
        path = self.path / "weights.json"
        return read_json(path, WeightRef) if path.exists() else None

    def register_server(self, server: Server) -> None:
        """Add or update a server in servers.json.

        A server registers before it looks for the newest weights, and the trainer announces weights before it looks for
        servers. So one of the two always sees the other.
        """
        self._change_servers(lambda servers: {**servers, server.name: server})

    def remove_server(self, name: str) -> None:
        self._change_servers(lambda servers: {key: value for key, value in servers.items() if key != name})

    def servers(self) -> list[Server]:
        """Return the registered servers, whether or not they are ready or alive."""
        path = self.path / "servers.json"
        return list(read_json(path, dict[str, Server]).values()) if path.exists() else []

    def inference_servers(self) -> list[Server]:
        """Return the servers that this run samples from: those in CLEW_LLM_SERVER_ADDRS, or else the registered ones.

        A server in the variable does not register itself. If it is registered, the trainer did that, to take it out
        or to bring it back.
        """
        registered = self.servers()
        if not (attached := attached_servers()):
            return [server for server in registered if not server.attached]  # an earlier start named those
        states = {server.name: server for server in registered}
        return [replace(states.get(server.name, server), token=server.token) for server in attached]

    def readmit_attached(self) -> None:
        """Use all servers in CLEW_LLM_SERVER_ADDRS again, and forget what an earlier trainer had them load."""
        for server in attached_servers():
            self.remove_server(server.name)

    def _change_servers(self, change: Any) -> None:
        with (self.status / "servers.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for microseconds
            there = {server.name: server for server in self.servers()}
            changed = {name: asdict(server) for name, server in change(there).items()}
            write_json(self.path / "servers.json", changed, private=True)  # it has their tokens


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed. A Writer needs only a few of them."""
    versions: dict[str, str] = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def changes_in_words(changes: Mapping[str, Sequence[Any]]) -> str:
    """Return changed fields as one line, such as "training.lr 0.001 -> 0.01". See `RunDirectory.changes`."""
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())


def open_run(path: Path | str) -> RunDirectory:
    """Open an existing run directory to read it. No file or folder is created. Raises RecordError if there is none."""
    path = Path(path)
    if not path.exists():
        raise no_run(path)
    if not (path / "status").is_dir():
        raise RecordError(
            f"{path} is no run directory: it holds no status/. A run lies in ROOT/EXPERIMENT/TRIAL, "
            f"for example runs/addition/0."
        )
    return RunDirectory(path, make=False)


def no_run(path: Path) -> RecordError:
    """Return the error for a run directory or bundle that does not exist, which names the runs beside it."""
    found = [status.parent for pattern in ("*/status/", "*/*/status/") for status in path.parent.glob(pattern)]
    beside = sorted(str(run.relative_to(path.parent)) for run in found)
    hint = f"The runs in {path.parent} are {few(beside)}." if beside else "Name a run directory or a bundle."
    return RecordError(f"Cannot open {path}: it does not exist. {hint}")


def _git_revision() -> str | None:
    """Return the git commit of the current folder, with "+" if it has changes; None outside git."""
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
