"""Interface that the clients of vLLM and SGLang share, and helpers to start their servers. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from clew.config import Config
from clew.errors import EngineError, ImageError
from clew.inference.client import HTTPEngine
from clew.inference.protocol import GenerateRequest
from clew.models.vision import Vision
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef

UNCHANGED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters that change the distribution, and that Clew never uses. vLLM would take those that a request
leaves out from the model's generation_config.json, and SGLang from its --preferred-sampling-params."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Command that starts a server."""

    command: list[str]
    environment: dict[str, str]
    """Variables that are set in addition to those of this process."""


class Backend(HTTPEngine):
    """Client of one vLLM or SGLang server, for `clew.inference.remote`."""

    needs_version = False  # `clew.inference.remote` keeps track of the version
    idle_s = 2.0  # both servers close an idle connection after 5 s
    labels = True
    """True if its answers name the version of the weights; known after `prepare`."""

    _vision: Vision | None = None
    """The model's image input, if it has one."""

    @classmethod
    def client(cls, config: Config, address: str, vision: Vision | None = None, token: str = "") -> Self:
        """Return a client of a server.

        Args:
            config: The run's configuration.
            address: host:port.
            vision: The model's image input, if it has one.
            token: The server's --api-key; "" if it has none.
        """
        raise NotImplementedError

    @staticmethod
    def launch(config: Config, port: int, scratch: Path) -> Launch:
        """Return how to start a server for the configuration's model on 127.0.0.1:port.

        Args:
            scratch: Folder for files that the server needs.

        Raises:
            ConfigError: inference.args has an option that the engine does not know, or one that Clew sets itself.
        """
        raise NotImplementedError

    def _check_request(self, answer: dict[str, Any], request: GenerateRequest, address: str) -> None:
        """Raise FaultyAnswer for another request's answer, and ImageError if images were expanded to other tokens."""
        super()._check_request(answer, request, address)
        if request.images and (seen := answer.get("prompt_token_ids")) != request.input_ids:
            raise ImageError(
                f"{self.kind} at {self.address} expanded the images to other tokens than the model's processor here: "
                f"{len(seen or [])} in the prompt, not {len(request.input_ids)}. Is another version of transformers "
                f"installed there?"
            )

    async def find(self, info: dict[str, Any] | None, models: list[dict[str, Any]]) -> str | None:
        """Find out what generating needs, given what answers at /model_info and /v1/models. `prepare` finds more.

        Returns:
            The folder or hub name of its model; None if another kind of server answers.
        """
        raise NotImplementedError

    async def ready(self) -> None:
        """Return if the server answers and serves its model. If not, raise EngineError with the reason."""
        await self._request("GET", "/health", None)

    async def alive(self) -> None:
        """Return once the engine itself, not only its HTTP side, has answered. Call it after `prepare`.

        Raises:
            EngineError: It does not answer.
        """
        raise NotImplementedError

    async def paused(self) -> bool:
        """Return whether the server says that it is paused; False if it cannot say so. Call it after `prepare`.

        Raises:
            EngineError: It does not answer.
        """
        raise NotImplementedError

    async def identity(self) -> str:
        """Return a text that another process at this address would not return; "" if there is none."""
        raise NotImplementedError

    async def prepare(self) -> list[str]:
        """Find out what the server can do.

        Returns:
            One sentence for each ability that it lacks, with the consequence. The caller logs them.

        Raises:
            EngineError: It cannot be trained with: another model or vocabulary, no token IDs, wrong logprobs.
        """
        raise NotImplementedError

    async def resolved(self) -> dict[str, Any]:
        """Return the options that the server runs with, its defaults and its version included, as it reports them."""
        raise NotImplementedError

    async def receive(self, sent: Broadcast) -> None:
        """Have the paused server load weights that the trainer broadcasts.

        Raises:
            EngineError: It cannot, or not all of them came. What it then holds is not known.
        """
        raise NotImplementedError

    async def check(self, ref: WeightRef) -> None:
        """Raise EngineError if the server could not load the weights in a folder. It is not paused for this."""
        raise NotImplementedError

    async def load(self, ref: WeightRef) -> None:
        """Load weights into the paused server, unless they were broadcast and `receive` has done so.

        Raises:
            EngineError: The weights were refused.
        """
        raise NotImplementedError

    async def verify(self, ref: WeightRef) -> None:
        """Compare what the paused server holds after `load` with the trainer's digests.

        Raises:
            EngineError: It holds other weights; the message names the tensors.
        """
        raise NotImplementedError

    async def score(self, input_ids: list[int]) -> float:
        """Return the logprob of the last token given those before it, at temperature 1."""
        raise NotImplementedError


HAS_REPLICAS = (
    "it has several replicas (data parallelism), and answers for only one of them when its weights are checked. Start "
    "as many servers instead."
)
"""Reason for which a server with data parallelism is refused."""


def check_model(kind: str, address: str, served: str, wanted: str) -> None:
    """Raise EngineError if a server's model has another architecture, size or vocabulary than the run's.

    Folders on other machines and hub names are not checked.
    """
    for field in ("architectures", "vocab_size", "hidden_size", "num_hidden_layers"):
        own, other = config_field(wanted, field), config_field(served, field)
        if own is not None and other is not None and own != other:
            raise EngineError(
                f"Cannot train with {kind} at {address}: its model {served} has {field} {other}, and {wanted} "
                f"(model.path) has {own}. Start it with {wanted}."
            )


def config_field(folder: str, field: str) -> Any:
    """Return a field of a model's config.json; None if there is no such field, or no such file that can be read."""
    try:
        return json.loads((Path(folder) / "config.json").read_bytes()).get(field)
    except (OSError, ValueError, AttributeError):
        return None


def leaves(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested options to their innermost names, with "-" for "_". If a name occurs twice, the first counts."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        for leaf, content in (leaves(value) if isinstance(value, dict) else {name.replace("_", "-"): value}).items():
            found.setdefault(leaf, content)
    return found


def options(args: Iterable[tuple[str, Any]]) -> list[str]:
    """Return options as words of a command line.

    true gives an option without a value; null and false leave it out. A list becomes several words, an object JSON.
    """
    words: list[str] = []
    for name, value in args:
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return words
