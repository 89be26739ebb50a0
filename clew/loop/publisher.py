"""Publishing of weights to inference: write, announce, have every server load them, then publish to rollout."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from clew.config import Config
from clew.inference.protocol import Timings
from clew.loop.inference_servers import InferenceServers
from clew.loop.stopwatch import Clock
from clew.loop.weight_sender import WeightSender
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef, outside_folder
from clew.training.engine import TrainEngine
from clew.training.published_weights import write_weights
from clew.training.saving import remove_folder


class Inference(Protocol):
    """The engines that a run samples from: servers in other processes, or one engine in this process."""

    def load(self, ref: WeightRef) -> Timings:
        """Have every engine load and serve these weights. Return the seconds that each part took."""
        ...

    def released(self) -> AbstractContextManager[None]:
        """Return a context manager inside which inference is paused, and the memory of its cache is free."""
        ...

    def let_rollout_run(self) -> None:
        """Give rollout some time, while the trainer waits for a batch or an evaluation."""
        ...


class Publisher:
    """Publishes a version of the weights.

    The order rules out races with a server that starts meanwhile (see `RunDirectory.register_server`). The weights are

    1. written,
    2. announced,
    3. loaded by the registered servers,
    4. published to rollout.

    Then the weights of earlier versions are removed.

    With weights.via=collective the servers receive the weights first, and then only the digests are written. A server
    that starts meanwhile asks for a broadcast of its own.

    Every rank calls this, because each holds a slice of the weights; rank 0 does everything else.
    """

    def __init__(self, config: Config, run: RunDirectory, inference: Inference, clock: Clock) -> None:
        self._clock = clock
        self._run = run
        self._inference = inference
        self._servers = inference if isinstance(inference, InferenceServers) else None
        self._sender: WeightSender | None = None
        if config.weights.via == "collective" and self._servers is not None:
            self._sender = WeightSender(config, self._servers)
        self._folder = run.path / "weights"
        self._leads = False
        self._outside = config.inference.weights
        if self._outside is not None:
            self._folder = outside_folder(self._outside, run.path)

    def __call__(self, engine: TrainEngine) -> None:
        self._leads = engine.ranks.leads
        ref = self._load(engine) if self._sender is None else self._broadcast(engine, self._sender)
        if ref is None:
            return
        self._run.inbox.publish(ref.version)
        for folder in self._folder.iterdir():
            if folder.name != Path(ref.path).name:
                shutil.rmtree(folder, ignore_errors=True)

    def _broadcast(self, engine: TrainEngine, sender: WeightSender) -> WeightRef | None:
        """Send the weights, and have the servers that got them check and serve them. Return where the digests are."""
        with self._clock("publish/send"):
            digests, servers = sender(engine)
        ref = write_weights(engine, self._folder_of(engine), engine.version, sent=digests)
        if not engine.ranks.leads:
            return None
        self._run.announce_weights(ref)
        self._note(sender.servers.load(ref, servers))
        return ref

    def wanted(self) -> bool:
        """Return whether a server waits for these weights to be broadcast again; see `InferenceServers.wanted`."""
        return self._servers is not None and self._servers.wanted()

    def _folder_of(self, engine: TrainEngine) -> Path:
        return self._folder / f"version-{engine.version:06d}"

    def _note(self, timings: Timings) -> None:
        for part, seconds in timings.items():
            self._clock.note(f"publish/{part}", seconds)

    def _load(self, engine: TrainEngine) -> WeightRef | None:
        """Write the weights, unless they are there, and have the engines load them. Return where they are."""
        digest = engine.weights_digest()  # a collective: every rank must call it

        def written() -> bool:
            ref = self._run.newest_weights()
            if ref is None or (ref.version, ref.digest) != (engine.version, digest) or not ref.exists():
                return False
            here = Path(ref.path).resolve() == self._folder_of(engine).resolve()  # inference.weights may have changed
            return here and ref.holds_adapters() == engine.config.sends_adapters and not ref.was_broadcast()

        ref = self._run.newest_weights()
        if not engine.ranks.agree(f"whether version {engine.version} is written already", written):
            with self._clock("publish/write"):
                ref = write_weights(engine, self._folder_of(engine), engine.version)
            if engine.ranks.leads:
                self._run.announce_weights(ref)
        if not engine.ranks.leads:
            return None
        assert ref is not None
        self._note(self._inference.load(ref))
        return ref

    def close(self) -> None:
        """Remove weights outside the run directory; the checkpoint has them."""
        if self._outside is not None and self._leads and self._folder.exists():
            for folder in self._folder.iterdir():
                remove_folder(folder)  # a resumed run must not take what is left of it for the weights
            shutil.rmtree(self._folder, ignore_errors=True)
