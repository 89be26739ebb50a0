"""vLLM: how its server is started, and a client of it.

Token IDs go in and out through /inference/v1/generate, which also says which weights made each token, or else through
/v1/completions.

vLLM does not say which logprobs it reports, so `VLLMEngine.probe` finds out:

=========================== ============================================ =======================================
--logprobs-mode             logprobs of the distribution                 not what training needs
=========================== ============================================ =======================================
raw_logprobs (the default)  before temperature and truncation            at a temperature other than 1 (or 0)
processed_logprobs          after temperature and truncation             with top_p, top_k, min_p, min_tokens
=========================== ============================================ =======================================
"""

from __future__ import annotations

import base64
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import clew
from clew.config import Config
from clew.devices import gpus
from clew.errors import ConfigError, EngineError, ImageError, RecordError
from clew.inference.backend import HAS_REPLICAS, UNCHANGED, Backend, Launch, check_model, options
from clew.inference.client import experts_of
from clew.inference.protocol import (
    FINISH_REASONS,
    Completion,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    SamplingParams,
    spans_of,
)
from clew.models.vision import Vision
from clew.printing import counted, few
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef, read_digests
from clew.seeds import derive_seed

log = logging.getLogger("clew.inference")

LogprobsMode = Literal["raw", "processed", "unknown"]

PROBE_NAME = "clew-probe"
PROBE_IDS = [0, 1, 2, 3]
PROBE_TEMPERATURE = 0.5
COLDEST = 0.01
"""Lowest temperature above 0 that vLLM samples at; it raises lower ones to this (`SamplingParams`, _MAX_TEMP)."""
TOP_K = 1000
"""Value of top_k in probes, for a vLLM that returns sampling masks: it refuses requests without top_k."""
SMALLEST_GAP = 1e-2
"""Smallest difference, in nats, between two tokens at which the modes can be told apart."""

EXTENSION = "clew.inference.vllm_worker.Extension"
"""Class whose methods are added to those of vLLM's workers."""

RESTART = "Start vLLM with --logprobs-mode processed_logprobs"

OWN = (
    *("model", "host", "port", "dtype", "served-model-name", "tokenizer", "max-num-seqs", "kv-cache-memory-bytes"),
    *("logprobs-mode", "worker-extension-cls", "api-key"),
)
"""Options that Clew sets itself."""

GENERATE = "/inference/v1/generate"
"""Route that takes and returns tokens. It expands images itself, and returns the tokens that they became."""

ADAPTER = "clew"
"""Name under which the run's adapters are served."""

ADAPTER_HINT = (
    " These are adapters: they must be loaded, into layers for which vLLM takes adapters, on the weights that the "
    "server began with. With inference.args.enable-lora=false, they are added to the weights before they are sent."
)

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""

NEEDED = ("/pause", "/resume", "/collective_rpc", "/v1/completions")
"""Routes that a server must have, so that a run can train with it."""


