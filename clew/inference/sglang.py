"""Client of an SGLang server that Clew starts or attaches to. This module imports no torch.

Weights travel as a safetensors file, or in the trainer's broadcast. After each load the server's own checksums show
whether it holds what was sent: all of them on one CPU, fewer elsewhere (see `SGLangEngine._find_checks`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from clew.config import Config
from clew.devices import gpus
from clew.errors import ConfigError, EngineError, ImageError, RecordError, first_line
from clew.inference.backend import HAS_REPLICAS, UNCHANGED, Backend, Launch, check_model, config_field, options
from clew.inference.protocol import Completion, EngineUnreachable, FaultyAnswer, GenerateRequest, SamplingParams
from clew.inference.sglang_checksums import (
    Tensors,
    changed_tensors,
    checksums,
    joined_ranks,
    left_behind,
    parts_in,
    ranks_left_behind,
    read_folder,
)
from clew.models.vision import Vision
from clew.printing import few, sentence
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef, read_broadcast, read_digests

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Number types whose tensors can be compared, as SGLang and as safetensors name them."""

NEEDED = ("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk")
"""Endpoints that a server must have, so that a run can train with it."""

SESSION = (
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/destroy_weights_update_group",
)
"""Endpoints of an update session, in which a server takes part in the trainer's broadcasts."""

CPU_OPTIONS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.2,
    "max-total-tokens": 65536,
    "sleep-on-idle": True,  # otherwise an idle server takes a whole core
    "skip-server-warmup": True,  # it sends English text, which ends the server if the tokenizer lacks its tokens
}
"""Options for a machine without GPU, unless inference.args says otherwise."""

LIST_OPTIONS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("OPTIONS", json.dumps([name for action in parser._actions for name in action.option_strings]))
"""
"""Program that prints the server's options. SGLang's own parser also takes unambiguous prefixes of names."""

SPARE_TOKENS = 5
"""Tokens at the end of the model's context that stay free. SGLang takes no prompt that leaves fewer than 6 free, and a
completion that an update interrupts is continued as a longer prompt."""

OPTIONS_S = 120.0
"""Seconds within which SGLang must list its options."""

MASKS = "output_token_sampling_mask"
"""Field of an answer with the IDs that each token was drawn from."""

MASK_OPTION = "sampling_mask_max_tokens"
"""Server option with the largest number of tokens in a sampling mask. SGLang ends a request that exceeds it."""

CLEANUP_S = 10.0
"""Seconds that a server has to end a failed update session. A server whose workers are frozen would never answer."""

IDLE_S = 10.0
"""Seconds in which a paused server's scheduler must have let go of the requests that were aborted."""

ABORT_CHECKS = 50
"""Number of checks, 20 ms apart, of whether aborted requests have ended. SGLang's own pause checks once a second."""


