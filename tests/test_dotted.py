"""Names of the user's code that are looked for in its source, which is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from clew.dotted import check_defined, load, required_parameters
from clew.errors import ConfigError

SOURCE = """
import os.path, numpy as np
from json import loads as parse
raise SystemExit("this must not run")
if os.name == "posix":
    def inside(): local = 1
try:
    with open("x") as stream: pass
except OSError: missing = None
first, (second, *rest) = 1, (2, 3)
counted: int = 3
match counted:
    case {"a": [captured, *others]} | [captured, others]: pass
listed = [item for item in rest]
class Agent:
    field = 1
async def waits(): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("os", "np", "parse", "inside", "stream", "missing", "first", "second", "rest", "counted", "captured"),
        *("others", "listed", "Agent", "waits"),
    ],
)
def test_what_a_module_binds_is_found_without_running_it(here: Path, name: str) -> None:
    (here / "looked_into.py").write_text(SOURCE)
    check_defined(f"looked_into.{name}", "rollout.reward")


@pytest.mark.parametrize("name", ["local", "field", "agent", "json", "loads", "item"])
def test_what_it_does_not_bind_is_not(here: Path, name: str) -> None:
    (here / "looked_into.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=rf"rollout\.reward=looked_into\.{name}: .*looked_into\.py has no '{name}'"):
        check_defined(f"looked_into.{name}", "rollout.reward")


def test_names_that_cannot_be_known_are_left_to_the_import(here: Path) -> None:
    (here / "stars.py").write_text("from os.path import *\n")
    (here / "lazy.py").write_text("def __getattr__(name): return name\n")
    for path in ("stars.join", "lazy.anything", "math.sqrt", "clew.rollout.workflows.SingleTurn"):
        check_defined(path, "rollout.reward")
        load(path, "rollout.reward")


def test_a_function_s_parameters_are_counted_without_running_it(here: Path) -> None:
    (here / "counted.py").write_text(
        "raise SystemExit\nimport functools\nfrom os import getcwd\n"
        "def one(a, b=1, **c): ...\ndef three(a, /, b, *, c, d=2): ...\ndef some(*a): ...\ndef nothing(): ...\n"
        "@functools.cache\ndef wrapped(a): ...\ndef twice(a): ...\ndef twice(a, b): ...\nlater = one\n"
    )
    names = ["one", "three", "some", "nothing", "wrapped", "twice", "later", "getcwd"]
    found = [required_parameters(f"counted.{name}", "algorithm.advantages") for name in names]
    assert found == [1, 3, 1, 0, None, None, None, None]
    assert required_parameters("math.sqrt", "algorithm.advantages") is None


def test_a_module_that_is_not_python_or_not_there(here: Path) -> None:
    (here / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"broken\.py:1 is not valid Python"):
        check_defined("broken.f", "rollout.reward")
    with pytest.raises(ConfigError, match="there is no module 'nowhere_at_all'"):
        check_defined("nowhere_at_all.f", "rollout.reward")
    with pytest.raises(ConfigError, match=r"expected a dotted path such as my_module\.f"):
        check_defined("f", "rollout.reward")


def test_a_name_that_a_module_in_c_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="time has no 'sleeps'"):
        load("time.sleeps", "rollout.reward")
