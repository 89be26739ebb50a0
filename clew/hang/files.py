"""Says how old the newest files of a job are, and how its logs end: what it did last, and why a process has ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, takewhile
from pathlib import Path, PurePath
from typing import TypeVar

from clew.hang import proc
from clew.hang.observed import Process, Snapshot, installed
from clew.hang.roles import with_ranks
from clew.printing import counted

LIMIT_S = 2.0
"""Time limit in seconds for one search through files: a network file system that hangs gives no answer."""
MOST_FILES = 2_000
TAIL_BYTES, TRACEBACK_BYTES = 4_096, 1 << 18
"""Bytes of the end of a log in which the last line and the newest traceback are looked for."""
SHOWN = 200
"""Characters of a log's last line that are shown."""
FOLDERS = re.compile(r"check_?point|ckpt|rollout|heartbeat|weight|save|out|root|folder|path|dir|spool", re.I)
"""Names of local variables that may hold a folder of the job."""
EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")
"""Beginning of the last line of a traceback."""
RAY_SERVICE = re.compile(r"/ray/core/")
"""Matches the programs of Ray itself, whose logs say nothing about the job."""
RAY_MARK = re.compile(r":(actor_name|task_name|job_id):")
"""Matches the lines with which Ray begins the log of a worker."""
T = TypeVar("T")


def with_files(snapshot: Snapshot, run: Path | None = None) -> Snapshot:
    """Return a snapshot with lines about the newest files of its job and the ends of its logs.

    Args:
        snapshot: Processes of this machine.
        run: Run directory of Clew, if the job is a run of Clew.
    """
    named = [process for process, _ in with_ranks(snapshot.processes, snapshot.sources)]
    every = chain(in_run(run) if run else (), folders(named), logs(named, run))
    machine = (*snapshot.machine, *within_limit(every))
    errors = dict(within_limit(old_errors(named, snapshot.seconds)))
    processes = tuple(replace(each, old_error=errors.get(each.pid, "")) for each in snapshot.processes)
    return replace(snapshot, processes=processes, machine=machine)


def within_limit(values: Iterable[T]) -> list[T]:
    """Return the values that come within LIMIT_S: those before one for which a file system hangs."""
    found = list[T]()
    worker = threading.Thread(target=lambda: found.extend(values), daemon=True)
    worker.start()
    worker.join(LIMIT_S)
    return list(found)


def awaited_locks(process: Process) -> set[int]:
    """Return the inodes of the files that threads of a process try to lock with `filelock`.

    Newer versions of `filelock` open such a file for each attempt, and close it in between.
    """
    frames = (frame for thread in process.threads for frame in thread.frames if "/filelock/" in frame.file)
    texts = {frame.locals.get(name, "")[1:-1] for frame in frames for name in ("canonical_path", "lock_filename")}
    paths = [Path(process.cwd, text) for text in texts if text]
    return set(within_limit(_inodes(paths))) if paths else set()


def _inodes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with suppress(OSError, ValueError):
            yield path.stat().st_ino


def in_run(run: Path) -> Iterator[str]:
    """Yield the age of the newest checkpoint, finished group, step and status file of a run of Clew."""
    for name, pattern in (
        ("checkpoint", "checkpoints/step-*"),
        ("finished group", "inbox/*.arrows"),
        ("step", "steps/step-*.json"),
        ("status file", "status/[!.]*.json"),
    ):
        yield _newest(f"newest {name}", run.glob(pattern)) or f"newest {name}: none"


def folders(processes: Sequence[Process]) -> Iterator[str]:
    """Yield the newest file of each folder that a local variable of the users' frames names."""
    seen = set[Path]()
    for process in processes:
        for frame in (frame for thread in process.threads for frame in thread.user_frames):
            for name, value in frame.locals.items():
                if not FOLDERS.search(name) or not re.fullmatch(r"([\"'])/.{1,250}\1", value):
                    continue
                with suppress(OSError):  # a folder that may not be read
                    path = Path(value[1:-1])
                    folder = path if path.is_dir() else path.parent
                    if folder in seen or len(folder.parts) < 3 or not folder.is_dir() or len(seen) > 8:
                        continue
                    seen.add(folder)
                    if found := _newest(f"newest file in {str(folder)!r} ({name} of {frame.name})", folder.iterdir()):
                        yield found


