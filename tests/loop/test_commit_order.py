"""SIGKILL right before every single change of a run to its directory; after each, the run is resumed.

What must hold after each resume is in `crash_everywhere.py`. Without lag at every change, with it at every second one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parent.parent.parent

CONFIG = """\
experiment: crash
root: {folder}/runs
model: {{path: {folder}/model}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: 2, n_samples: 2, max_lag: {lag}}}
sampling: {{max_new_tokens: 6}}
training: {{steps: 3, lr: 1e-3}}
eval: {{path: {folder}/held_out.jsonl, every_steps: 2}}
checkpoint: {{every_steps: 2, keep: 1}}
launch: {{threads: 1, mode: inline}}
"""


def material(folder: Path, lag: int) -> Path:
    folder.mkdir(exist_ok=True)
    tiny_model(folder / "model")
    tiny_tokenizer(folder / "model")
    for name, count in (("prompts", 20), ("held_out", 4)):
        lines = [json.dumps({"prompt": f"{i} + {i + 1} ="}) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, lag=lag))
    return folder


def changes(folder: Path) -> list[str]:
    """Actions of a run on its directory, in order."""
    command = [sys.executable, "-m", "tests.loop.crash_everywhere", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()


def crash(folder: Path, numbers: list[int]) -> list[dict]:
    """Kill a run before each of these changes and resume it, in two processes side by side."""
    command = [sys.executable, "-m", "tests.loop.crash_everywhere", str(folder)]
    halves = [
        subprocess.Popen([*command, *map(str, half)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for half in (numbers[::2], numbers[1::2])
    ]
    cases = [json.loads(line) for half in halves for line in half.communicate()[0].splitlines()]
    assert [half.returncode for half in halves] == [0, 0]
    assert len(cases) == len(numbers)
    return cases


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_kill_at_every_change(tmp_path: Path) -> None:
    listed = changes(material(tmp_path, lag=0))
    assert renamed_by_step_1(listed) == [
        "steps/step-000001.parquet",
        "steps/step-000001/rank-0.parquet",
        "steps/step-000001.json",
        "steps/index.jsonl",
        "weights/version-000002",
        "weights.json",
        "inbox/version.json",
        "weights/version-000001",
        "inbox/g000002.arrows",
        "inbox/g000003.arrows",
    ]
    survives(tmp_path, range(len(listed)))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_kill_at_every_second_change_with_lag(tmp_path: Path) -> None:
    survives(tmp_path, range(0, len(changes(material(tmp_path, lag=1))), 2))


def renamed_by_step_1(listed: list[str]) -> list[str]:
    """Return what a step renames, from choosing its batch to admitting the groups of the next one."""
    first = next(i for i, change in enumerate(listed) if change.startswith("open steps/.step-000001.parquet"))
    last = next(i for i, change in enumerate(listed) if i > first and change.startswith("open inbox/.running"))
    opened = [change.split(" ")[1] for change in listed[first:last] if not change.startswith("open checkpoints")]
    renamed = [path for path in opened if "/." not in path and not path.startswith((".", "checkpoints"))]
    return list(dict.fromkeys(renamed))


def survives(folder: Path, numbers: range) -> None:
    """Check a kill before each of these changes of a run."""
    assert len(numbers) > 50
    cases = crash(folder, list(numbers))
    assert [case for case in cases if case["wrong"]] == []
    assert {case["steps_before"] for case in cases} == {0, 1, 2, 3}
