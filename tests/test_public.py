"""`import clew`: its names, what importing them imports, and what is said where an optional part is missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import clew
from clew.errors import EXTRAS, MissingPart, explain_missing

ROOT = Path(__file__).parents[1]
HEAVY = sorted(EXTRAS)
WRITE_AND_READ = """
import sys, clew
assert sorted(set(dir(clew)) & set(HEAVY)) == []
with clew.Writer(sys.argv[1], config={"lr": 1}, trainer="mine") as writer:
    (group,) = writer.new_groups(1)
    row = {"group_id": group, "input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -1], "reward": 1}
    writer.step([row], stages={"loss": [[0, 2.5]]}, metrics={"loss": 2.5})
run = clew.open_run(sys.argv[1])
assert len(run) == 1 and run.sequences(0)[0].reward == 1 and run.stages(0)["loss"]
clew.Config, clew.train, clew.replay, clew.rollout_batch, clew.ClewError, clew.__version__
print(sorted(set(sys.modules) & set(HEAVY) - {"pandas"}))  # pyarrow imports pandas if it is installed
"""
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def python(script: str, *arguments: str, blocked: tuple[str, ...] = (), cwd: Path = ROOT) -> str:
    """Run a script in a fresh process in which some packages cannot be imported; return what it printed."""
    names = f"HEAVY = {HEAVY}\nBLOCKED = {blocked}\n"
    ended = subprocess.run(
        [sys.executable, "-c", names + BLOCK + script, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120
    )
    return ended.stdout + ended.stderr


def test_every_public_name_is_there() -> None:
    for name in clew.__all__:
        assert getattr(clew, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'wtriter'"):
        clew.wtriter  # noqa: B018


def test_writing_and_reading_a_record_imports_nothing_optional(tmp_path: Path) -> None:
    assert python(WRITE_AND_READ, str(tmp_path / "run")) == "[]\n"


def test_writing_and_reading_a_record_needs_nothing_optional(tmp_path: Path) -> None:
    assert python(WRITE_AND_READ, str(tmp_path / "run"), blocked=tuple(HEAVY)) == "[]\n"


FROM_HUB = ["launch.mode=inline", "root=/tmp/nowhere", "model.path=org/name", "data.path=org/data", "eval.path=null"]


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("torch", "train", f"clew.train('examples/addition/grpo.yaml', {FROM_HUB})"),
        ("torch", "train", "clew.rollout_batch([{'prompt': ''}], model='nowhere')"),
        ("datasets", "train", "clew.rollout_batch('org/data', model='nowhere')"),
        ("peft", "lora", "with clew.errors.explain_missing(): import clew.training.lora"),
        ("httpx2", "agents", "with clew.errors.explain_missing(): import clew.rollout.agents"),
        ("pandas", "pandas", "clew.Run.steps.fget(type('R', (), {'__len__': lambda _: 0, 'directory': None})())"),
    ],
)  # fmt: skip
def test_a_missing_part_names_its_extra(package: str, extra: str, use: str) -> None:
    said = python(f"import clew.errors\n{use}", blocked=(package,)).splitlines()[-1]
    assert said.startswith(f"clew.errors.MissingPart: Cannot do this without {package}"), said
    assert f"pip install 'clew[{extra}]'" in said


def test_rollout_without_an_agent_needs_no_package_of_agents() -> None:
    assert python("import clew.rollout.process; print('here')", blocked=("httpx2",)) == "here\n"


def test_a_command_says_which_part_is_missing(tmp_path: Path) -> None:
    command = ["clew", "sft", "examples/addition/sft.yaml", f"root={tmp_path}"]
    said = python(f"sys.argv = {command}\nfrom clew.cli.main import main\nmain()", blocked=("torch",))
    assert "clew: Cannot do this without torch, which is not installed." in said and "Traceback" not in said


def test_what_is_no_part_of_clew_stays_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError), explain_missing():
        import somebodys_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(MissingPart), explain_missing():
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        named = {"PIL": "pillow"}.get(package, package)
        assert any(line.startswith(named) for line in extras[extra]), f"clew[{extra}] lacks {named}"


def test_recorded_batches_need_one_rank(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"experiment: e\ntrial: t\nroot: {tmp_path}\nmodel: {{path: model}}\ndata: {{path: prompts.jsonl}}\n"
        f"rollout: {{reward: mine.digits}}\nlaunch: {{ranks: 2}}\n"
        f"debug: {{replay_rollout_data: true, path: {tmp_path}}}\n"
    )
    with pytest.raises(clew.ClewError, match=r"launch\.ranks=2: this process is one rank"):
        clew.train(tmp_path / "run.yaml")


def test_a_wrong_field_of_a_batch_is_named() -> None:
    rows = [{"prompt": ""}]
    with pytest.raises(clew.ClewError, match=r"no field 'rollout\.n_sample'; did you mean 'rollout\.n_samples'\?"):
        clew.rollout_batch(rows, model="nowhere", n_sample=4)
    with pytest.raises(clew.ClewError, match=r"^clew\.rollout_batch: there is no field 'sampling\.max_tokens'"):
        clew.rollout_batch(rows, model="nowhere", sampling={"max_tokens": 3})


def test_rollout_where_an_event_loop_runs_says_how() -> None:
    async def notebook() -> None:
        with pytest.raises(clew.ClewError, match=r"await asyncio\.to_thread"):
            clew.rollout_batch([{"prompt": "1 + 1 ="}], model="nowhere")

    asyncio.run(notebook())
