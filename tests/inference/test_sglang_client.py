"""`SGLangEngine` with a fake SGLang server, for cases that the real one in tests/engines cannot produce."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from clew.errors import EngineError, ImageError
from clew.inference import sglang
from clew.inference.detect_server import find_engine
from clew.inference.protocol import Completion, FaultyAnswer, GenerateRequest, SamplingParams
from clew.inference.sglang import NEEDED, SESSION, SGLangEngine
from clew.inference.sglang_checksums import checksum, read_folder
from clew.models.tensor_digest import hex_digests
from clew.models.vision import load_vision
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import DIGESTS_KEY, WeightRef
from tests.inference.test_faulty_servers import serving
from tests.models import picture, seeing_model

IDS = [4, 5, 6]


class StandIn:
    """A server that answers as SGLang 0.5.23 does. With `largest_mask=None` it has no sampling masks."""

    def __init__(self, largest_mask: int | None = 4096) -> None:
        self.largest_mask = largest_mask
        self.masks: list[list[int] | None] = [[4, 50], [5], [6, 50, 51]]
        self.asked: list[tuple[str, Any]] = []
        self.queries: dict[str, dict[str, str]] = {}
        """The last query string of each path."""
        self.server: dict[str, Any] = {"device": "cuda", "dtype": "float32", "tp_size": 2}
        self.model: dict[str, Any] = {"model_path": "hub/name"}
        self.ranks: list[dict[str, str]] = []
        """Checksums of its tensors, on each rank."""
        self.prompt: list[int] = []
        """Value of `prompt_token_ids` in its answers."""
        self.in_session = False
        self.loaded: list[str] = []
        """Tensors that it received in an update session."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        self.queries[request.path] = dict(request.query)
        given = self.body_of(request.path, body)
        return web.json_response(given, status=400 if "error" in given else 200)

    def body_of(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/generate":
            return self.generated(body)
        if path in ("/begin_weight_update", "/end_weight_update", "/update_weights_from_distributed"):
            return self.in_update(path, body)
        masks = {} if self.largest_mask is None else {"sampling_mask_max_tokens": self.largest_mask}
        return {
            "/openapi.json": {"paths": {path: {} for path in (*NEEDED, *SESSION, "/weights_checker")}},
            "/server_info": {**self.server, **masks},
            "/model_info": self.model,
            "/weights_checker": {"ranks": [{"checksums": each} for each in self.ranks]}
            if self.ranks
            else {"error": {"message": "no kernel"}},
            "/update_weights_from_disk": {"success": True},
            "/v1/models": {"data": [{"max_model_len": 64}]},
        }.get(path, {})

    def in_update(self, path: str, body: Any) -> dict[str, Any]:
        """Refuse what SGLang refuses: tensors outside a session, and a session within another."""
        if (path == "/begin_weight_update") == self.in_session:
            return {"error": {"message": f"{path} is refused: in_session is {self.in_session}"}}
        if path == "/update_weights_from_distributed":
            self.loaded += body["names"]
        else:
            self.in_session = not self.in_session
        return {"success": True}

    def generated(self, body: Any) -> dict[str, Any]:
        top_k = body["sampling_params"].get("top_k", -1)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": len(IDS)},
            "completion_tokens": len(IDS),
            "weight_version": "0",
            "output_token_logprobs": [[-2.0, token, None] for token in IDS],
            "output_top_logprobs": [[[-1 / (body["sampling_params"]["temperature"] or 1), 1, None], [0.0, 2, None]]],
        }
        if body.get("return_sampling_mask") and self.largest_mask is not None:
            if not 0 < top_k <= self.largest_mask:
                return {"error": {"message": f"return_sampling_mask requires top_k; got {top_k}"}}
            meta["output_token_sampling_mask"] = self.masks
            meta["output_token_sampling_logprobs"] = [None if mask is None else -0.5 for mask in self.masks]
        told = {"prompt_token_ids": self.prompt} if body.get("return_prompt_token_ids") else {}
        return {"output_ids": IDS, "meta_info": meta, **told}


