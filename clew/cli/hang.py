"""The command that says why a job has stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clew.printing import print


def hang(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory of a Clew run; without any argument, the jobs of this machine are listed.",
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option(
            "--pid", metavar="PID", help="A process of the job; its children and peers are found. Repeatable."
        ),
    ] = None,
    torchrun: Annotated[
        int | None, typer.Option("--torchrun", metavar="PID", help="The launcher, of which all workers are examined.")
    ] = None,
    dumps: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Reports of --json or JSON dumps of py-spy, taken elsewhere."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON; - prints only that.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Only print the stacks, equal ones together.")] = False,
) -> None:
    """Say why a distributed job has stopped: who waits for whom, and whose fault it is.

    Example: clew hang --torchrun 4711
    """
    from clew.errors import ConfigError
    from clew.hang.dumps import read_dumps
    from clew.hang.examine import examine, processes_of_run
    from clew.hang.jobs import listed
    from clew.hang.judge import judge
    from clew.hang.report import as_json, in_text, stacks_in_text

    given = [each is not None for each in (run, pid, torchrun, dumps)]
    if sum(given) > 1:
        raise ConfigError("Cannot look at several jobs at once: give one of RUN, --pid, --torchrun and --from.")
    if not any(given):
        jobs = listed()
        for name, pids in jobs.items():
            print(f"{name}: clew hang " + " ".join(f"--pid {each}" for each in pids))
        if not jobs:
            print("No torch job runs on this machine. Give a run directory, or --pid.")
        return
    if dumps is not None:
        seen = read_dumps(dumps)
    elif run is not None:
        named = processes_of_run(run)
        from clew.hang.proc import stat_of

        seen = examine([each for each in named if stat_of(each)], named)
    else:
        seen = examine(pid or [torchrun or 0])
    if stacks:
        print(stacks_in_text(seen))
        return
    verdict = judge(seen)
    if json_file is not None:
        _write(json_file, as_json(verdict, seen))
    if str(json_file) != "-":
        print(in_text(verdict, seen))
    if verdict.exit_code:
        raise SystemExit(verdict.exit_code)


def _write(path: Path, report: dict) -> None:
    import json

    text = json.dumps(report, indent=1)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text)
