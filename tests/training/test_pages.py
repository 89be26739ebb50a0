"""The pages of algorithms: what they declare is what runs; they are short; and a user's page has the same form."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clew.algorithms import LOSSES, PRESETS, built_in_advantages, page, preset_options
from clew.config import Algorithm
from clew.training.advantages import advantages_function
from clew.training.custom import needs_critic
from examples.my_algorithm import algorithm as example
from tests.training.sequences import make_config, make_sequence

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_is_short_and_its_functions_are_those_that_run(preset: str):
    options = preset_options(preset)
    defaults = Algorithm()
    advantages, loss = (options.get(f"algorithm.{name}", getattr(defaults, name)) for name in ("advantages", "loss"))
    assert page(preset).advantages is built_in_advantages(advantages)
    assert page(preset).loss is page(LOSSES[loss]).loss
    assert len(Path(page(preset).__file__).read_text().splitlines()) <= 80


def test_the_pages_are_importable_alone():
    code = "import sys; from clew.algorithms import *; from clew.algorithms import dapo, rloo, gspo, cispo; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'clew.config', 'clew.record', 'clew.training')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def scored(*rewards: float) -> list[Any]:
    return [SimpleNamespace(group_id=f"g{place // 2}", reward=reward) for place, reward in enumerate(rewards)]


def test_the_example_by_hand():
    # against the means 1 and 5: -1, 1, -1, 1, whose deviation is 1
    assert example.advantages(scored(0, 2, 4, 6)).tolist() == pytest.approx([-1, 1, -1, 1], rel=1e-5)
    probabilities = torch.tensor([0.5, 0.1, 0.5])
    behaviour, advantages = torch.tensor([0.25, 0.2, 0.25]), torch.tensor([1.0, -2.0, -1.0])
    loss_N, metrics = example.loss(probabilities.log(), behaviour.log(), advantages)
    # weights: 1 where A > 0; the ratio 1/2; the ratio 2, held at 1
    assert loss_N.tolist() == pytest.approx((-torch.tensor([1, 0.5, 1]) * advantages * probabilities.log()).tolist())
    assert metrics["tapered"].tolist() == [False, True, False]


def test_the_documentations_page_and_its_test_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = (ROOT / "docs" / "algorithms.md").read_text().partition("## Your own")[2]
    written, test = re.findall(r"```python\n(.*?)```", own, re.DOTALL)[:2]
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "mine.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_a_token_that_is_no_likelier_than_before_is_not_penalised"]()
    assert preset_options("algorithms.mine") == {
        "algorithm.advantages": "algorithms.mine.advantages",
        "algorithm.loss": "algorithms.mine.loss",
        "algorithm.loss_mean": "sequence",
        "algorithm.clip_high": 0.5,
    }
    assert names["mine"].advantages(scored(0, 2, 4, 6)) == [-1, 1, -1, 1]


def test_the_documentations_page_with_a_critic_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = (ROOT / "docs" / "algorithms.md").read_text().partition("**Advantages with a critic**")[2]
    written = re.findall(r"```python\n(.*?)```", own, re.DOTALL)[0]
    (tmp_path / "algorithms_with_a_critic").mkdir()
    (tmp_path / "algorithms_with_a_critic" / "unwhitened.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    options = preset_options("algorithms_with_a_critic.unwhitened")
    assert options["algorithm.advantages"] == "algorithms_with_a_critic.unwhitened.advantages"
    algorithm = make_config("unused", algorithm={"preset": "algorithms_with_a_critic.unwhitened"}).algorithm
    assert needs_critic(algorithm) and algorithm.gae_lambda == 0.5
    # two tokens of values 1 and 2, a reward of 4 at the end: deltas 1 and 2, so 1 + 0.5 * 2, 2
    row = make_sequence("g0.e0.s0", prompt=1, response=2, reward=4.0)
    found = advantages_function(algorithm)([row], None, [np.array([0, 1, 2], np.float32)])
    assert found.advantages[0].tolist() == [0, 2, 2]
    assert found.returns is not None and found.returns[0].tolist() == [0, 3, 4]