def use(stand_in: StandIn, body: Callable[[SGLangEngine], Awaitable[Any]], vision: Any = None) -> Any:
    """Call `body` with an engine after its `prepare`."""
    named: Any = SimpleNamespace(model=SimpleNamespace(path="", dtype=""), weights=SimpleNamespace(via="disk"))

    async def run(address: str) -> Any:
        engine = SGLangEngine.client(named, address, vision)
        try:
            await engine.prepare()
            return await body(engine)
        finally:
            await engine.close()

    with serving(stand_in.answer) as address:
        return asyncio.run(run(address))


def complete(stand_in: StandIn, vocab: int | None = 100, asks: bool = True, **truncation: Any) -> Completion:
    async def body(engine: SGLangEngine) -> Completion:
        engine.vocab = vocab
        params = SamplingParams(max_new_tokens=len(IDS), stop_token_ids=(), **truncation)
        return await engine.generate(GenerateRequest([7, 8], params, sampling_mask=asks))

    return use(stand_in, body)


def test_with_a_mask_logprobs_are_renormalised() -> None:
    completion = complete(StandIn(), top_k=3)
    assert (completion.sampling_mask, completion.logprobs) == ([[4, 50], [5], [6, 50, 51]], [-0.5] * 3)


def test_a_token_without_a_mask_keeps_its_plain_logprob() -> None:
    stand_in = StandIn()
    stand_in.masks[1] = None
    completion = complete(stand_in, top_k=3)
    assert (completion.sampling_mask, completion.logprobs) == ([[4, 50], [], [6, 50, 51]], [-0.5, -2.0, -0.5])


def test_prepare_warns_if_a_server_has_no_masks() -> None:
    stand_in = StandIn(None)
    completion = complete(stand_in, top_p=0.9)
    assert (completion.sampling_mask, completion.logprobs) == (None, [-2.0] * 3)
    assert "return_sampling_mask" not in stand_in.asked[-1][1] and stand_in.asked[-1][1]["sampling_params"]["top_k"] < 0
    assert any("no sampling masks" in lack for lack in use(stand_in, SGLangEngine.prepare))
    assert not any("no sampling masks" in lack for lack in use(StandIn(), SGLangEngine.prepare))


@pytest.mark.parametrize(
    ("truncation", "vocab", "sent"),
    [
        ({"top_p": 0.9}, 100, 100),
        ({"min_p": 0.1}, None, 2048),
        ({"top_p": 0.9}, 150_000, 2048),
        ({"top_k": 50}, 150_000, 50),
        ({"top_k": 2**40, "top_p": 0.9}, 100, 100),
        ({"top_k": 5000}, 150_000, None),
        ({"temperature": 0.0, "top_k": 50}, 100, None),
        ({}, 100, None),
        ({"top_k": 100}, 100, None),
    ],
)
def test_a_mask_is_asked_for_with_a_top_k_that_sglang_takes(
    truncation: dict[str, Any], vocab: int | None, sent: int | None
) -> None:
    stand_in = StandIn()
    completion = complete(stand_in, vocab, **truncation)
    body = stand_in.asked[-1][1]
    assert body.get("return_sampling_mask", False) == (sent is not None) == (completion.sampling_mask is not None)
    assert body["sampling_params"]["top_k"] == (sent or truncation.get("top_k", -1))


def test_no_mask_is_sent_unless_requested() -> None:
    assert complete(StandIn(), top_k=3, asks=False).logprobs == [-2.0] * 3


@pytest.mark.parametrize("masks", [[[4, 50], [6], [6]], [[4], [5]]])
def test_a_mask_that_cannot_be_right_is_a_fault_of_the_server(masks: Any) -> None:
    stand_in = StandIn()
    stand_in.masks = masks
    with pytest.raises(FaultyAnswer, match="sampling mask"):
        complete(stand_in, top_k=3)


@pytest.mark.parametrize(("before", "refuses"), [(False, False), (True, False), (True, True)])
def test_the_gateway_too_finds_out_which_logprobs_a_server_reports(before: bool, refuses: bool) -> None:
    """A server that refuses to report its likeliest tokens is found, too."""

    class Behind(StandIn):
        def generated(self, body: Any) -> dict[str, Any]:
            if refuses and "top_logprobs_num" in body:
                return {"error": {"message": "top_logprobs_num is not supported"}}
            if before:
                body["sampling_params"]["temperature"] = 1.0
            return super().generated(body)

    stand_in = Behind()
    stand_in.server["max_req_input_len"] = 64
    stand_in.model["tokenizer_path"] = "m"

    async def find(address: str) -> str:
        found = await find_engine(f"http://{address}/v1")
        assert found is not None
        return found.engine.wrong_logprobs(SamplingParams(temperature=0.7))

    with serving(stand_in.answer) as address:
        wrong = asyncio.run(find(address))
    assert ("before temperature, and the temperature is 0.7" in wrong) == (before and not refuses)


