"""Training on images through vLLM, which leaves out the last norm of LLaVA's vision tower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clew.record.run import RunDirectory
from tests.engines.test_debug_script import as_hubs_name_it
from tests.engines.test_training import PATIENCE_S
from tests.loop.runs import replays
from tests.loop.test_images import configure
from tests.models import seeing_model

pytestmark = pytest.mark.engines


def test_a_model_with_unused_layers_is_trained(tmp_path: Path) -> None:
    if not (python := os.environ.get("CLEW_VLLM_PYTHON")):
        pytest.skip("CLEW_VLLM_PYTHON is not set; see make test-engines")
    seeing_model(tmp_path / "llava", head=32, scale=0.15)
    as_hubs_name_it(tmp_path / "llava" / "model.safetensors")
    inference = {
        "backend": "vllm",
        "python": python,
        "max_running": 8,
        "cache_gib": 0.25,
        "args": {"enforce-eager": True, "gpu-memory-utilization": 0.2},
    }
    changes = {"inference": inference, "launch": {"threads": 1, "mode": "local"}}
    config = configure(tmp_path, "llava", "vllm", **changes)
    overrides = ["trial=vllm", *(f"{name}={json.dumps(value)}" for name, value in changes.items())]
    command = [sys.executable, "-m", "clew", "train", str(tmp_path / "config.yaml"), *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDirectory(config.run_path)
    assert "does not read" in (run.logs / "server.log").read_text()
    versions: set[int] = set()
    for step in range(3):
        assert run.steps.read(step)["metrics"]["behaviour_gap_max"] < 1e-4
        versions |= {int(version) for row in run.steps.read_data(step) for version in np.unique(row.versions)}
    assert max(versions) > 0, "vLLM kept old weights"
    assert replays(run.path, None)
