"""`clew doctor`: check whether this machine is fit for a run, and say what to do about each shortcoming."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
from pathlib import Path

from rich.table import Table
from rich.text import Text

from clew.console import EscapingConsole
from clew.devices import gpus
from clew.printing import counted
from clew.processes import cores

GIB = 2**30


def examine() -> bool:
    """Print one line per check; return True if nothing is broken (warnings are allowed)."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    sound = True
    for check in (_python, _packages, _devices, _threads, _ports, _tracing, _disk, _shared_memory, _open_files):
        try:
            verdict, found, remedy = check()
        except ImportError as error:  # torch is missing or does not load; the other checks still say something
            verdict, found, remedy = "bad", f"not checked: {error}", "install torch, or repair its installation"
        sound &= verdict != "bad"
        mark = {"good": Text("ok", "green"), "warn": Text("warn", "yellow"), "bad": Text("bad", "red")}[verdict]
        table.add_row(mark, check.__name__.strip("_").replace("_", " "), found, remedy)
    EscapingConsole(wide=160).print(table)
    return sound


def _python() -> tuple[str, str, str]:  # always good: Clew cannot be imported on a Python older than 3.11
    return "good", f"{platform.python_version()} on {platform.platform()}", ""


def _packages() -> tuple[str, str, str]:
    from packaging.requirements import Requirement

    wrong, found = [], []
    try:
        required = importlib.metadata.requires("clew") or []
    except importlib.metadata.PackageNotFoundError:
        where = Path(__file__).parents[2]
        return "warn", f"not checked: Clew is not installed, but imported from {where}", f"pip install {where}"
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "train"}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version}, wanted {requirement.specifier}")
        elif requirement.name in ("torch", "transformers", "pyarrow"):
            found.append(f"{requirement.name} {version}")
    if wrong:
        return "bad", "; ".join(wrong), "pip install -e '.[train]' in the checkout of Clew"
    return "good", ", ".join(found), ""


def _devices() -> tuple[str, str, str]:
    import torch

    if not torch.cuda.is_available():
        if gpus():
            found = f"torch {torch.__version__} cannot use the {counted(len(gpus()), 'GPU')} of this machine"
            return "warn", found, "install a torch built for CUDA that the driver supports (nvidia-smi shows which)"
        return "good", f"no CUDA device; CPU, {torch.backends.cpu.get_cpu_capability()}", ""
    names = []
    try:
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            names.append(f"{torch.cuda.get_device_name(i)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
    except RuntimeError as error:  # such as no memory left for another process
        return "bad", str(error).splitlines()[0], "nvidia-smi shows who uses the GPUs"
    return "good", ", ".join(names), ""


def _threads() -> tuple[str, str, str]:
    import torch

    threads = torch.get_num_threads()
    found = f"{cores()} cores, torch uses {threads} threads in each process by default"
    if threads > cores():
        return "warn", found, f"set launch.threads={cores()}"
    return "good", found, ""


def _ports() -> tuple[str, str, str]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return "good", f"127.0.0.1 has free ports (such as {listener.getsockname()[1]})", ""
    except OSError as error:
        return "bad", f"cannot listen on 127.0.0.1: {error.strerror}", "allow this user to listen on loopback"


def _tracing() -> tuple[str, str, str]:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    value = scope.read_text().strip() if scope.exists() else "0"
    if value != "0" and os.geteuid() != 0:
        found = f"kernel.yama.ptrace_scope is {value}: py-spy cannot look into a running process"
        return "warn", found, "sudo sysctl kernel.yama.ptrace_scope=0, or run py-spy as root"
    return "good", "this user may trace its processes (py-spy, debuggers)", ""


def _disk() -> tuple[str, str, str]:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    found = f"{free:.1f} GiB free in {Path.cwd()}"
    if free < 1:
        return "bad", found, "free some space, or set root= to a larger disk"
    if free < 10:
        return "warn", found, "a checkpoint holds 3 times the weights: see checkpoint.keep"
    return "good", found, ""


def _shared_memory() -> tuple[str, str, str]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return "good", "no /dev/shm; weights travel through the run directory", ""
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free in /dev/shm"
    if free < 1:
        return "warn", found, "in a container: --shm-size=8g; or leave inference.weights at null"
    return "good", found, ""


def _open_files() -> tuple[str, str, str]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "good", "any number of open files", ""
    if soft < 1024:
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return "warn", f"at most {soft} open files", f"ulimit -n {most}"
    return "good", f"up to {soft} open files", ""
