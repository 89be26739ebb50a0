"""Tests of `make gpu`, in the form for machines without CUDA, and what it says about missing packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import NEEDED

ROOT = Path(__file__).parent.parent
REFUSE = """
import importlib.metadata, runpy, sys
plain, gone = importlib.metadata.version, {gone!r}
def version(name):
    if name in gone:
        raise importlib.metadata.PackageNotFoundError(name)
    return {found!r}.get(name) or plain(name)
importlib.metadata.version = version
runpy.run_module("bench.gpu", run_name="__main__", alter_sys=True)
"""


def test_all_missing_packages_are_named_at_once() -> None:
    code = REFUSE.format(gone=["pydantic", "orjson"], found={"torch": "2.10.1"})
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    for part in ("torch >= 2.11 (this is 2.10.1), pydantic, orjson", "--target wheels torch", "PYTHONPATH=wheels"):
        assert part in ended.stderr


def test_the_documented_packages_are_demanded_and_no_others() -> None:
    page = (ROOT / "docs/performance.md").read_text().partition("## On a GPU")[2]
    listed = page.partition("The Python needs ")[2].partition(". Without")[0]
    assert sorted(re.findall(r"`([a-z0-9]+)`", listed)) == sorted(NEEDED)


def test_the_servers_need_neither_httptools_nor_uvloop() -> None:
    """The tests of the servers' limits pass with h11 and asyncio's own loop, too."""
    code = "import sys, pytest; sys.modules.update(httptools=None, uvloop=None); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "tests/test_http_server.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the full form takes minutes")
def test_the_small_form(tmp_path: Path) -> None:
    """The script needs no packages but those that it names, and those that they need."""
    unneeded = ["datasets", "peft", "matplotlib", "openai", "anthropic", "typer", "rich", "psutil", "accelerate"]
    unneeded += ["tensorboard", "httptools", "uvloop"]
    block = f"import sys; sys.modules.update(dict.fromkeys({unneeded!r})); "
    code = block + "from pathlib import Path; from bench.gpu.measure import main; main(Path(sys.argv[1]))"
    found = tmp_path / "gpu.md"
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for name in ("CLEW_VLLM_PYTHON", "CLEW_SGLANG_PYTHON"):  # tests/engines/test_gpu.py has them
        environment.pop(name, None)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(found)], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("No files for TensorBoard are written: tensorboard is not installed.") == 1
    table = found.read_text()
    assert "3 of 3 steps" in table and "no CUDA: the small form" in table and f"torch {torch.__version__}" in table
    assert all(f"| {row}" in table for row in ("train step", "generation", "digest of all weights", "writing"))