class VLLMEngine(Backend):
    """Client of one vLLM server. Its completions have the version 0; `clew.inference.remote` knows the true one."""

    kind = "vLLM"

    def __init__(
        self, address: str, model: str = "", context: int = 2**40, token: str = "", vision: Vision | None = None
    ) -> None:
        """Create the client.

        Args:
            address: host:port.
            model: Name under which the server serves the model. `prepare` and `find` ask for it and the context.
            context: The server's max_model_len.
            token: The server's --api-key.
            vision: The model's image input; None if it takes no images.
        """
        super().__init__(address, token, context)
        self._vision = vision
        self._model_path = ""
        """Folder of the model that the server must serve; "": any."""
        self.model = model
        # Abilities that `prepare` finds; a server that was not prepared is asked for nothing special.
        self._asks_engine = False
        self.labels = False
        self._aborts = False
        self._keeps_ids = False
        """True if answers have their request's ID. A proxy's X-Request-Id header takes its place."""
        self._generates = False
        self._masks = False
        self._sent: dict[str, str] = {}
        """The trainer's digests of the tensors that were sent last."""
        self._first_sent: dict[str, str] = {}
        """Digests of the first version that was sent."""
        self._salt: dict[str, str] = {}
        """Field of a request that keeps vLLM from using keys and values of other weights, which no probe would show."""
        self._adapts = False
        """True if only adapters are sent."""
        self.logprobs_mode: LogprobsMode = "unknown"

    # The server ------------------------------------------------------------------------------------------------------

    @classmethod
    def client(cls, config: Config, address: str, vision: Vision | None = None, token: str = "") -> VLLMEngine:
        engine = cls(address, config.model.path, token=token, vision=vision)
        engine._model_path = config.model.path
        engine._masks = bool(config.inference.options.get("return-sampling-mask"))
        engine._adapts = config.sends_adapters
        return engine

    @staticmethod
    def launch(config: Config, port: int, scratch: Path) -> Launch:
        inference = config.inference
        python, args = inference.python or sys.executable, inference.options
        if own := [name for name in args if name in OWN]:
            raise ConfigError(f"inference.args.{own[0]}: Clew sets this option of vLLM itself. Leave it out.")
        if config.sends_adapters and config.model.dtype != "bfloat16" and gpus():
            raise ConfigError(
                f"Cannot serve adapters with vLLM on a GPU: model.dtype is {config.model.dtype}, and vLLM takes "
                f"adapters only in bfloat16 there. Set model.dtype to bfloat16, or inference.args.enable-lora to false "
                f"to add the adapters to the weights before they are sent."
            )
        given = {
            "model": config.model.path,
            "host": "127.0.0.1",
            "port": port,
            "dtype": config.model.dtype,
            "max-num-seqs": inference.max_running,
            "kv-cache-memory-bytes": int(inference.cache_gib * 2**30),
            "logprobs-mode": "processed_logprobs",  # the default reports them before temperature
            "max-logprobs": 5,
            "worker-extension-cls": EXTENSION,
            "disable-uvicorn-access-log": True,
            **({"enable-scale-out": True} if _has_scale_out(python) else {}),
            **adapter_options(config),
        }
        scratch.mkdir(parents=True, exist_ok=True)
        package = scratch / "clew"
        package.unlink(missing_ok=True)
        package.symlink_to(Path(clew.__file__).parent)
        # The Python that runs Clew may find vLLM through its PYTHONPATH. Another Python gets only Clew's package.
        inherited = os.environ.get("PYTHONPATH") if python == sys.executable else None
        return Launch(
            command=[python, "-m", "vllm.entrypoints.openai.api_server", *options({**given, **args}.items())],
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # opens /pause, /resume, /collective_rpc
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(config.sends_adapters)),
                "PYTHONPATH": os.pathsep.join([str(scratch), inherited] if inherited else [str(scratch)]),
                "PYTHONDONTWRITEBYTECODE": "",  # if it is inherited, each process compiles torch and vLLM for itself
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(inference.cache_gib))),
            },
        )

    async def find(self, info: dict[str, Any] | None, models: list[dict[str, Any]]) -> str | None:
        served = next((model for model in models if model.get("owned_by") == "vllm"), None)
        if served is None:
            return None
        self.model, self.context = served["id"], served["max_model_len"]
        await self.probe()
        return served.get("root") or served["id"]

    async def alive(self) -> None:
        """Ask for something that vLLM's engine process must answer; /health is answered even while that is stopped."""
        await self._request("GET", "/is_paused" if self._asks_engine else "/health", None)

    async def paused(self) -> bool:
        if not self._asks_engine:
            return False
        return await self._request("GET", "/is_paused", None, lambda answer, _: answer["is_paused"] is True)

    async def identity(self) -> str:
        async with self._answered("GET", "/metrics", None) as response:
            lines = (await response.read()).decode(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("process_start_time_seconds ")), "")

    async def prepare(self) -> list[str]:
        routes = await self._routes()
        if missing := [route for route in NEEDED if route not in routes]:
            raise EngineError(
                f"Cannot train with vLLM at {self.address}: it has no {', '.join(missing)}. Its version is too old, or "
                f"VLLM_SERVER_DEV_MODE=1 was not set when it was started."
            )
        if self._adapts and LOAD_ADAPTER not in routes:
            raise EngineError(
                f"Cannot train with vLLM at {self.address}: it takes no adapters, and training.lora_rank is set. Start "
                f"it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set inference.args.enable-lora to "
                f"false: the adapters are then added to the weights before they are sent."
            )

        def take(answer: dict[str, Any], _: str) -> tuple[str, int, str]:
            served = answer["data"][0]
            return served["id"], int(served["max_model_len"]), str(served.get("root") or served["id"])

        self.model, self.context, folder = await self._request("GET", "/v1/models", None, take)
        check_model("vLLM", self.address, folder, self._model_path)
        if "/get_world_size" in routes:
            paths = [f"/get_world_size?include_dp={each}" for each in ("true", "false")]
            with_replicas, without = [await self._request("GET", path, None) for path in paths]
            if with_replicas != without:
                raise EngineError(f"Cannot train with vLLM at {self.address}: {HAS_REPLICAS}")
        await self._check_extension()
        self._asks_engine = "/is_paused" in routes
        self.labels = "/update_weight_version" in routes
        self._aborts = "/abort_requests" in routes
        self._generates = GENERATE in routes
        self.takes_images = self._vision is not None and self._generates
        await self.probe()
        return self._lacks()

    def _lacks(self) -> list[str]:
        lacks: list[str] = []
        if not self._aborts:
            lacks.append(
                "it has no /abort_requests: aborting one request aborts all of them, and Clew submits the others again."
            )
        if not self._generates:
            lacks.append(
                f"it has no {GENERATE}: the record holds no sampling masks, no routed experts, and not vLLM's own "
                f"account of which weights made a token."
            )
        if not self.labels:
            lacks.append(
                "it does not store the version of its weights (no /update_weight_version): only Clew records which "
                "weights made a token."
            )
        if self._vision is not None and not self.takes_images:
            lacks.append(f"it takes no images, although its model does: it has no {GENERATE} (vLLM 0.32 has it).")
        if unfit := self._unfit_logprobs:
            lacks.append(f"it {unfit}")
        return lacks

    async def resolved(self) -> dict[str, Any]:
        version = await self._request("GET", "/version", None)
        info = await self._request("GET", "/server_info?config_format=json", None)
        return {**version, **info["vllm_config"]}

    async def _check_extension(self) -> None:
        """Raise EngineError if the workers do not have Clew's extension, which an attached server may lack."""
        try:
            await self._post("/collective_rpc", {"method": "clew_load", "args": ["/nonexistent"]})
        except EngineUnreachable:
            raise
        except EngineError as error:
            raise EngineError(
                f"Cannot train with vLLM at {self.address}: its workers cannot load weights as Clew does ({error}). "
                f"Start it with --worker-extension-cls {EXTENSION}, and Clew on its PYTHONPATH."
            ) from None

    async def abort(self, request_id: str | None = None) -> None:
        if not self._aborts:
            await self.pause()
            await self.resume()
            return
        names = [f"cmpl-{request_id}", f"cmpl-{request_id}-0", f"generate-tokens-{request_id}"]
        await self._post("/abort_requests", {} if request_id is None else {"request_ids": names})

    async def pause(self, lease_s: float = 0.0) -> None:
        """Abort all requests, forget their keys and values, and start none."""
        await self._request("POST", "/pause?mode=abort&clear_cache=true", None)

    async def resume(self) -> None:
        await self._request("POST", "/resume", None)

    async def receive(self, sent: Broadcast) -> None:
        await self._post("/collective_rpc", {"method": "clew_receive", "args": [asdict(sent)]})

    async def check(self, ref: WeightRef) -> None:
        self._digests_of(ref)

    def _digests_of(self, ref: WeightRef) -> dict[str, str]:
        try:
            return read_digests(ref)
        except RecordError as error:
            raise EngineError(
                f"Cannot load version {ref.version} into vLLM at {self.address}: {error} It was not sent."
            ) from None

    async def load(self, ref: WeightRef) -> None:
        self._sent, self._salt = self._digests_of(ref), {"cache_salt": f"{ref.version}-{ref.digest}"}
        if ref.holds_adapters():
            # Not with load_inplace: vLLM would keep it, and read the adapter from disk again in every step.
            models = await self._request("GET", "/v1/models", None)
            if ADAPTER in [model["id"] for model in models["data"]]:
                await self._post(UNLOAD_ADAPTER, {"lora_name": ADAPTER})
            await self._post(LOAD_ADAPTER, {"lora_name": ADAPTER, "lora_path": ref.path})
            self.model = ADAPTER  # from now on requests name it; until then they named the model without it
        elif not ref.was_broadcast():
            await self._post("/collective_rpc", {"method": "clew_load", "args": [ref.path]})
        forgotten = await self._request("POST", "/reset_prefix_cache", None)
        if forgotten.get("success") is False:
            raise EngineError(
                f"vLLM at {self.address} did not forget the keys and values of the version before {ref.version} "
                f"(/reset_prefix_cache): it would go on with them under new weights. It serves nothing now."
            )

    async def verify(self, ref: WeightRef) -> None:
        adapters = ref.holds_adapters()
        call = {"method": "clew_adapters", "args": [ref.path]} if adapters else {"method": "clew_held"}

        def compare(answer: dict[str, Any], _: str) -> list[str]:
            left_out = [] if adapters else self._left_out(answer["results"])
            sent = {name: digest for name, digest in self._sent.items() if name not in left_out}
            return differences(sent, answer["results"])

        if wrong := await self._post("/collective_rpc", call, compare):
            hint = ADAPTER_HINT if adapters else ""
            shown = "; ".join(wrong[:5]) + ("; …" if len(wrong) > 5 else "")
            raise EngineError(
                f"vLLM at {self.address} did not load version {ref.version} as the trainer wrote it: "
                f"{counted(len(wrong), 'tensor')} {'differs' if len(wrong) == 1 else 'differ'}: {shown}. It serves "
                f"nothing now.{hint}"
            )
        if self.labels:
            await self._post("/update_weight_version", {"new_version": str(ref.version)})

    def _left_out(self, workers: list[dict[str, list[Any]]]) -> list[str]:
        """Return the tensors that vLLM does not read, and that the trainer has not changed since the first version.

        Some models have layers that nothing computes with, such as the last norm of LLaVA's vision tower. vLLM leaves
        them out, and training does not change them. A warning names those of the first version. With several workers,
        each of which may hold a part, none counts.
        """
        first, self._first_sent = not self._first_sent, self._first_sent or self._sent
        if len(workers) != 1 or not any(workers[0].values()):  # without any, the update has done nothing
            return []
        unread = [n for n in self._sent if workers[0].get(n) == [] and self._sent[n] == self._first_sent.get(n)]
        if first and unread:
            log.warning(
                "vLLM at %s does not read %s of the model: %s. This does no harm if nothing computes with them. A "
                "later version that changes one is refused.",
                self.address,
                counted(len(unread), "tensor"),
                few(unread),
            )
        return unread

    async def score(self, input_ids: list[int]) -> float:
        body = {"model": self.model, "prompt": input_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        if self._masks:
            body["top_k"] = TOP_K

        def take(answer: dict[str, Any], _: str) -> float:
            return float(answer["choices"][0]["prompt_logprobs"][-1][str(input_ids[-1])]["logprob"])

        return await self._post("/v1/completions", body, take)

    # Logprobs --------------------------------------------------------------------------------------------------------

    async def probe(self) -> None:
        """Find out which logprobs the server reports, from the same next token at two temperatures.

        Raises:
            EngineError: The server reports logits in place of logprobs, or does not answer such a request.
        """
        one, other = [await self._likeliest(temperature) for temperature in (1.0, PROBE_TEMPERATURE)]
        if max(sum(map(math.exp, each.values())) for each in (one, other)) > 1 + SMALLEST_GAP:
            raise EngineError(
                f"Cannot use vLLM at {self.address}: it reports logits in the place of logprobs. {RESTART}."
            )
        self.logprobs_mode = mode_of(one, other, PROBE_TEMPERATURE)

    async def _likeliest(self, temperature: float) -> dict[str, float]:
        """Return the logprobs of the likeliest next tokens after the probe, by token."""
        body = {
            "model": self.model,
            "prompt": PROBE_IDS,
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 5,
            "top_k": TOP_K if self._masks else -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "return_tokens_as_token_ids": True,
            "request_id": PROBE_NAME,
            **UNCHANGED,
        }
        try:
            answer = await self._post("/v1/completions", body)
            self._keeps_ids = answer.get("id") == f"cmpl-{PROBE_NAME}"
            likeliest = dict(answer["choices"][0]["logprobs"]["top_logprobs"][0])
            return {token: float(logprob) for token, logprob in likeliest.items()}
        except EngineUnreachable:
            raise
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"Cannot find out which logprobs vLLM at {self.address} reports: {error}. {RESTART}, and allow at "
                f"least 5 with --max-logprobs."
            ) from None

    @property
    def advice(self) -> str:
        return f"vLLM at {self.address} {unfit}" if (unfit := self._unfit_logprobs) else ""

    @property
    def _unfit_logprobs(self) -> str:
        """Return the rest of a sentence about this server: what is wrong with its logprobs; "" if nothing is."""
        if self.logprobs_mode == "processed":
            return ""
        why = "before temperature" if self.logprobs_mode == "raw" else "of a kind that cannot be told from a probe"
        return f"reports logprobs {why}: only at temperature 1 can its tokens be trained on. {RESTART}"

    def wrong_logprobs(self, params: SamplingParams, masked: bool = False) -> str:
        reports = f"vLLM at {self.address} reports logprobs"
        if 0 < params.temperature < COLDEST:
            return (
                f"vLLM at {self.address} samples at temperature {COLDEST:g} if it is asked for one between 0 and that, "
                f"such as {params.temperature:g}. Use {COLDEST:g} or 0"
            )
        if self.logprobs_mode == "processed":
            cuts = {
                "top_p": params.top_p < 1,
                "top_k": 0 < params.top_k < (self.vocab or math.inf),
                "min_p": params.min_p > 0,
                "min_tokens": params.min_new_tokens > 0,
            }
            set_ = ", ".join(name for name, is_set in cuts.items() if is_set)
            if not set_ or params.temperature == 0 or masked:
                return ""
            return f"{reports} renormalised after {set_}, and training needs those from before. Leave {set_} out"
        if params.temperature in (0, 1):
            return ""
        if self.logprobs_mode == "raw":
            return (
                f"{reports} before temperature, and the temperature is {params.temperature:g}. {RESTART}, or set "
                f"the temperature to 1"
            )
        return f"{reports} of a kind that cannot be told from a probe. {RESTART}"

    async def generate(self, request: GenerateRequest) -> Completion:
        params = self._fitting(request)
        route, body = self._body_of(request, params)
        if request.id:
            body["request_id"] = request.id
        if request.on_token is None or request.images:  # with images, tokens are not passed on as they come
            completion = await self._in_one_answer(route, body, request)
        else:
            completion = await self._streamed(route, body, request)
        if completion.output_ids:  # otherwise it was aborted before its first token, and has no masks yet
            wrong = completion.wrong_logprobs or self.wrong_logprobs(params, completion.sampling_mask is not None)
            completion = replace(completion, wrong_logprobs=wrong)
        if completion.finish_reason == "stop" and completion.matched is None and completion.output_ids:
            return replace(completion, matched=completion.output_ids[-1])  # vLLM does not name an end token
        return completion

    def _body_of(self, request: GenerateRequest, params: SamplingParams) -> tuple[str, dict[str, Any]]:
        sampling, ids = _sampling_fields(params), request.input_ids
        if not request.images and not self._generates:
            body = {"model": self.model, "prompt": ids, "return_token_ids": True, **self._salt, **sampling}
            return "/v1/completions", body
        body = {"model": self.model, "token_ids": ids, **self._salt, "sampling_params": sampling}
        if request.images:
            if not self.takes_images or self._vision is None:
                raise ImageError(f"vLLM at {self.address} takes no images beside token IDs.")
            urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in request.images]
            body["token_ids"] = self._vision.collapsed_ids(ids, request.images)
            body["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
            body["return_token_ids"] = True
        return GENERATE, body

    def _answered_id(self, answer: dict[str, Any]) -> str | None:
        name = answer.get("request_id") or answer.get("id")
        return name.removeprefix("generate-tokens-").removeprefix("cmpl-") if self._keeps_ids and name else None

    def _new_of(self, answer: dict[str, Any], before: int, address: str) -> Completion | None:
        """Return the new tokens of a response, or of an event, which has only new ones; None without a choice."""
        if not answer["choices"]:  # an event with the usage
            return None
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise FaultyAnswer(address, "it returned no token_ids: this vLLM is older than return_token_ids.")
        reason = choice["finish_reason"] or "abort"  # null in each event but the last
        if reason not in FINISH_REASONS:
            raise FaultyAnswer(address, f"it ended a completion with finish_reason {reason!r}. Its log may say why.")
        said = choice["logprobs"] if ids else {"token_logprobs": []}
        logprobs = [each["logprob"] for each in said["content"]] if "content" in said else said["token_logprobs"]
        masks = [mask or [] for mask in (choice.get("sampling_mask") or [])[: len(ids)]]
        return Completion(
            output_ids=ids,
            logprobs=logprobs,
            versions=[0] * len(ids),
            finish_reason=reason,
            matched=choice.get("stop_reason"),
            sampling_mask=masks or None,
            sampled_by=spans_of(choice.get("weight_versions") or [], self.name_of(address)),
            routed_experts=experts_of(choice.get("routed_experts")),
        )

    async def version(self) -> int:
        await self._request("GET", "/v1/models", None)
        return 0


def _has_scale_out(python: str) -> bool:
    """Return whether the installed vLLM has the option that opens GENERATE. Older ones always open it."""
    command = [python, "-c", "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"]
    with suppress(OSError, subprocess.SubprocessError):
        package = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        return "enable_scale_out" in (Path(package) / "entrypoints" / "openai" / "cli_args.py").read_text()
    return True  # a start without vLLM says what is missing


def adapter_options(config: Config) -> dict[str, Any]:
    """Return the options for a server that adds the run's adapters itself."""
    rank = config.training.lora_rank
    if rank is None or not config.sends_adapters:
        return {}
    room = next((each for each in RANKS if each >= rank), rank)  # vLLM refuses a larger rank, and names it
    return {"enable-lora": True, "max-lora-rank": room, "max-loras": 1}


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        # A request that goes on after an abort must not draw the same random numbers again.
        "seed": params.seed if not params.continues else derive_seed(params.seed, str(params.continues)),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,  # stop strings may have them
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.stop_token_ids is not None,
        "logprobs": 0,
        **UNCHANGED,
    }
    if params.json_schema is not None:
        fields["structured_outputs"] = {"json": params.json_schema}
    return fields


