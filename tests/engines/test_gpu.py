"""`make gpu` beside real servers, in the form for machines without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]


def test_the_script_measures_both_servers(tmp_path: Path) -> None:
    for name in ("CLEW_VLLM_PYTHON", "CLEW_SGLANG_PYTHON"):
        if not os.environ.get(name):
            pytest.skip(f"{name} names no Python; see make test-engines")
    code = "import sys; from pathlib import Path; from bench.gpu.measure import main; main(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "gpu.md")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = (tmp_path / "gpu.md").read_text()
    for server in ("vllm 0.", "sglang 0."):
        assert f"| 3 GRPO steps through {server}" in table
    assert table.count("an update of its weights, and the checks") == 2
