"""The example of an agent, from its material to training, and the example of each `clew agent` command, pasted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clew.record.run import RunDirectory
from tests.end_to_end.project import ROOT
from tests.end_to_end.test_help import command_of, examples, paste, run, variables
from tests.stress.judging import ALL


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_of_an_agent(tmp_path: Path) -> None:
    """Type what docs/agents.md shows, and what the guide to your own data shows of conversations, with fewer steps.

    `make stress` trains until the agent has learnt, which takes ten minutes.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = run(sys.executable, "-m", "examples.agents.make", "--out", "runs/calculator/material", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    of_conversations = ["trial=talk", "training.steps=20", "data.path=runs/calculator/material/conversations.jsonl"]
    imitates, learns = (400, 20) if ALL else (60, 2)
    for overrides, steps in ((of_conversations, 20), ([f"training.steps={imitates}"], imitates)):
        trained = run(*command_of("clew sft examples/agents/sft.yaml", *overrides), cwd=tmp_path, seconds=900)
        assert f"{steps} steps are trained" in trained.stdout, trained.stdout + trained.stderr
    shorter = [f"training.steps={learns}", f"eval.every_steps={learns}"]
    trained = run(*command_of("clew train examples/agents/grpo.yaml", *shorter), cwd=tmp_path, seconds=900)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    record = RunDirectory(tmp_path / "runs" / "calculator" / "grpo")
    curve = [evaluation["pass@1"] for evaluation in record.evals.read_all()]
    assert len(curve) == 2 and (not ALL or (curve[0] < 0.5 and curve[-1] > 0.75)), curve
    rows = record.steps.read_data(learns - 1)
    assert any("tool_calls" in each["reply"] for row in rows for each in row.interactions)

    assert "recorded responses were asked for again" in paste(tmp_path, "agent replay")
    crowd = paste(tmp_path, "agent stress", "--batch", "4", "--dp", "1")
    assert crowd.rstrip().endswith("fit for training")
    serve = command_of("clew serve examples/agents/grpo.yaml trial=served")
    with subprocess.Popen(serve, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=variables()) as server:
        assert server.stdout is not None
        told = next(line for line in server.stdout if line.startswith("export OPENAI_BASE_URL="))
        exported = dict(word.split("=", 1) for word in told.split()[1:])
        shown = run(*command_of(examples()["agent run"]), cwd=tmp_path, **exported)
        server.terminate()
    assert shown.returncode == 0 and shown.stdout.count("the trainer would make 1 sequence of it") == 2, shown
