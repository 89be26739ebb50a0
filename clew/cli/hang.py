"""The command `clew hang`, which says why a distributed job hangs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clew.printing import counted, print

if TYPE_CHECKING:
    from clew.hang.observed import Snapshot


def hang(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Directory of a Clew run. Without any argument, list the jobs of this machine.",
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option(
            "--pid", metavar="PID", help="A process of the job; its children and peers are found. Repeatable."
        ),
    ] = None,
    torchrun: Annotated[
        int | None, typer.Option("--torchrun", metavar="PID", help="PID of torchrun; all its workers are examined.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="ADDR:PORT", help="The torch job with this MASTER_ADDR and MASTER_PORT."),
    ] = None,
    ssh: Annotated[
        list[str] | None,
        typer.Option("--ssh", metavar="HOST", help="Examine RUN or --job on this host. Repeatable."),
    ] = None,
    dumps: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Reports of --json or JSON dumps of py-spy, taken elsewhere."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", dir_okay=False, help="Also write the report as JSON; - prints only that."
        ),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", dir_okay=False, help="Also write the report as an HTML page."),
    ] = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="Also read C and C++ frames of a process per distinct stack; pauses it briefly."),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Only print all stacks, taken once, with equal stacks merged; no verdict.")
    ] = False,
) -> None:
    """Say why a distributed job hangs: who waits for whom, and which process is at fault.

    Example: clew hang --torchrun 4711
    """
    import json

    from clew.errors import ConfigError
    from clew.hang.collect import with_native
    from clew.hang.dumps import read_dumps
    from clew.hang.examine import WATCH_S
    from clew.hang.report import Report
    from clew.record.files import write_bytes

    given = [each is not None for each in (run, pid, torchrun, job, dumps)]
    if sum(given) > 1:
        raise ConfigError("Cannot look at several jobs at once: give one of RUN, --pid, --torchrun, --job and --from.")
    if ssh and (pid or torchrun or dumps):
        raise ConfigError("Cannot combine --ssh with --pid, --torchrun or --from: give RUN, --job, or nothing.")
    if stacks and (json_file or html_file):
        raise ConfigError("Cannot write a report with --stacks, which only prints: leave out --stacks, or the files.")
    if native and dumps:
        raise ConfigError("Cannot read C frames with --from: its files were written earlier. Write them with --native.")
    if not (ssh or any(given) or json_file or html_file or native or stacks):
        _list_jobs()
        return
    if dumps is None and not stacks and str(json_file) != "-":
        print(f"clew hang watches the job until it is sure, mostly within {WATCH_S:g} s", file=sys.stderr, flush=True)
    if ssh:
        seen = _on_hosts(ssh, run, job, native)
    elif dumps is not None:
        seen = read_dumps(dumps)
    else:
        seen = _here(run, pid or ([torchrun] if torchrun is not None else None), job, once=stacks)
        seen = with_native(seen) if native else seen
    report = Report(seen)
    if stacks:
        print(report.stacks_in_text())
        return
    if str(json_file) == "-":
        print(json.dumps(report.as_json(), indent=1))
    else:
        print(report.in_text())  # first, so that the verdict is shown even if a file cannot be written
        if json_file is not None:
            write_bytes(json_file, json.dumps(report.as_json(), indent=1).encode())
    if html_file is not None:
        from clew.hang.html_report import as_html

        write_bytes(html_file, as_html(report).encode())
    if report.verdict.exit_code:
        raise SystemExit(report.verdict.exit_code)


def _here(run: Path | None, pids: list[int] | None, job: str | None, *, once: bool) -> Snapshot:
    """Examine one job of this machine: that of RUN, of these processes or of --job; by default, the only torch job."""
    from clew.errors import ConfigError
    from clew.hang import jobs
    from clew.hang.examine import examine, processes_of_run, run_of
    from clew.hang.files import with_files
    from clew.hang.gpus_and_nccl import with_machine
    from clew.hang.proc import stat_of
    from clew.hang.task_dumps import with_tasks

    run = run or run_of(pids or ())
    if run is not None:
        named = processes_of_run(run)
        seen = with_machine(examine([*(pids or ()), *(pid for pid in named if stat_of(pid))], named, once=once))
        return with_tasks(with_files(seen, run), run / "status")
    if pids is None and job is None:
        names = list(jobs.listed())
        if len(names) != 1:
            found = f"{len(names)} jobs: {', '.join(names)}" if names else "no torch job"
            raise ConfigError(f"Cannot choose a job: this machine has {found}. Name one with --job.")
        job = names[0]
    return with_files(with_machine(examine(pids if pids is not None else jobs.of_job(job or ""), once=once)))


def _on_hosts(hosts: list[str], run: Path | None, job: str | None, native: bool) -> Snapshot:
    from clew.hang.nodes import gather, over_ssh

    named = [str(run.absolute())] if run is not None else ["--job", job] if job is not None else []
    return gather(over_ssh(hosts, [*named, *(["--native"] if native else [])]))


def _list_jobs() -> None:
    from clew.hang import jobs

    listed, launchers = jobs.listed(), jobs.launchers()
    for name, pids in listed.items():
        print(f"clew hang --job {name}  # {counted(len(pids), 'rank')}: pid {', '.join(map(str, pids))}")
    for pid in launchers:
        print(f"clew hang --torchrun {pid}")
    if not listed and not launchers:
        print("No torch job runs on this machine. Give a run directory, or --pid.")