class SGLangEngine(Backend):
    """Client of one SGLang server."""

    kind = "SGLang"

    def __init__(self, address: str, token: str = "", *, model: str = "") -> None:
        """Create the client; it connects with the first request.

        Args:
            address: host:port.
            token: The server's --api-key.
            model: Folder of the model that the server must serve; "": any.
        """
        super().__init__(address, token)
        self._model = model
        self._receives = False
        """True if the trainer broadcasts its weights."""
        self._checks_weights = False
        """True if the server's checksums are compared with those of what was sent."""
        self._notices_changes = False
        """True if tensors are only checked to change with what is sent, see `left_behind`."""
        self._says_paused = False
        self._before_temperature = False
        self._largest_mask = 0
        """Largest number of tokens in a sampling mask that the server reports; 0: it reports none."""
        self._rids: dict[str, str] = {}
        """IDs of the requests in flight, by those that the server knows them by."""
        self._numbers, self._mark = itertools.count(), secrets.token_hex(4)
        self._tensors: Tensors = {}
        self._sent: Tensors = {}
        self._expected: dict[str, list[str]] | None = None
        """The trainer's checksums of the weights that it broadcast last; None: they came from files, see `_sent`."""
        self._dtype, self._wanted_dtype = "F32", ""
        self._held: dict[str, str] = {}
        """The server's checksums after the last update that was checked."""
        self._ranks: list[dict[str, str]] = []
        """The checksums of each rank then; empty before the first such update."""
        self._digests: dict[str, str] = {}
        """The trainer's digests of the weights of that update; empty: they are not known."""
        self._sent_digests: dict[str, str] = {}
        """The trainer's digests of the weights that were sent last."""

    @classmethod
    def client(cls, config: Config, address: str, vision: Vision | None = None, token: str = "") -> SGLangEngine:
        engine = cls(address, token, model=config.model.path)
        engine._wanted_dtype = config.model.dtype
        engine._vision = vision
        engine._receives = config.weights.via == "collective"
        return engine

    @staticmethod
    def launch(config: Config, port: int, scratch: Path) -> Launch:
        inference = config.inference
        python = inference.python or sys.executable
        own = {
            "model-path": config.model.path,
            "dtype": config.model.dtype,
            "host": "127.0.0.1",
            "port": port,
            "max-running-requests": inference.max_running,
        }
        on_cpu = config.model.device == "cpu" or not gpus()
        known = known_options(python) if inference.args else set()
        arguments = server_arguments(own, CPU_OPTIONS if on_cpu else {}, inference.options, known)
        # Otherwise SGLang keeps what the vision tower made of an image, and uses it under the next weights, too.
        environment = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} | ({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {})
        if Path(config.model.path).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"  # SGLang asks the hub for the folder, too, as if it were a hub name
        return Launch(command=[python, "-m", "sglang.launch_server", *arguments], environment=environment)

    async def find(self, info: dict[str, Any] | None, models: list[dict[str, Any]]) -> str | None:
        if info is None:
            return None
        server = await self._request("GET", "/server_info", None)
        self.context = int(server["max_req_input_len"])
        self.takes_images = bool(info.get("has_image_understanding"))
        try:
            self._before_temperature = await self._reports_before_temperature()
        except EngineUnreachable:
            raise
        except EngineError:  # it does not show its likeliest tokens
            self._before_temperature = False
        await self.find_masks(server)
        return str(info["tokenizer_path"])

    async def alive(self) -> None:
        """Ask for the scheduler's state. /health takes a second, and fails in a pause, because it generates a token."""
        await self._request("GET", "/server_info", None)

    async def paused(self) -> bool:
        """Return whether the server is healthy (/ping) and yet takes no requests (/ready), which older ones lack."""
        if not self._says_paused:
            return False
        try:
            await self._request("GET", "/ready", None)
        except EngineUnreachable:
            await self._request("GET", "/ping", None)
            return True
        return False

    async def identity(self) -> str:
        """Return the server's random seed, which it draws at its start unless --random-seed sets it."""
        return await self._request("GET", "/server_info", None, lambda answer, _: str(answer.get("random_seed", "")))

    async def prepare(self) -> list[str]:
        routes = await self._routes()
        if missing := [path for path in NEEDED if path not in routes]:
            raise EngineError(
                f"Cannot train with {self.address}: it does not offer {', '.join(missing)}. Is it SGLang 0.5 or newer?"
            )
        if self._receives and (missing := [path for path in SESSION if path not in routes]):
            raise EngineError(
                f"Cannot train with SGLang at {self.address}: it does not offer {', '.join(missing)}, with which it "
                f"receives broadcast weights. Set weights.via to disk, or take a newer SGLang (0.5.23 has them)."
            )
        self._says_paused = {"/ready", "/ping"} <= routes.keys()
        info = await self._request("GET", "/model_info", None, lambda answer, _: {"model_path": "", **answer})
        server = await self._request("GET", "/server_info", None)
        context = await self._request("GET", "/v1/models", None, lambda answer, _: answer["data"][0]["max_model_len"])
        self.context = context - SPARE_TOKENS
        self.takes_images = bool(info.get("has_image_understanding"))
        if self._model:
            check_model("SGLang", self.address, info["model_path"], self._model)
        if self._wanted_dtype and server.get("dtype") in DTYPES.keys() - {self._wanted_dtype}:
            raise EngineError(
                f"Cannot train with SGLang at {self.address}: it computes with {server['dtype']}, and model.dtype is "
                f"{self._wanted_dtype}. Start it with --dtype {self._wanted_dtype}, or set model.dtype."
            )
        if server.get("dp_size", 1) > 1:
            raise EngineError(f"Cannot train with SGLang at {self.address}: {HAS_REPLICAS}")
        self._before_temperature = await self._reports_before_temperature()
        await self.find_masks(server)
        self._dtype = DTYPES.get(server.get("dtype", ""), "")
        with contextlib.suppress(EngineError):  # a hub name, or a folder on another machine
            self._tensors = await asyncio.to_thread(read_folder, self._model or info["model_path"])
        self._digests, self._sent_digests = {}, {}  # a server that was started again has other weights
        await self._find_checks(server, "/weights_checker" in routes)
        return self._lacks(info["model_path"], bool(server.get("enable_deterministic_inference")))

    async def _find_checks(self, server: Mapping[str, Any], has_checker: bool) -> None:
        """Find out how updates can be checked, given the server's /server_info."""
        on_one_cpu = server.get("device") == "cpu" and server.get("tp_size", 1) == 1
        self._checks_weights = has_checker and on_one_cpu and bool(self._dtype)
        self._notices_changes, self._held, self._ranks = False, {}, []
        if self._checks_weights:
            self._held = await self._checksums()
        elif has_checker and self._dtype and not server.get("quantization") and not server.get("torchao_config"):
            # Quantized tensors may stay the same when the trainer's change a little.
            try:
                self._held = await self._checksums()
            except EngineUnreachable:
                raise
            except EngineError:
                return
            names = self._tensors or self._held  # the model's tensors may not be known here
            self._notices_changes = any(part in names for name in self._held for part in parts_in(name, names))

    async def resolved(self) -> dict[str, Any]:
        info = await self._request("GET", "/server_info", None)
        return {name: value for name, value in info.items() if name != "internal_states" and "api_key" not in name}

    def _lacks(self, model_path: str, uses_seeds: bool) -> list[str]:
        lacks = []
        if _has_experts(self._tensors):
            lacks.append(
                "its model is a mixture of experts, whose weights Clew cannot update in SGLang: it serves the weights "
                "that it began with, and a run cannot train through it. inference.backend=vllm or embedded can"
            )
        if not uses_seeds:
            lacks.append(
                "it ignores seeds: the same prompt gives other tokens each time, also after an interruption, unless "
                "inference.args.enable-deterministic-inference is true"
            )
        if self._notices_changes:
            lacks.append(
                "it runs on a GPU or on several devices, where its checksums cannot be compared with the trainer's: "
                "an update is checked by the logprob of the probe and, from its second on, by whether each tensor "
                "that the trainer has changed has changed there"
            )
        elif not self._checks_weights:
            lacks.append(
                "its weights are quantized or of another dtype, or its /weights_checker is missing or does not answer: "
                "after an update only the logprob of the probe shows whether it holds the right weights"
            )
        if self._before_temperature:
            lacks.append(
                "it reports logprobs before temperature: only at temperature 1 can its tokens be trained on. Start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if not self._largest_mask:
            lacks.append(
                "it reports no sampling masks: tokens that were drawn with top_p, top_k or min_p are scored as if "
                "nothing had been cut off, which biases their ratios. SGLang 0.5.23 reports masks"
            )
        has_vision = self._vision is not None or config_field(model_path, "vision_config") is not None
        if has_vision and not self.takes_images:
            lacks.append("it takes no images, although its model does: set inference.args.enable-multimodal to true")
        return lacks

    async def _reports_before_temperature(self) -> bool:
        """Return whether the logprobs of the likeliest tokens are the same at two temperatures."""

        def take(answer: dict[str, Any], _: str) -> float:
            logprobs = [entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]]
            return max(logprobs) - min(logprobs)

        gaps = []
        for temperature in (1.0, 0.5):
            body = {
                "input_ids": [0, 1, 2, 3],
                "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True, **UNCHANGED},
                "return_logprob": True,
                "top_logprobs_num": 5,
            }
            gaps.append(await self._post("/generate", body, take))
        # Reported after temperature, the differences between tokens are twice as large at 0.5.
        return gaps[0] > 1e-2 and abs(gaps[1] - gaps[0]) < abs(gaps[1] - 2 * gaps[0])

    async def find_masks(self, server: Mapping[str, Any]) -> None:
        """Find out whether the server reports sampling masks, given its /server_info."""
        largest = int(server.get(MASK_OPTION) or 0)
        self._largest_mask = largest if largest and await self._reports_masks() else 0

    async def _reports_masks(self) -> bool:
        """Return whether a request for a sampling mask gets one. Some backends and speculative decoding refuse it."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 2, "ignore_eos": True}
        body = {"input_ids": [0, 1, 2, 3], "sampling_params": sampling, "return_sampling_mask": True}
        try:
            return await self._post("/generate", body, lambda answer, _: bool(answer["meta_info"].get(MASKS)))
        except EngineUnreachable:
            raise
        except EngineError:
            return False

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.images and not self.takes_images:
            raise ImageError(
                f"SGLang at {self.address} takes no images. Set inference.args.enable-multimodal to true, for a model "
                f"that takes them."
            )
        # SGLang refuses an ID that it still works on, also another client's, and aborts all IDs that begin with one.
        rid = f"{request.id}#{self._mark}{next(self._numbers)}"
        self._rids[rid] = request.id
        try:
            completion = await super().generate(replace(request, id=rid))
        finally:
            del self._rids[rid]
        masked = completion.sampling_mask is not None and all(completion.sampling_mask)
        wrong = completion.wrong_logprobs or self.wrong_logprobs(request.params, masked)
        return replace(completion, wrong_logprobs=wrong)

    async def abort(self, request_id: str | None = None) -> None:
        if request_id is None:
            await super().abort()
        for rid in [rid for rid, id in self._rids.items() if id == request_id]:
            await super().abort(rid)

    def _generate_body(self, request: GenerateRequest) -> dict[str, Any]:
        body = super()._generate_body(request)
        body["sampling_params"] |= UNCHANGED
        if request.images:
            if self._vision is None:
                raise ImageError(f"The images cannot be sent to SGLang at {self.address}: its model is not known here.")
            body["input_ids"] = self._vision.one_token_each(request.input_ids, request.images)
            body["return_prompt_token_ids"] = True
        truncates = request.params.truncates(self.vocab or math.inf)
        if request.sampling_mask and truncates and (top_k := self._top_k_with_mask(request.params)):
            body["return_sampling_mask"] = True
            body["sampling_params"]["top_k"] = top_k
        return body

    def _top_k_with_mask(self, params: SamplingParams) -> int:
        """Return the top_k with which a request can ask for its sampling mask; 0 if it can have no mask.

        SGLang refuses such a request if top_k is missing, or above the largest mask. top_p and min_p alone are
        therefore sent with a top_k. A smaller vocabulary makes one that cuts nothing off. Otherwise it is half of the
        largest mask: tokens that are as likely as the last one belong to the mask, too, and must have room in it.
        """
        top_k = min(params.top_k or math.inf, self.vocab or math.inf)
        if top_k <= self._largest_mask:
            return int(top_k)
        return 0 if params.top_k else self._largest_mask // 2

    def _new_of(self, event: dict[str, Any], before: int, address: str) -> Completion | None:
        new, meta = super()._new_of(event, before, address), event["meta_info"]
        if new is None or not new.output_ids or not meta.get(MASKS):
            return new
        # As with the logprobs, an event of a stream has the masks of all tokens so far, or only the new ones.
        count = len(new.output_ids)
        masks, inside = meta[MASKS][-count:], meta["output_token_sampling_logprobs"][-count:]
        if not len(masks) == len(inside) == count:
            raise FaultyAnswer(
                address, f"it returned {count} tokens, {len(masks)} sampling masks and {len(inside)} logprobs"
            )
        pairs = zip(masks, new.logprobs, inside, strict=True)
        logprobs = [renormalised if mask else plain for mask, plain, renormalised in pairs]
        return replace(new, logprobs=logprobs, sampling_mask=[mask or [] for mask in masks])

    def wrong_logprobs(self, params: SamplingParams, masked: bool = False) -> str:
        if masked:  # logprobs are then those of the draw itself, whatever the server does with the others
            return ""
        reports = f"SGLang at {self.address} reports logprobs"
        if params.min_new_tokens > 0:
            return f"{reports} as if stop tokens had probability 0 before min_new_tokens. Leave min_new_tokens out"
        if self._before_temperature and params.temperature not in (0, 1):
            return (
                f"{reports} before temperature, and the temperature is {params.temperature:g}. Start it without "
                f"SGLANG_RETURN_ORIGINAL_LOGPROB, or set the temperature to 1"
            )
        return ""

    async def pause(self, lease_s: float = 60.0) -> None:
        """Abort all requests, return their tokens so far, and start none until `resume`: SGLang has no leases."""
        await self.abort()
        for _ in range(ABORT_CHECKS):
            if not self._rids:
                break
            await asyncio.sleep(0.02)
        await self._post("/pause_generation", {"mode": "abort"})
        # An aborted request may have been answered while the scheduler still has it. An update fails then, because the
        # cache cannot be emptied. Older servers do not wait here.
        with contextlib.suppress(EngineError):
            await self._post(f"/flush_cache?timeout={IDLE_S:g}", {})

    async def receive(self, sent: Broadcast) -> None:
        self._refuse_experts(sent.version, sent.names)
        if others := differences(self._needed_shapes(sent.names), sent.shape_by_name()):
            raise EngineError(
                f"Cannot load version {sent.version} into SGLang at {self.address}: the tensors sent are not those of "
                f"its model: {few(others)}. It did not take part."
            )
        if wrong := sorted({DTYPES.get(dtype, dtype) for dtype in sent.dtypes} - {self._dtype}):
            raise EngineError(
                f"Cannot load version {sent.version} into SGLang at {self.address}: it computes with {self._dtype}, "
                f"and {few(wrong)} is sent. It did not take part. Start it with the run's model.dtype."
            )
        try:
            (await asyncio.open_connection(sent.host, sent.port))[1].close()
        except OSError as error:  # SGLang itself would try for half an hour
            raise EngineError(f"Cannot load version {sent.version}: the trainer has called it off ({error}).") from None
        group = {"group_name": sent.group}
        place = {"master_address": sent.host, "master_port": sent.port, "rank_offset": sent.rank}
        place |= {"world_size": sent.size, "backend": sent.backend}
        end = "/end_weight_update"
        left = {end: {}, "/destroy_weights_update_group": group}
        await self._do("/init_weights_update_group", {**group, **place})
        try:
            await self._do("/begin_weight_update", {})
            for bucket in sent.by_bucket():
                body = {"names": sent.names[bucket], "dtypes": sent.dtypes[bucket], "shapes": sent.shapes[bucket]}
                # The probe is too coarse for what the weights of the version before have left in the cache, so it is
                # emptied in this step, whose effect the checksums show, and not only by /flush_cache.
                label = {"weight_version": str(sent.version), "flush_cache": bucket.stop == len(sent.names)}
                await self._do("/update_weights_from_distributed", {**body, **group, **label})
            del left[end]
            await self._do(end, {})
        finally:
            for path, body in left.items():  # the first error is the one to report, and a hanging server stays one
                with contextlib.suppress(EngineError, TimeoutError):
                    await asyncio.wait_for(self._post(path, body), CLEANUP_S)

    async def _do(self, path: str, body: dict[str, Any]) -> None:
        """Have the server do a part of an update."""
        if (answer := await self._post(path, body)).get("success") is False:
            raise EngineError(f"SGLang at {self.address} failed at {path}: {answer.get('message')}")

    async def check(self, ref: WeightRef) -> None:
        self._refuse_experts(ref.version, await self._tensors_of(ref))

    async def load(self, ref: WeightRef) -> None:
        if ref.was_broadcast():
            try:
                self._expected = read_broadcast(ref)["checksums"]
            except RecordError as error:
                raise EngineError(f"Cannot load version {ref.version} into SGLang at {self.address}: {error}") from None
            self._sent_digests = _digests_of(ref)
            await self._post("/flush_cache", {})
            return
        new = await self._tensors_of(ref)
        self._refuse_experts(ref.version, new)
        body = {"model_path": ref.path, "load_format": "auto", "weight_version": str(ref.version), "flush_cache": True}
        try:
            answer = await self._post("/update_weights_from_disk", body)
            if not answer.get("success"):
                raise EngineError(f"SGLang at {self.address} did not load version {ref.version}: {answer}")
        except (EngineUnreachable, FaultyAnswer):
            raise
        except EngineError as error:
            raise EngineError(f"{sentence(str(error))} {await self._left()}") from None
        self._sent, self._expected, self._sent_digests = new, None, _digests_of(ref)
        await self._post("/flush_cache", {})

    async def _tensors_of(self, ref: WeightRef) -> Tensors:
        """Return the tensors in a folder. Raises EngineError if they are not those of the server's model."""
        new = await asyncio.to_thread(read_folder, ref.path)
        # SGLang would load what fits until it fails, and its rollback, which reads the same file, would fail, too.
        if others := differences(self._needed_shapes(new), {name: each.shape for name, each in new.items()}):
            raise EngineError(
                f"Cannot load version {ref.version} into SGLang at {self.address}: {ref.path} has other tensors than "
                f"its model: {few(others)}. It was not sent."
            )
        return new

    def _needed_shapes(self, sent: Collection[str]) -> dict[str, list[int]]:
        """Return the shapes of the model's tensors, without those that are neither sent nor computed with.

        Old checkpoints have buffers that neither SGLang nor the trainer reads, such as rotary_emb.inv_freq.
        """
        used = {part for name in self._held for part in parts_in(name, self._tensors)}
        left = self._tensors.keys() - used - set(sent) if self._held else set()
        return {name: each.shape for name, each in self._tensors.items() if name not in left}

    def _refuse_experts(self, version: int, names: Iterable[str]) -> None:
        if _has_experts(names):
            raise EngineError(
                f"Cannot load version {version} into SGLang at {self.address}: its model is a mixture of experts, "
                f"whose tensors SGLang joins in a way that Clew cannot check. Nothing was loaded. Train it with "
                f"inference.backend=vllm or embedded."
            )

    async def verify(self, ref: WeightRef) -> None:
        label = (await self._request("GET", "/model_info", None)).get("weight_version")
        if label != str(ref.version):
            raise EngineError(
                f"SGLang at {self.address} says that it loaded version {ref.version}, and then that it has {label}."
            )
        if not self._checks_weights and not self._notices_changes:
            return
        ranks = await self._rank_checksums()
        held = joined_ranks(ranks)
        if self._checks_weights:
            await self._compare(ref, held)
        elif behind := left_behind(self._held, held, self._digests, self._sent_digests):
            raise EngineError(
                f"SGLang at {self.address} answered that it loaded version {ref.version}, but {len(behind)} of its "
                f"{len(held)} tensors have not changed, although the trainer has changed them: {few(behind)}. It "
                f"serves nothing now."
            )
        elif old := ranks_left_behind(self._ranks, ranks, self._digests, self._sent_digests):
            raise EngineError(
                f"SGLang at {self.address} answered that it loaded version {ref.version}, but {len(old)} of its "
                f"{len(ranks)} ranks still hold the weights from before the update: {few(old)}. It serves "
                f"nothing now. Its log may say why; restart it."
            )
        self._held, self._ranks, self._digests = held, ranks, self._sent_digests

    async def _compare(self, ref: WeightRef, held: Mapping[str, str]) -> None:
        """Raise EngineError if the server's checksums are not those of what was sent, or it lacks what has changed."""
        expected = self._expected or await asyncio.to_thread(checksums, held, self._sent, self._dtype)
        if wrong := [name for name, theirs in held.items() if theirs not in expected.get(name, ())]:
            unchanged = "They still have their values from before the update. " if held == self._held else ""
            raise EngineError(
                f"SGLang at {self.address} answered that it loaded version {ref.version}, but {len(wrong)} of its "
                f"{len(held)} tensors are not those of {ref.path}: {few(wrong)}. {unchanged}It serves nothing now."
            )
        used = {part for name in held for part in parts_in(name, self._sent_digests)}
        if unread := sorted(changed_tensors(self._digests, self._sent_digests) - used):
            raise EngineError(
                f"SGLang at {self.address} does not read {few(unread)}, which the trainer has changed: it computes "
                f"another model. It serves nothing now. Train it with inference.backend=vllm or embedded."
            )

    async def _left(self) -> str:
        """Return a sentence about what a failed update has left in the server."""
        if not self._checks_weights and not self._notices_changes:
            return "What it holds now is unknown; restart it."
        try:
            held = await self._checksums()
        except EngineUnreachable:
            raise
        except EngineError:
            return "What it holds now is unknown; restart it."
        changed = [name for name in held if held[name] != self._held.get(name)]
        if not changed:
            return "It still holds the old weights."
        return f"It now holds a mixture of old and new weights ({few(changed)} changed); restart it."

    async def _checksums(self) -> dict[str, str]:
        """Return the server's own checksums of each tensor that it computes with: those of all its ranks, joined."""
        return joined_ranks(await self._rank_checksums())

    async def _rank_checksums(self) -> list[dict[str, str]]:
        """Return the checksums of each rank's tensors."""

        def take(answer: dict[str, Any], _: str) -> list[dict[str, str]]:
            ranks = [dict(rank["checksums"]) for rank in answer["ranks"]]
            if not any(ranks):  # every update would seem to be checked
                raise ValueError("it has no checksums")
            return ranks

        return await self._post("/weights_checker", {"action": "checksum"}, take)

    async def score(self, input_ids: list[int]) -> float:
        body = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": max(len(input_ids) - 2, 0),
        }

        def take(answer: dict[str, Any], _: str) -> float:
            return float(answer["meta_info"]["input_token_logprobs"][-1][0])

        return await self._post("/generate", body, take)


