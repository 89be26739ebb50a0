"""Weights on their way to inference: written, announced, loaded by every server, and only then published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from clew.config import Config
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef, outside_folder
from clew.training.engine import TrainEngine
from clew.training.weights import write_weights


class Publisher:
    """Publishes a version. The order settles each race with a server that starts meanwhile (see `RunDirectory`):

    1. the weights are written, 2. announced, 3. loaded by the servers that are registered, 4. published to rollout,
    5. their predecessors are removed.

    Of several ranks each calls it, for its slice of the weights; the rest is rank 0's.
    """

    def __init__(self, config: Config, run: RunDirectory, load: Callable[[WeightRef], None]) -> None:
        """load: returns when every engine serves the weights."""
        self._run = run
        self._load = load
        self._folder = run.path / "weights"
        self._leads = False
        self._outside = config.inference.weights is not None
        if config.inference.weights is not None:
            self._folder = outside_folder(config.inference.weights, run.path)

    def __call__(self, engine: TrainEngine) -> None:
        digest = engine.weights_digest()  # every rank has its part in it

        def written() -> bool:
            ref = self._run.newest_weights()
            return ref is not None and (ref.version, ref.digest) == (engine.version, digest) and ref.exists()

        ref = self._run.newest_weights()
        if not engine.ranks.agree(f"whether version {engine.version} is written already", written):
            ref = write_weights(engine, self._folder / f"version-{engine.version:06d}", engine.version)
            if engine.ranks.leads:
                self._run.announce_weights(ref)
        if not engine.ranks.leads:
            return
        self._leads = True
        assert ref is not None
        self._load(ref)
        self._run.inbox.publish(ref.version)
        for folder in self._folder.iterdir():
            if folder.name != Path(ref.path).name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Leave no weights outside the run directory; the checkpoint has them."""
        if self._outside and self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)