def _newest(words: str, paths: Iterator[Path]) -> str:
    """Return words about the newest of some files; "" if there is none."""
    times: dict[str, float] = {}
    for path in islice(paths, MOST_FILES):
        with suppress(OSError):
            times[path.name] = path.stat().st_mtime
    name = max(times, key=lambda each: times[each], default="")
    return f"{words}: {name[:100]!r}, {max(0.0, time.time() - times[name]):.0f} s old" if name else ""


def logs(processes: Sequence[Process], run: Path | None) -> Iterator[str]:
    """Yield the last line of each file that processes print to, and of the logs of a run's ended processes."""
    found = dict[Path, str]()
    for process in processes:
        if run is not None and process.name and (process.exit or process.last.state in "ZX"):
            found[run / "logs" / f"{process.name}.log"] = f"{process.label}, which has ended {process.exit}".rstrip()
        for path in _outputs(process) if not RAY_SERVICE.search("".join(process.command[:1])) else ():
            found.setdefault(path, process.label)
    for path, who in list(found.items())[:8]:
        with suppress(OSError):
            if path.is_file():
                last, age = _last_line(path), _age(path)
                if not last and path.name.startswith("worker-"):
                    continue  # a worker of Ray that has printed nothing
                when = f"written {age:.0f} s ago" if last else f"empty for {age:.0f} s"
                yield f"log of {who}, {when} ({str(path)!r}){f': {last!r}' if last else ''}"
                if said := newest_traceback(_tail(path, TRACEBACK_BYTES)):
                    yield f"newest traceback there: {said}"


def newest_traceback(text: str) -> str:
    """Return the exception of a log's last traceback, the user's line that raised it, and how many lines follow it."""
    before, mark, after = text.rpartition("Traceback (most recent call last):")
    *_, above, prefix = ["", *before.split("\n")]  # torchrun, for example, begins each line with the rank
    prefix = re.sub(r"[+|] Exception Group $", "| ", prefix)
    lines = after.splitlines()[1:]
    if not any(line.startswith(prefix) for line in lines):
        prefix = ""  # only the first line of a message has it, such as a time
    # Lines of other ranks may come between.
    own = [(line.removeprefix(prefix), n) for n, line in enumerate(lines) if line.startswith(prefix)]
    frames = [line for line, _ in takewhile(lambda each: each[0].startswith(" "), own)]
    named = re.findall(r'File "([^"]+)", line (\d+)', "\n".join(frames))
    error, at = next(iter(own[len(frames) :]), ("", 0))
    if not mark or not named or not error:
        return ""
    later = len(lines) - at - 1
    places = [f" at {PurePath(file).name}:{line}" for file, line in named if not installed(file)]
    thread = re.search(r"Exception in (thread .+?):?$", above)
    words = f"{error[:SHOWN]!r}{places[-1] if places else ''}" + (f" in {thread[1]}" if thread else "")
    return words + (f", {counted(later, 'line')} before the end" if later else "")


def old_errors(processes: Sequence[Process], seconds: float) -> Iterator[tuple[int, str]]:
    """Yield the pid and the last line of each process whose output ends with an exception older than `seconds`."""
    paths = [(process.pid, path) for process in processes for path in _outputs(process)]
    lines = dict[Path, str]()  # the ranks of a job often share a log: it is read once
    for path in {path for _, path in paths}:
        with suppress(OSError):
            if path.is_file() and _age(path) > seconds and EXCEPTION.match(last := _last_line(path)):
                lines[path] = last
    yield from ((pid, lines[path]) for pid, path in paths if path in lines)


def _outputs(process: Process) -> Iterator[Path]:
    """Yield the files that are the standard output and error of a process."""
    for number in (1, 2):
        path = Path(proc.link_of(proc.PROC / str(process.pid) / "fd" / str(number)))
        if path.is_absolute() and not path.is_relative_to("/dev"):
            yield path


def _age(path: Path) -> float:
    """Return the seconds since a file was written last."""
    return max(0.0, time.time() - path.stat().st_mtime)


def _last_line(path: Path) -> str:
    lines = map(str.strip, reversed(_tail(path, TAIL_BYTES).splitlines()))
    return next((line[:SHOWN] for line in lines if line and not RAY_MARK.match(line)), "")


def _tail(path: Path, size: int) -> str:
    """Return the end of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size).decode(errors="replace")
