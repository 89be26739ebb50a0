"""The command line: a thin front that parses, calls and prints. Each command imports what it needs itself."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from clew import __version__
from clew.cli import record, run
from clew.cli.agent import agent_app
from clew.cli.hang import hang
from clew.errors import DEFECT, ClewError, Interrupted, RecordError, explain_missing
from clew.printing import VisibleRecord, break_silence, print

app = typer.Typer(
    name="clew",
    help="Reinforcement learning for LLM agents in which every training step leaves a thread back to its cause.",
    epilog="The examples in --help use files that `make demo` and the examples of the commands above them write. "
    "Exit codes: 0 sound; 1 something was found (a difference, an unfit agent); 2 could not run (bad input, or a run "
    "that ended before its last step); 3 not judged; 70 a defect of Clew; 130 interrupted; 141 nobody read its output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for command in (run.train, run.sft, run.serve, run.rollout, run.learn, record.status):
    app.command()(command)
for command in (record.show, record.replay, record.diff, record.blame, record.bundle, run.config, record.export):
    app.command()(command)
app.command("import")(record.import_)
app.command("eval")(run.evaluate)
app.command()(run.doctor)
app.command()(hang)
app.add_typer(agent_app, name="agent")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"clew {__version__}")
        raise typer.Exit


@app.callback()
def _clew(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


COULD_NOT_RUN = 2
"""Exit code after a ClewError. Typer uses the same code for a command line that it cannot parse."""

BROKEN_PIPE = 141
"""Exit code if the reader of the output has gone, such as `head`: 128 + SIGPIPE, as in other programs."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, and after SIGTERM if the run can be continued: 128 + SIGINT."""


def main() -> None:
    """Run the command line, and end this process. If it is one of several trainer ranks, it skips Python's exit.

    A normal exit of Python would destroy what torch still holds of its process groups. After a failure, gloo waits
    there for pending operations, and so for ranks that still train because they do not know of the failure yet. After a
    success, that exit sometimes failed with "terminate called without an active exception" (signal 6).
    """
    try:
        _main()
    except SystemExit as ended:
        if isinstance(ended.code, int | None) and os.environ.get("WORLD_SIZE", "1") != "1":
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(ended.code or 0)
        raise


def _main() -> None:
    """Run the command line, and turn errors into exit codes.

    A ClewError exits with its message and 2, or with 130 if it is an Interrupted. A full or read-only disk, or a
    denied permission, exits with a message and 2, too. Any other error is a defect: it exits with a traceback and 70.
    A command itself exits with 1 if it found something (a difference, an unfit agent), and with 3 if it cannot judge.
    """
    from clew.launch.ranks import report_failure
    from clew.processes import die_with_parent

    die_with_parent()
    if "RANK" not in os.environ:  # no launcher set WORLD_SIZE, so it says nothing about ranks
        os.environ.pop("WORLD_SIZE", None)
    # OpenMP's threads spin while they wait for one another. Under `clew train`, processes share the cores, and threads
    # that spin take time from the other processes: two such processes on two cores were ten times slower. torch reads
    # this variable when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Imports make a million objects that live until the end. Looking for garbage after every 700 of them would take 5
    # to 15 % of the time.
    gc.set_threshold(10_000)
    logging.setLogRecordFactory(VisibleRecord)  # also for the logs of libraries
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":  # Latin-1 has no arrows
        sys.stdout.reconfigure(errors="backslashreplace")
    break_silence(f"{' '.join(['clew', *sys.argv[1:2]])} is starting: it still imports modules or reads files")
    try:
        with explain_missing():
            app()
    except ClewError as error:
        _exit_with(error)
    except (KeyboardInterrupt, SystemExit) as ended:
        # Typer turns a KeyboardInterrupt into SystemExit(130).
        if isinstance(ended, KeyboardInterrupt) or ended.code == INTERRUPTED:
            again = "train, sft, serve, rollout and learn continue when started again"
            _exit_with(Interrupted(f"interrupted; nothing recorded is lost. {again}."))
        if ended.code:
            report_failure(ended)
        if isinstance(ended.__context__, OSError) and ended.__context__.errno == errno.EPIPE:
            raise SystemExit(BROKEN_PIPE) from None  # Click and Rich end with 1
        raise
    except Exception as error:
        if (explained := _disk_error(error)) is not None:
            _exit_with(explained)
        report_failure(error)
        print(traceback.format_exc(), end="", file=sys.stderr)
        print(
            "clew: this is a defect of Clew. Please report it with the traceback above. Nothing recorded is lost.",
            file=sys.stderr,
        )
        raise SystemExit(DEFECT) from None
    finally:
        # Skip the last garbage collection: with torch loaded it takes a second, and frees only what ends with the
        # process anyway.
        gc.freeze()


def _exit_with(error: ClewError) -> NoReturn:
    """Report an error, to the launcher or on stderr, and exit."""
    from clew.launch.ranks import report_failure

    if not report_failure(error):
        print(f"clew: {error}", file=sys.stderr)
    raise SystemExit(INTERRUPTED if isinstance(error, Interrupted) else COULD_NOT_RUN) from None


def _disk_error(error: Exception) -> ClewError | None:
    """Return an explanation if a full or read-only disk, or a denied permission, caused an error; otherwise None."""
    if not isinstance(error, OSError):
        return None
    from clew.record.files import OF_THE_DISK, disk_error

    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # such as stdout on a full disk
        return RecordError(f"Cannot write: {error.strerror}. Free space on the output's disk, the run's or /dev/shm.")
    if not isinstance(error.filename, str | Path):
        return None
    if isinstance(error, PermissionError):  # "use": it may have been read, or only looked up
        return RecordError(
            f"Cannot use {error.filename}: {error.strerror}. Change its permissions, or choose another path."
        )
    return disk_error(Path(error.filename), error) if error.errno in OF_THE_DISK else None
