"""Tests of `make gpu`, in the form for machines without CUDA, and what it says about missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the full form takes minutes")
def test_the_small_form(tmp_path: Path) -> None:
    """The script needs no packages but those that it names."""
    unneeded = ["datasets", "peft", "matplotlib", "openai", "anthropic", "typer", "rich", "psutil", "accelerate"]
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
    table = found.read_text()
    assert "3 of 3 steps" in table and "no CUDA: the small form" in table and f"torch {torch.__version__}" in table
    assert all(f"| {row}" in table for row in ("train step", "generation", "digest of all weights", "writing"))