Q, K, NORM = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm"))
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def written(folder: Path, version: int, **values: float) -> WeightRef:
    """Weights as the trainer writes them: each tensor is filled with a number."""
    tensors = {name: torch.full((4, 4), values.get(key, 0.0)) for key, name in (("q", Q), ("k", K), ("norm", NORM))}
    path = folder / str(version)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={DIGESTS_KEY: json.dumps(hex_digests(tensors))})
    return WeightRef(version=version, path=str(path), digest="")


async def update(engine: SGLangEngine, stand_in: StandIn, ref: WeightRef, *ranks: dict[str, str]) -> None:
    """Load weights, after which the server's ranks have these checksums."""
    stand_in.model["weight_version"], stand_in.ranks = str(ref.version), list(ranks)
    await engine.load(ref)
    await engine.verify(ref)


def test_an_update_fails_if_a_changed_tensor_stays_old_on_the_server(tmp_path: Path) -> None:
    """Two ranks: checksums need not be those of whole tensors."""
    stand_in = StandIn()
    stand_in.ranks = [{QKV: "a", NORM: "b"}, {QKV: "c", NORM: "b"}]

    async def body(engine: SGLangEngine) -> None:
        await update(engine, stand_in, written(tmp_path, 0), *stand_in.ranks)  # first update: nothing to compare with
        await update(engine, stand_in, written(tmp_path, 1), *stand_in.ranks)  # the same weights
        await update(engine, stand_in, written(tmp_path, 2, k=1), {QKV: "A", NORM: "b"}, {QKV: "c", NORM: "b"})
        both = written(tmp_path, 3, k=2, norm=1)
        with pytest.raises(EngineError, match=f"2 of its 2 tensors have not changed.*{QKV}, {NORM}"):
            await update(engine, stand_in, both, *stand_in.ranks)
        with pytest.raises(EngineError, match=f"1 of its 2 tensors have not changed.*them: {QKV}. It serves"):
            await update(engine, stand_in, both, {QKV: "A", NORM: "B"}, {QKV: "c", NORM: "B"})
        await update(engine, stand_in, both, {QKV: "A", NORM: "B"}, {QKV: "C", NORM: "B"})
        engine._digests = {}
        await update(engine, stand_in, written(tmp_path, 4, q=9), *stand_in.ranks)  # digests of version 3 are not known

    use(stand_in, body)


def test_a_tensor_that_the_server_does_not_read_must_stay_as_it_was(tmp_path: Path) -> None:
    """SGLang's Granite has no biases in its attention. They begin as zeros, and the probe is too coarse for a step."""
    stand_in = StandIn()
    stand_in.server = {"device": "cpu", "dtype": "float32"}

    async def load(engine: SGLangEngine, ref: WeightRef) -> None:
        held = {NORM: checksum(NORM, [read_folder(ref.path)[NORM]], "F32")[0]}
        await update(engine, stand_in, ref, held)

    async def body(engine: SGLangEngine) -> None:
        await load(engine, written(tmp_path, 0))
        await load(engine, written(tmp_path, 1, norm=1))
        with pytest.raises(EngineError, match=f"SGLang at {engine.address} does not read {Q}, which the trainer has"):
            await load(engine, written(tmp_path, 2, norm=2, q=1))

    stand_in.ranks = [{NORM: "before"}]
    use(stand_in, body)


def test_buffers_that_nobody_reads_do_not_stop_an_update(tmp_path: Path) -> None:
    """Llama 2's files have rotary_emb.inv_freq, for example."""
    stand_in = StandIn()
    stand_in.ranks = [{QKV: "a", NORM: "b"}]
    ref = written(tmp_path, 1)

    async def body(engine: SGLangEngine) -> None:
        file = read_folder(ref.path)
        engine._tensors = {**file, "model.layers.0.self_attn.rotary_emb.inv_freq": file[NORM]}
        await update(engine, stand_in, ref, *stand_in.ranks)
        engine._tensors = {name: each for name, each in file.items() if name != K} | {f"{K}_": file[K]}
        with pytest.raises(EngineError, match=f"has other tensors than its model: {K}"):
            await update(engine, stand_in, ref, *stand_in.ranks)

    use(stand_in, body)


