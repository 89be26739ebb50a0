"""Runs scenarios of the suite for real and compares a tool's verdicts with the manifest.

::

    python -m tests.hangs.run                      # all scenarios, diagnosed by `clew hang`
    python -m tests.hangs.run crossed_groups …     # some of them
    python -m tests.hangs.run -j 4                 # four at a time
    python -m tests.hangs.run --tool 'my-tool {pid}'

The tool prints JSON with "pattern", "ranks" and "sites" (file:line). {pid} is the launcher or the only process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.processes import free_port

HERE = Path(__file__).parent
MANIFEST: dict[str, dict[str, Any]] = json.loads((HERE / "manifest.json").read_text())
CLEW = f"{shlex.quote(sys.executable)} -m clew hang --pid {{pid}} --json -"
START_S = 180.0
SETTLE_S = 2.5
"""Seconds between the last rank's "ready" and the diagnosis."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one scenario: the tool's report, what is wrong with it, and how long it took."""

    name: str
    report: dict[str, Any]
    wrong: str
    seconds: float


def start(name: str, output: Path) -> subprocess.Popen[bytes]:
    """Start a scenario and return its launcher when every rank has said that it is ready."""
    launch, _, ranks = MANIFEST[name]["launch"].partition(" ")
    script = str(HERE / "scenarios" / f"{name}.py")
    command = [sys.executable, script]
    if launch == "torchrun":
        options = ["--nproc-per-node", ranks, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", *options, script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(output.parent)}
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    deadline = time.monotonic() + START_S
    while output.read_text(errors="replace").count("ready") < int(ranks or 1):
        if time.monotonic() > deadline or process.poll() is not None:
            end(process)
            raise RuntimeError(f"{name} did not start: {output.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    time.sleep(SETTLE_S)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a scenario with all its descendants, also those in sessions of their own."""
    from clew.hang.proc import below

    for pid in reversed(below([process.pid])):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # programs whose parent has been killed
    process.wait()


def compare(name: str, report: dict[str, Any]) -> str:
    """Return what is wrong with a report; "" if it is right."""
    expected = MANIFEST[name]
    if report["pattern"] not in expected["patterns"]:
        return f"{report['pattern']!r} instead of {' or '.join(map(repr, expected['patterns']))}"
    if report["ranks"] not in expected["ranks"]:
        return f"blames ranks {report['ranks']} instead of {' or '.join(map(str, expected['ranks']))}"
    if not expected["line"]:
        return ""
    lines = (HERE / "scenarios" / f"{name}.py").read_text().splitlines()
    places = [
        lines[int(number) - 1]
        for file, _, number in (s.partition(":") for s in report["sites"])
        if file == f"{name}.py"
    ]
    return "" if any(expected["line"] in line for line in places) else f"names {report['sites']}: {places}"


def run(name: str, tool: str = CLEW) -> Outcome:
    """Start a scenario, have the tool judge it, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(name, Path(folder) / "output")
        try:
            began = time.monotonic()
            ended = subprocess.run(
                shlex.split(tool.format(pid=process.pid)), capture_output=True, text=True, timeout=120
            )
            seconds = time.monotonic() - began
        finally:
            end(process)
    try:
        report = json.loads(ended.stdout)
    except ValueError:
        return Outcome(name=name, report={"pattern": "no report"}, wrong=ended.stderr[-500:], seconds=seconds)
    return Outcome(name=name, report=report, wrong=compare(name, report), seconds=seconds)


def table(outcomes: list[Outcome]) -> str:
    """Return the confusion table: which patterns were expected, and which were reported."""
    cells = Counter((MANIFEST[each.name]["patterns"][0], each.report["pattern"], not each.wrong) for each in outcomes)
    lines = ["expected                        reported                        right  wrong"]
    for expected, reported in sorted({(row[0], row[1]) for row in cells}):
        right, wrong = cells[expected, reported, True], cells[expected, reported, False]
        lines.append(f"{expected:31} {reported:31} {right:5}  {wrong:5}")
    right = sum(not each.wrong for each in outcomes)
    abstained = sum(each.report["pattern"] == "undetermined" for each in outcomes)
    longest = max(each.seconds for each in outcomes)
    lines.append(f"{right} of {len(outcomes)} right, {abstained} undetermined; longest verdict {longest:.1f} s")
    return "\n".join(lines)


def main() -> None:
    """Run the scenarios that the command line names, and print the confusion table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MANIFEST))
    parser.add_argument("--tool", default=CLEW)
    parser.add_argument("-j", "--jobs", type=int, default=1, help="scenarios that run at the same time")
    options = parser.parse_args()

    def one(name: str) -> Outcome:
        outcome = run(name, options.tool)
        state = "WRONG" if outcome.wrong else "ok   "
        print(f"{state} {outcome.seconds:5.1f} s  {name}  {outcome.wrong}", flush=True)
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(one, options.names or list(MANIFEST)))
    print(table(outcomes))
    raise SystemExit(any(each.wrong for each in outcomes))


if __name__ == "__main__":
    main()
