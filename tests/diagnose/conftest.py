"""One small run for all tests of this folder, and a copy of it for each."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from clew.loop.trainer_process import learn_inline
from clew.record.run import RunDirectory
from tests.diagnose.planted import LOSSES, REWARD, configure
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    (folder / "planted_rewards.py").write_text(REWARD)
    (folder / "planted_losses.py").write_text(LOSSES)
    sys.path.insert(0, str(folder))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(30)))
    return folder


@pytest.fixture(scope="session")
def original(folder: Path) -> Path:
    config = configure(folder)
    learn_inline(config, lambda step, summary: None)
    return config.run_path


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A copy elsewhere: as on another machine."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, tmp_path / "runs" / "e" / "first")
    return RunDirectory(tmp_path / "runs" / "e" / "first")