def test_a_rank_that_did_not_load_the_update_stops_it(tmp_path: Path) -> None:
    """A probe after a small step would miss it."""
    stand_in = StandIn()
    stand_in.ranks = [{QKV: "a", NORM: "b"}, {QKV: "c", NORM: "b"}]

    async def body(engine: SGLangEngine) -> None:
        await update(engine, stand_in, written(tmp_path, 1), *stand_in.ranks)
        new = written(tmp_path, 2, q=1, k=1, norm=1)
        with pytest.raises(EngineError, match="1 of its 2 ranks still hold the weights from before the update: 1"):
            await update(engine, stand_in, new, {QKV: "A", NORM: "B"}, {QKV: "c", NORM: "b"})
        await update(engine, stand_in, new, {QKV: "A", NORM: "B"}, {QKV: "C", NORM: "B"})

    use(stand_in, body)


@pytest.mark.parametrize(
    ("server", "ranks", "lack"),
    [
        ({}, [{QKV: "a"}], "from its second on"),
        ({"device": "cpu"}, [{QKV: "a"}], "from its second on"),
        ({}, [], "does not answer"),
        ({"quantization": "fp8"}, [{QKV: "a"}], "quantized"),
        ({"dtype": "float16"}, [{QKV: "a"}], "another dtype"),
    ],
)
def test_it_says_how_far_updates_are_checked(server: dict[str, Any], ranks: list[dict[str, str]], lack: str) -> None:
    stand_in = StandIn()
    stand_in.server |= server
    stand_in.ranks = ranks
    assert any(lack in each for each in use(stand_in, SGLangEngine.prepare))


def broadcast(version: int) -> Broadcast:
    """A broadcast whose members meet at a port that is open until the tests end."""
    meeting = socket.create_server(("127.0.0.1", 0))
    port = meeting.getsockname()[1]
    meeting.detach()
    names = [Q, K, NORM]
    return Broadcast(
        version=version, host="127.0.0.1", port=port, group=f"g{version}", backend="gloo",
        rank=1, size=2, dtypes=["float32"] * 3, shapes=[[4, 4]] * 3, names=names, buckets=[1, 2],
    )  # fmt: skip


def test_broadcast_weights_are_received_in_a_session_that_is_ended() -> None:
    """SGLang refuses tensors outside a session, and the next session until the one before has ended."""
    stand_in = StandIn()

    async def body(engine: SGLangEngine) -> None:
        for version in (1, 2):
            await engine.receive(broadcast(version))
            assert stand_in.loaded == [Q, K, NORM] * version and not stand_in.in_session
        sent = [body for path, body in stand_in.asked if path == "/update_weights_from_distributed"]
        assert [body["flush_cache"] for body in sent] == [False, True] * 2, "emptied with the last bucket"

    use(stand_in, body)


def test_an_update_waits_until_the_scheduler_has_let_go_of_aborted_requests() -> None:
    """SGLang had loaded the weights, and then failed the update, because it could not empty its cache."""
    stand_in = StandIn()
    use(stand_in, lambda engine: engine.pause())
    assert [path for path, _ in stand_in.asked][-2:] == ["/pause_generation", "/flush_cache"]
    assert float(stand_in.queries["/flush_cache"]["timeout"]) > 0


