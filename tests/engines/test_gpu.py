"""The part of `make gpu` that measures real servers, in the form for machines without CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu.engines import steps_through
from bench.gpu.measure import SMALL, Table, prepare

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_the_script_measures_a_server(tmp_path: Path, backend: str) -> None:
    python = os.environ.get(variable := f"CLEW_{backend.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{variable} names no Python; see make test-engines")
    prepare(tmp_path, SMALL)
    table = Table()
    assert steps_through(backend, python, tmp_path, False, table.add)
    rows = "\n".join(table.rows)
    assert f"| 3 GRPO steps through {backend} 0." in rows and "an update of its weights, and the checks" in rows
