"""Publishing of weights to inference: write, announce, have every server load them, then publish to rollout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from clew.config import Config
from clew.inference.protocol import Timings
from clew.loop.clock import Clock
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef, outside_folder
from clew.training.engine import TrainEngine
from clew.training.export import write_weights


class Publisher:
    """Publishes a version of the weights.

    The order below settles each race with a server that starts meanwhile (see `RunDirectory`). The weights are

    1. written,
    2. announced,
    3. loaded by the registered servers,
    4. published to rollout,
    5. and their predecessors are removed.

    Every rank calls this, for its slice of the weights; rank 0 does everything else.
    """

    def __init__(self, config: Config, run: RunDirectory, load: Callable[[WeightRef], Timings], clock: Clock) -> None:
        """Prepare to publish the weights of `run`.

        Args:
            load: Returns when every engine serves the weights, with the seconds that each part took.
            clock: Counts the time of each part.
        """
        self._clock = clock
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
            if ref is None or (ref.version, ref.digest) != (engine.version, digest) or not ref.exists():
                return False
            return ref.holds_adapters() == engine.config.sends_adapters

        ref = self._run.newest_weights()
        if not engine.ranks.agree(f"whether version {engine.version} is written already", written):
            with self._clock("publish/write"):
                ref = write_weights(engine, self._folder / f"version-{engine.version:06d}", engine.version)
            if engine.ranks.leads:
                self._run.announce_weights(ref)
        if not engine.ranks.leads:
            return
        self._leads = True
        assert ref is not None
        for part, seconds in self._load(ref).items():
            self._clock.note(f"publish/{part}", seconds)
        self._run.inbox.publish(ref.version)
        for folder in self._folder.iterdir():
            if folder.name != Path(ref.path).name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove weights outside the run directory; the checkpoint has them."""
        if self._outside and self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)