def test_sglang_does_not_join_a_broadcast_that_was_cancelled() -> None:
    """SGLang would try to connect for half an hour."""

    async def body(engine: SGLangEngine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            late = replace(broadcast(1), port=closed.getsockname()[1])
        with pytest.raises(EngineError, match="the trainer has called it off"):
            await engine.receive(late)

    use(stand_in := StandIn(), body)
    assert not stand_in.loaded


def test_a_session_ends_after_a_failed_broadcast_too() -> None:
    stand_in = StandIn()
    answer = stand_in.in_update
    stand_in.in_update = lambda path, body: (
        {"error": {"message": "a member is lost"}} if "distributed" in path else answer(path, body)
    )

    async def body(engine: SGLangEngine) -> None:
        with pytest.raises(EngineError, match="a member is lost"):
            await engine.receive(broadcast(1))
        assert not stand_in.in_session and stand_in.asked[-1] == (SESSION[-1], {"group_name": "g1"})

    use(stand_in, body)


def test_an_update_fails_if_the_end_of_its_session_fails() -> None:
    """SGLang completes the weights at the end, for example packs them."""
    stand_in = StandIn()
    answer = stand_in.in_update
    stand_in.in_update = lambda path, body: (
        {"success": False, "message": "no memory to pack"} if "/end" in path else answer(path, body)
    )

    async def body(engine: SGLangEngine) -> None:
        with pytest.raises(EngineError, match=r"SGLang at .* failed at /end_weight_update: no memory to pack"):
            await engine.receive(broadcast(1))
        assert stand_in.asked[-1] == (SESSION[-1], {"group_name": "g1"})

    use(stand_in, body)


def test_a_server_that_hangs_in_a_broadcast_does_not_hang_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client also asks it to end the session, and gets no answer, either."""
    monkeypatch.setattr(sglang, "CLEANUP_S", 0.1)

    async def answer(request: web.Request) -> web.Response:
        if request.path in SESSION[2:]:
            await asyncio.sleep(600)
        return web.json_response({})

    async def receive(address: str) -> None:
        engine = SGLangEngine(address)
        try:
            receiving = asyncio.ensure_future(engine.receive(broadcast(1)))
            await asyncio.sleep(0.3)
            receiving.cancel()
            done, _ = await asyncio.wait({receiving}, timeout=5)
            assert done and receiving.cancelled()
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(receive(address))


@pytest.mark.parametrize("ranks", [[], [{"checksums": {}}]])
def test_an_answer_without_checksums_does_not_pass_for_a_check(tmp_path: Path, ranks: Any) -> None:
    stand_in = StandIn()
    stand_in.server["device"], stand_in.server["tp_size"] = "cpu", 1
    stand_in.ranks = [{NORM: "a"}]

    async def body(engine: SGLangEngine) -> None:
        stand_in.model["weight_version"] = "1"
        answer = stand_in.body_of
        stand_in.body_of = lambda path, body: {"ranks": ranks} if path == "/weights_checker" else answer(path, body)
        ref = written(tmp_path, 1)
        await engine.load(ref)
        with pytest.raises(FaultyAnswer, match="it has no checksums"):
            await engine.verify(ref)

    use(stand_in, body)


@pytest.mark.parametrize(
    ("folder_says", "clew_says", "serves", "warned"),
    [
        (True, False, False, True),
        (False, True, False, True),  # as for a hub name
        (True, True, True, False),
        (False, False, False, False),
    ],
)
def test_prepare_warns_if_images_are_off(
    tmp_path: Path, folder_says: bool, clew_says: bool, serves: bool, warned: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}} if folder_says else {}))
    stand_in = StandIn()
    stand_in.model |= {"model_path": str(tmp_path), "has_image_understanding": serves}

    async def body(engine: SGLangEngine) -> None:
        lacks = await engine.prepare()
        assert any("inference.args.enable-multimodal" in lack for lack in lacks) == warned
        if not serves:
            with pytest.raises(ImageError, match="enable-multimodal"):
                await engine.generate(GenerateRequest([7], SamplingParams(), images=(b"image",)))

    use(stand_in, body, object() if clew_says else None)


@pytest.mark.parametrize("expands", [True, False])
def test_sglang_gets_one_token_per_image_and_must_expand_it_as_recorded(tmp_path: Path, expands: bool) -> None:
    seeing_model(tmp_path)
    vision, image = load_vision(str(tmp_path)), picture("red")
    assert vision is not None
    ids = [7, *vision.tokens_of(image), 8]
    stand_in = StandIn()
    stand_in.model |= {"has_image_understanding": True}
    stand_in.prompt = ids if expands else [7, 8]

    async def body(engine: SGLangEngine) -> Completion:
        return await engine.generate(GenerateRequest(ids, SamplingParams(max_new_tokens=3), images=(image,)))

    if expands:
        assert use(stand_in, body, vision).output_ids == IDS
    else:
        with pytest.raises(ImageError, match=r"expanded the images to other tokens .* 2 in the prompt, not 6"):
            use(stand_in, body, vision)
    assert stand_in.asked[-1][1]["input_ids"] == [7, vision.image_id, 8]
