"""`clew hang`: merging the stacks of many ranks, and the time and the pauses of real processes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import sys, threading, time
def waits():
    longest = last = 0.0
    last = time.monotonic()
    print("ready", flush=True)
    while True:  # notes the longest time in which it did not run
        now = time.monotonic()
        if now - last > longest:
            longest = now - last
            open(sys.argv[1], "w").write(str(longest))
        last = now
        time.sleep(0.001)
def rank():
    threading.Event().wait()
threading.Thread(target=waits, daemon=True).start()
rank()
"""
MERGE = """
import json, resource, sys, time
from pathlib import Path
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from clew.hang.dumps import read_dumps
from clew.hang.report import Report
began = time.process_time()
seen = read_dumps(Path(sys.argv[1]))
report = Report(seen)
classes = report.classes
merged = time.process_time() - began
verdict = report.verdict
judged = time.process_time() - began
Path(sys.argv[2]).write_text(json.dumps(report.as_json()))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"count": report.count, "classes": len(classes), "merged_cpu_s": merged, "judged_cpu_s": judged,
                  "peak_mb": peak, "verdict": verdict.pattern, "ranks": verdict.ranks}))
"""


def start(count: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start processes that wait, with the variables of the ranks of one job."""
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(50_000 + os.getpid() % 10_000 + count)
    (folder / "rank.py").write_text(WORKER)
    found = []
    for rank in range(count):
        command = [sys.executable, str(folder / "rank.py"), str(folder / f"pause-{count}-{rank}")]
        found.append(subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **job, "RANK": str(rank)}))
    for process in found:
        assert process.stdout is not None
        process.stdout.readline()
    time.sleep(1)
    return found


def of_real(count: int, folder: Path) -> dict:
    """Examine real processes; return the report."""
    processes = start(count, folder)
    try:
        for path in folder.glob(f"pause-{count}-*"):
            path.unlink()  # what starting cost
        before = _pauses(count, folder, 3.0)
        began = time.monotonic()
        command = [sys.executable, "-m", "clew", "hang", "--pid", str(processes[0].pid), "--json", "-"]
        ended = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - began
        during = _pauses(count, folder, 0.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report = json.loads(ended.stdout)
    print(
        f"{count} processes: report after {seconds:.1f} s, of which {report['seconds']:.1f} s of watching; longest "
        f"time without running {1000 * before:.0f} ms before, {1000 * during:.0f} ms with it",
        flush=True,
    )
    return report


def _pauses(count: int, folder: Path, seconds: float) -> float:
    time.sleep(seconds)
    return max((float(path.read_text() or 0) for path in folder.glob(f"pause-{count}-*")), default=0.0)


def write_nodes(report: dict, folder: Path, nodes: int, per_node: int) -> None:
    """Write reports of nodes, made from a real one: one rank, in the middle, is elsewhere."""
    folder.mkdir()
    (real, *_) = report["snapshot"]["processes"]
    odd = nodes * per_node // 2 + 3
    for node in range(nodes):
        ranks = [rank for rank in range(node * per_node, (node + 1) * per_node) if rank != odd]
        known = {"world": nodes * per_node, "local_world": per_node, "host": f"node{node}"}
        first, second, *more = ranks
        alike = [[rank, 1000 + rank % per_node, f"node{node}"] for rank in more]
        processes = [
            {**real, **known, "rank": first, "alike": alike},
            {**_numbered(real, 900), **known, "rank": second, "alike": []},
        ]
        if odd // per_node == node:
            elsewhere = json.loads(json.dumps(_numbered(real, 901)).replace('"rank"', '"evaluate"'))
            processes.append({**elsewhere, **known, "rank": odd, "alike": []} | {"evaluate": 0})
            processes[-1].pop("evaluate")
        value = {"snapshot": {**report["snapshot"], "processes": processes}}
        (folder / f"node{node}.json").write_text(json.dumps(value))


def _numbered(process: dict, pid: int) -> dict:
    return {**json.loads(json.dumps(process).replace(f'"os_id": {process["pid"]}', f'"os_id": {pid}')), "pid": pid}


def merge(folder: Path, to: Path) -> dict:
    """Merge the reports of a folder in a process of its own. It counts CPU seconds."""
    command = [sys.executable, "-c", MERGE, str(folder), str(to)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def dumps_of_ranks(pid: int, folder: Path, count: int) -> None:
    """Write raw dumps of py-spy, made from one of a real process."""
    from clew.hang.collect import py_spy

    folder.mkdir()
    command = [py_spy(), "dump", "--json", "--nonblocking", "--locals", "--pid", str(pid)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for rank in range(count):
        (folder / f"rank{rank}.json").write_text(text.replace("Event.wait", "Event.wait" if rank != 7 else "elsewhere"))


def main() -> None:
    """Measure and print."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "clew", "hang", "--help"], capture_output=True, check=True)
    print(f"clew hang --help: {time.monotonic() - began:.2f} s", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = of_real(8, folder)
        of_real(64, folder)
        processes = start(1, folder)
        dumps_of_ranks(processes[0].pid, folder / "dumps", 10_000)
        processes[0].kill()
        processes[0].wait()
        print(f"10,000 dumps of py-spy: {merge(folder / 'dumps', folder / 'dumps-report.json')}", flush=True)
        write_nodes(report, folder / "nodes", 1250, 80)
        size = sum(path.stat().st_size for path in (folder / "nodes").iterdir()) / 1e6
        print(f"100,000 ranks in 1,250 reports of nodes, {size:.0f} MB in all")
        (folder / "level").mkdir()
        slowest, whole = 0.0, time.monotonic()
        for place in range(36):
            part = folder / f"part{place}"
            part.mkdir()
            for node in range(place, 1250, 36):
                (folder / "nodes" / f"node{node}.json").rename(part / f"node{node}.json")
            slowest = max(slowest, merge(part, folder / "level" / f"part{place}.json")["judged_cpu_s"])
        last = merge(folder / "level", folder / "all.json")
        print(f"first level: at most {slowest:.2f} s for 35 nodes; second: {last}")
        print(f"both levels, one merge after another: {time.monotonic() - whole:.1f} s")
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