def _has_experts(names: Iterable[str]) -> bool:
    return any(".experts." in name for name in names)


def _digests_of(ref: WeightRef) -> dict[str, str]:
    """Return the trainer's digests of the weights; empty if it wrote none, as in a folder that another tool saved."""
    try:
        return read_digests(ref)
    except RecordError:
        return {}


def server_arguments(
    own: Mapping[str, Any], defaults: Mapping[str, Any], chosen: Mapping[str, Any], known: set[str]
) -> list[str]:
    """Return the server's command line.

    Args:
        own: Options that Clew sets itself.
        defaults: Options that the user may change.
        chosen: Options that the user chose, as in `Inference.options`.
        known: The server's option names, such as "--port".

    Raises:
        ConfigError: `chosen` has an option that the server does not know, or one of `own`.
    """
    if unknown := [name for name in chosen if f"--{name}" not in known]:
        raise ConfigError(f"Cannot start SGLang: it has no option {few(unknown)} (inference.args).")
    if twice := [name for name in chosen if name in own or name in ("model", "api-key", "admin-api-key")]:
        raise ConfigError(f"Cannot start SGLang with {few(twice)} in inference.args: Clew sets this itself.")
    return options({**own, **defaults, **chosen}.items())


def known_options(python: str) -> set[str]:
    """Return the names of SGLang's options, such as "--port", from its own parser; this takes some seconds."""
    try:
        done = subprocess.run([python, "-c", LIST_OPTIONS], capture_output=True, text=True, timeout=OPTIONS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        late = isinstance(error, subprocess.TimeoutExpired)  # the error's text holds the whole program
        why = f"it did not list its options within {OPTIONS_S:g} s" if late else first_line(error)
        raise ConfigError(f"Cannot start SGLang with {python} (inference.python): {why}") from None
    for line in done.stdout.splitlines():
        if line.startswith("OPTIONS "):
            return set(orjson.loads(line.removeprefix("OPTIONS ")))
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise ConfigError(f"Cannot start SGLang with {python} (inference.python): {last}")


def differences(old: Mapping[str, list[int]], new: Mapping[str, list[int]]) -> list[str]:
    """Return the tensors that only one of two models has, or whose shapes differ; an empty list if `old` is empty."""
    if not old:
        return []
    tied = {"lm_head.weight"}  # may be left out where it is the embedding
    alone = sorted((old.keys() ^ new.keys()) - tied)
    return alone + [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