def mode_of(at_one: Mapping[str, float], at_other: Mapping[str, float], temperature: float) -> LogprobsMode:
    """Return which logprobs a server reports.

    Args:
        at_one: Logprobs of the likeliest next tokens at temperature 1, by token.
        at_other: Those at `temperature`.
        temperature: A temperature above 0, other than 1.
    """
    both = sorted(at_one.keys() & at_other.keys(), key=lambda token: at_one[token])
    if not both:
        return "unknown"
    low, high = both[0], both[-1]
    gap, other_gap = at_one[high] - at_one[low], at_other[high] - at_other[low]
    if not gap >= SMALLEST_GAP:
        return "unknown"
    # After temperature, differences between tokens are divided by it.
    return "raw" if abs(other_gap - gap) < abs(other_gap - gap / temperature) else "processed"


def differences(expected: Mapping[str, str], workers: list[dict[str, list[Any]]]) -> list[str]:
    """Return which tensors the workers do not hold as the trainer wrote them, each with the reason.

    Args:
        expected: Digest of each tensor, in hexadecimal.
        workers: The answer of `clew.inference.vllm_worker.Extension.clew_held` from each worker. With tensor
            parallelism each holds a part, and some parts are held by several.
    """
    wrong: list[str] = []
    for name, digest in expected.items():
        held = [worker[name] for worker in workers if worker.get(name)]
        count, size = sum(each[1] for each in held), max((each[2] for each in held), default=0)
        # A digest is a sum over elements: those of the parts add up to the tensor's, times the number of copies held.
        if not held:
            wrong.append(f"{name}: not loaded")
        elif not count or count % size:
            wrong.append(f"{name}: {count} of {size} elements are held where the engine computes from")
        elif cast := next((each[3] for each in held if each[3]), None):
            wrong.append(f"{name}: held as {', '.join(cast)}, which is not how it was written")
        elif sum(int(each[0], 16) for each in held) % 2**64 != int(digest, 16) * (count // size) % 2**64:
            wrong.append(f"{name}: holds other values")
    return wrong
