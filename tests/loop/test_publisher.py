"""Publishing weights as files: where they are written, and when again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clew.errors import EngineError
from clew.loop.publisher import Publisher
from clew.loop.stopwatch import Clock
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from clew.training.engine import TrainEngine
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_config


class Inference:
    """Notes what it is given to load. The publisher needs nothing else of an engine."""

    def __init__(self) -> None:
        self.loaded: list[WeightRef] = []

    def load(self, ref: WeightRef) -> dict[str, float]:
        self.loaded.append(ref)
        return {}


@pytest.mark.parametrize("before, after", [(None, "memory"), ("memory", None)])
def test_weights_are_written_again_if_their_folder_has_changed(
    tmp_path: Path, before: str | None, after: str | None
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", tie=True)
    run, inference = RunDirectory(tmp_path / "runs" / "test" / "0"), Inference()

    def publish(outside: str | None) -> Path:
        config = make_config(tmp_path / "model", inference={"weights": outside and str(tmp_path / outside)})
        engine: Any = inference
        with closing(Publisher(config, run, engine, Clock())) as publisher:
            publisher(TrainEngine(config))
            folder = Path(inference.loaded[-1].path)
            assert (folder / "model.safetensors").is_file()
        return folder

    assert publish(before).is_relative_to(run.path) is (before is None)
    assert publish(after).is_relative_to(run.path) is (after is None)


def test_weights_in_memory_that_no_server_takes_are_removed(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", tie=True)

    class Refuses(Inference):
        def load(self, ref: WeightRef) -> dict[str, float]:
            assert list((tmp_path / "memory").rglob("*.safetensors"))
            raise EngineError("no such layer")

    config = make_config(tmp_path / "model", inference={"weights": str(tmp_path / "memory")})
    engine: Any = Refuses()
    publishing = closing(Publisher(config, RunDirectory(tmp_path / "run"), engine, Clock()))
    with publishing as publisher, pytest.raises(EngineError, match="no such layer"):
        publisher(TrainEngine(config))
    assert not list((tmp_path / "memory").iterdir())


def test_servers_that_were_started_in_another_folder_are_told_the_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", tie=True)
    monkeypatch.chdir(tmp_path)
    inference: Any = Inference()
    config = make_config(tmp_path / "model")
    with closing(Publisher(config, RunDirectory(Path("runs/test/0")), inference, Clock())) as publisher:
        publisher(TrainEngine(config))
    assert inference.loaded[-1].path == str(tmp_path / "runs/test/0/weights/version-000000")
