"""Configuration: merging, errors that name file, line and the nearest valid field."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew import config
from clew.errors import ConfigError

GOOD = """\
experiment: sums
model:
  path: models/tiny
data:
  path: data/${experiment}.jsonl
training:
  lr: 3e-4
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_overrides_and_interpolation_are_resolved(good: Path) -> None:
    loaded = config.load(good, ["rollout.max_lag=2", "sampling.stop=['a','b']", "experiment=other"])
    assert loaded.data.path == "data/other.jsonl"
    assert loaded.rollout.max_lag == 2
    assert loaded.sampling.stop == ["a", "b"]
    assert loaded.training.lr == 3e-4
    assert loaded.run_path == Path("runs/other/0")


def test_what_is_dumped_loads_to_the_same(good: Path, tmp_path: Path) -> None:
    loaded = config.load(good)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(loaded))
    assert config.load(again) == loaded


@pytest.mark.parametrize(
    ("addition", "overrides", "said"),
    [
        (
            "  steps: 3\n  mirco_batch_tokens: 5\n",
            [],
            "good.yaml:9: there is no field 'training.mirco_batch_tokens'; did you mean 'training.micro_batch_tokens'?",
        ),
        ("rolout:\n  n_samples: 4\n", [], "good.yaml:8: there is no field 'rolout'; did you mean 'rollout'?"),
        (
            "",
            ["training.step=3"],
            "override training.step=3: there is no field 'training.step'; did you mean 'training.steps'?",
        ),
        ("", ["lr=1"], "override lr=1: there is no field 'lr'; did you mean 'training.lr'?"),
        ("", ["training.lr=fast"], "override training.lr=fast: training.lr: Input should be a valid number"),
        (
            "  warmup_steps: -1\n",
            [],
            "good.yaml:8: training.warmup_steps: Input should be greater than or equal to 0, found -1",
        ),
        ("", ["algorithm.minibatches=32"], "algorithm.minibatches (32) is above rollout.batch_groups (16)"),
        ("", ["sampling.min_new_tokens=300"], "sampling.min_new_tokens (300) is above sampling.max_new_tokens (256)"),
        ("", ["training.lr"], "override 'training.lr': expected key=value"),
        ("data: [\n", [], "good.yaml"),
        ("", ["root=${nowhere}"], "nowhere"),
    ],
)
def test_a_field_that_cannot_be_meant_stops_at_once(good: Path, addition: str, overrides: list[str], said: str) -> None:
    good.write_text(GOOD + addition)
    with pytest.raises(ConfigError) as caught:
        config.load(good, overrides)
    assert said in str(caught.value)


def test_a_missing_file_and_a_missing_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml: No such file"):
        config.load(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("experiment: x\nmodel:\n  dtype: float32\ndata: {path: x}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: the field 'model\.path' is missing"):
        config.load(tmp_path / "a.yaml")


def test_few_knobs_each_with_a_sentence() -> None:
    assert len(config.field_names()) <= 100
    schema = config.Config.model_json_schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            assert field.get("description", "").endswith((".", ")")), name


def test_the_schema_is_printed_for_editors() -> None:
    printed = subprocess.run([sys.executable, "-m", "clew", "config", "--schema"], capture_output=True, check=True)
    assert json.loads(printed.stdout)["properties"]["training"]


def test_importing_it_imports_no_torch() -> None:
    code = "import clew.config, clew.record.run, clew.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.sampled_from(config.field_names()), st.data())
def test_a_misspelt_field_finds_its_neighbour(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(name.rindex(".") + 2 if "." in name else 1, len(name) - 1)) if len(name) > 5 else 0
    misspelt = name[:at] + name[at + 1 :]
    if misspelt in config.field_names() or len(name.rsplit(".", 1)[-1]) < 7:
        return
    assert config._nearest(misspelt, config.field_names()) == name
