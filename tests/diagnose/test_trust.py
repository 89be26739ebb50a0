"""Code that a stranger's record names is not loaded, unless the user says that its module is to be trusted."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from clew import dotted
from clew.diagnose.agent_replay import replay_agent
from clew.diagnose.blame import blame
from clew.diagnose.rerun import Options, rerun
from clew.errors import ConfigError
from clew.reading import read_json
from clew.record.bundle import opened, write_bundle
from clew.record.files import write_json
from clew.record.origin import why_foreign
from clew.record.run import RunDirectory
from clew.training.export import export_steps, import_steps

PLANTED = """
import os, pathlib
from os import system
pathlib.Path("was-imported").touch()

def length(completion, data):
    pathlib.Path("was-called").touch()
    return len(completion) / 100

class Agent:
    async def run(self, data, **extra_kwargs):
        pathlib.Path("was-called").touch()
        return 0.0
"""


@pytest.fixture
def planted(tmp_path: Path, run: RunDirectory) -> RunDirectory:
    """A run whose configuration names a module that lies in the current folder."""
    (tmp_path / "planted_here.py").write_text(PLANTED)
    sys.modules.pop("planted_here", None)
    name(run, "planted_here.length")
    return run


def name(run: RunDirectory, reward: str) -> None:
    text = run.config_path.read_text()
    before = next(line for line in text.splitlines() if line.startswith("  reward: "))
    run.config_path.write_text(text.replace(before, f"  reward: {reward}"))


def again(target: Path, *trust: str, overrides: tuple[str, ...] = (), **ways: Any) -> bool:
    return rerun(target, Options(steps="5", overrides=overrides, trust=trust, **ways))


def test_the_reward_that_a_bundle_names_is_not_loaded_without_trust(planted: RunDirectory, tmp_path: Path) -> None:
    bundle = write_bundle(planted, 5, stages_only=False, to=tmp_path / "sent.clew.zip")
    with pytest.raises(ConfigError, match=r"planted_here\.length.*sent\.clew\.zip is a bundle.*--trust planted_here\."):
        again(bundle, reward=True)
    assert not (tmp_path / "was-imported").exists()
    assert not again(bundle, "planted_here", reward=True)  # another reward than the recorded one
    assert (tmp_path / "was-called").exists()
    assert not dotted.trust_rules  # nothing is left of the rule
    again(planted.path, reward=True)  # one's own run needs no trust


@pytest.mark.parametrize("path", ["planted_here.system", "planted_here.os", "posixpath.join", "builtins.exec"])
def test_trust_reaches_what_the_module_defines_itself(planted: RunDirectory, tmp_path: Path, path: str) -> None:
    name(planted, path)
    bundle = write_bundle(planted, 5, stages_only=False, to=tmp_path / "sent.clew.zip")
    with pytest.raises(ConfigError, match=r"Cannot load rollout\.reward="):
        again(bundle, "planted_here", reward=True)


def test_a_built_in_workflow_needs_no_trust_but_what_its_module_imports_does(
    run: RunDirectory, tmp_path: Path, folder: Path
) -> None:
    bundle = write_bundle(run, 5, stages_only=False, to=tmp_path / "sent.clew.zip")
    assert again(bundle, "planted_rewards", reward=True)  # the workflow is Clew's own
    with dotted.only_trusted("it is a bundle"), pytest.raises(ConfigError, match=r"own: it was defined in clew\."):
        dotted.load("clew.rollout.workflows.EpisodeError", "rollout.workflow")


def test_the_loss_that_a_bundle_names_in_a_step_is_not_loaded_by_any_command(
    planted: RunDirectory, tmp_path: Path
) -> None:
    summary = read_json(planted.steps.json_path(5))
    summary["config"]["algorithm"]["loss"] = "planted_here.length"
    write_json(planted.steps.json_path(5), summary)
    bundle = write_bundle(planted, 5, stages_only=False, to=tmp_path / "sent.clew.zip")
    commands = (
        lambda: again(bundle),
        lambda: again(bundle, stages="loss"),
        lambda: blame(bundle, 5, top=1, tokens=1, by=None),
    )
    for command in commands:
        with pytest.raises(ConfigError, match=r"algorithm\.loss=planted_here\.length.*--trust planted_here"):
            command()
    with pytest.raises(ConfigError, match=r"algorithm\.advantages=planted_here\.length.*--trust planted_here"):
        again(bundle, overrides=("algorithm.advantages=planted_here.length",))
    assert not (tmp_path / "was-imported").exists()


def test_an_agent_that_an_unpacked_bundle_names_is_not_loaded(planted: RunDirectory, tmp_path: Path) -> None:
    name(planted, "null")
    planted.config_path.write_text(planted.config_path.read_text().replace("agent: null", "agent: planted_here.Agent"))
    (planted.path / "bundle.json").write_text("{}")
    rows = planted.steps.read_data(0)[:1]
    with opened(planted.path) as (run, _), pytest.raises(ConfigError, match=r"planted_here\.Agent.*unpacked from"):
        replay_agent(run, rows, agent=None, base_url=None)
    assert not (tmp_path / "was-imported").exists()
    with opened(planted.path, ["planted_here"]) as (run, _):
        replay_agent(run, rows, agent=None, base_url=None)
    assert (tmp_path / "was-called").exists()


def test_runs_that_were_imported_or_that_another_user_owns_are_foreign(run: RunDirectory, tmp_path: Path) -> None:
    assert why_foreign(run) is None
    files = export_steps(run, "pt", "0", tmp_path / "exported")
    import_steps(files, tmp_path / "imported", None)
    assert "was imported" in (why_foreign(RunDirectory(tmp_path / "imported")) or "")
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(run.steps.json_path(3), 12345, -1)
    assert "belongs to another user" in (why_foreign(run) or "")
    with pytest.raises(ConfigError, match=r"000003\.json to user 12345.*--trust planted_rewards"):
        again(run.path, reward=True)


def test_a_counterfactual_of_a_bundle_stays_foreign_and_goes_to_a_folder_of_ours(
    planted: RunDirectory, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    planted.config_path.write_text(planted.config_path.read_text().replace("root: ", f"root: {theirs} #"))
    bundle = write_bundle(planted, 5, stages_only=False, to=tmp_path / "sent.clew.zip")
    shutil.rmtree(planted.path)
    assert again(bundle, overrides=("training.lr=1e-4",))
    assert not theirs.exists()
    made = RunDirectory(tmp_path / "runs" / "e" / "first-replay-1")
    with pytest.raises(ConfigError, match=r"began with a stranger's record.*--trust planted_here"):
        again(made.path, reward=True)
    assert not (tmp_path / "was-imported").exists()


@pytest.mark.parametrize("field", ["experiment", "trial"])
@pytest.mark.parametrize("value", ["..", ".", ".hidden", "a/b", "a\\nb"])
def test_names_of_runs_are_no_paths(run: RunDirectory, field: str, value: str) -> None:
    from clew import config as configuration

    with pytest.raises(ConfigError):
        configuration.load(run.config_path, [f'{field}="{value}"'])
