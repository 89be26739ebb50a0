"""Ten steps of training with each real engine, and a replay of one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clew.devices import gpus
from clew.record.run import RunDirectory
from tests.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.engines

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"enforce-eager": True, "gpu-memory-utilization": 0.2},
    "sglang": {"mem-fraction-static": 0.2},
}
PATIENCE_S = 500.0
"""Time limit for a run, including the server's start, on a slow and busy machine."""


@pytest.mark.parametrize(
    ("backend", "lora_rank", "via", "family"),
    [
        ("vllm", None, "disk", "qwen3_moe"),
        ("vllm", 4, "disk", "qwen2"),
        ("vllm", None, "collective", "mixtral"),
        ("sglang", None, "disk", "qwen2"),
        ("sglang", None, "collective", "llama"),
    ],
)
def test_ten_steps_of_training_and_their_replay(
    tmp_path: Path, backend: str, lora_rank: int | None, via: str, family: str
) -> None:
    variable = f"CLEW_{backend.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no Python; see make test-engines")
    if lora_rank is not None and gpus():
        pytest.skip("on a GPU, vLLM takes no adapters in float32")
    tiny_tokenizer(tmp_path / "model")
    more: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if family != "qwen2":
        more["head_dim"] = 32  # vLLM's CPU attention takes heads of 32 and more
    tiny_model(
        tmp_path / "model", family, hidden=64, scale=0.1, context=32, more=more
    )  # the context is no longer than the probe of a weight update
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(40)))
    (tmp_path / "mine.py").write_text("def ones(completion, data):\n    return completion.count('1') / 8\n")
    sections = {
        "experiment": "engines",
        "trial": backend,
        "root": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "rollout": {"reward": "mine.ones", "batch_groups": 4, "n_samples": 4, "max_lag": 1},
        "sampling": {"max_new_tokens": 24, "temperature": 1.3},
        "weights": {"via": via},
        "training": {"steps": 10, "lr": 1e-3, "lora_rank": lora_rank},
        "inference": {
            "backend": backend,
            "python": os.environ[variable],
            "max_running": 32,
            "cache_gib": 0.25,
            "args": ENGINES[backend],
        },
        "launch": {"threads": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))

    def clew(*arguments: str) -> str:
        command = [sys.executable, "-m", "clew", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    clew("train", "run.yaml")
    run = RunDirectory(tmp_path / "runs" / "engines" / backend)
    assert run.steps.count() == 10
    versions: set[int] = set()
    for step in range(10):
        metrics, timings = (run.steps.read(step)[name] for name in ("metrics", "timings"))
        print({name: round(seconds, 3) for name, seconds in timings.items() if "publish" in name})
        if step == 9:  # the first versions are written before the server is up
            first = "write" if via == "disk" else "send"
            assert all(timings[f"publish/{part}"] > 0 for part in (first, "abort", "load", "verify"))
        for row in run.steps.read_data(step):
            versions |= {int(version) for version in row.versions if version >= 0}
            spans = row.sampled_by or []
            assert sum(span["end"] - span["start"] for span in spans) == row.loss_mask.sum(), "each token once"
            for span in spans:
                assert span["server"].lower().startswith(backend)
                if span["version"] != "default":  # the weights that the server started with
                    made = row.versions[span["start"] : span["end"]]
                    assert (made == int(span["version"])).all(), "the engine's label of the weights is Clew's version"
        if metrics["lag_max"] == 0:
            assert metrics["behaviour_k3"] < 1e-8, "the trainer and the engine agree about fresh tokens"
    assert len(versions) > 5
    newest = run.newest_weights()
    assert newest is not None and newest.holds_adapters() == (lora_rank is not None)
    assert "bit for bit" in clew("replay", str(run.path), "--step", "3")
