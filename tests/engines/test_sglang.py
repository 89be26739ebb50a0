"""`SGLangEngine` before a real SGLang server. Weight updates that go wrong are made by a proxy before it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from clew.config_fields import Inference
from clew.errors import ConfigError, EngineError, ImageError
from clew.inference import weight_group
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine
from clew.inference.retries import generate_through_aborts
from clew.inference.sglang import SPARE_TOKENS, SGLangEngine
from clew.inference.sglang_checksums import RunningChecksums
from clew.models.tensor_digest import as_array, hex_digests
from clew.models.vision import load_vision
from clew.record.files import write_json
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import BROADCAST_FILE, DIGESTS_KEY, WeightRef
from clew.waits import Reporter
from tests.engines.updating import config_of, update_in_flight
from tests.models import picture, seeing_model, tiny_model, tiny_tokenizer

PYTHON = os.environ.get("CLEW_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="CLEW_SGLANG_PYTHON names no Python with SGLang (tests/engines/install.py)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
PROMPT = [7, 8, 9, 10, 11]
CONTEXT = 1024
ENDLESS = SamplingParams(max_new_tokens=800, stop_token_ids=())


def config(model: Path, **args: Any) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(path=str(model), dtype="float32", device="cpu"),
        inference=Inference(python=PYTHON, args=args, max_running=64),
    )


@dataclass
class Served:
    address: str
    folder: Path
    models: dict[str, Any]
    """transformers' models, by the name of their folder."""

    def ref(self, name: str, version: int = 1) -> WeightRef:
        return WeightRef(version=version, path=str(self.folder / name), digest="")

    def logprobs(self, name: str, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
        ids = PROMPT + completion.output_ids
        with torch.no_grad():
            logits = self.models[name](torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1)[range(len(completion.output_ids)), completion.output_ids]

    def check_masks(self, completion: Completion, temperature: float = 1.0) -> None:
        """Compare the logprobs with those over the reported masks, under the model of each token's version."""
        masks, ids = completion.sampling_mask, PROMPT + completion.output_ids
        assert masks is not None and len(masks) == len(completion.output_ids)
        with torch.no_grad():
            logits = {
                version: self.models[name](torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1] / temperature
                for version, name in ((0, "one"), (7, "two"))
            }
        worst = 0.0
        for place, (token, mask) in enumerate(zip(completion.output_ids, masks, strict=True)):
            assert token in mask
            over_mask = torch.log_softmax(logits[completion.versions[place]][place][mask], -1)
            worst = max(worst, abs(over_mask[mask.index(token)].item() - completion.logprobs[place]))
        print(f"|Δlogprob| over the masks {worst:.1e}, {min(map(len, masks))} to {max(map(len, masks))} tokens each")
        assert worst <= 2e-5


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    launch = SGLangEngine.launch(config(folder / "one", log_level="warning"), port, folder)
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            launch.command, env={**os.environ, **launch.environment}, stdout=log, stderr=log, start_new_session=True
        )


BOTH = ("test_an_update_that_is_half_applied", "test_an_update_that_answers_200_and_changed_nothing")
"""Tests of both models. The others take one: the model whose embedding is its head as well, or the other."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    if "served" in metafunc.fixturenames:
        models = ["tied", "untied"] if name in BOTH else ["tied"] if "tied_lm_head" in name else ["untied"]
        metafunc.parametrize("served", models, indirect=True, scope="module")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of model `one`; `two` has other weights."""
    folder = tmp_path_factory.mktemp(request.param)
    family, tie = ("qwen2", True) if request.param == "tied" else ("qwen3", False)
    models = {}
    for seed, name in enumerate(("one", "two")):
        models[name] = tiny_model(folder / name, family, tie=tie, seed=seed, scale=0.2, context=CONTEXT)
        tiny_tokenizer(folder / name)
    with closing_port() as port:
        pass
    process = start(folder, port)
    try:
        wait_until_ready(process, f"127.0.0.1:{port}", folder / "log")
        yield Served(f"127.0.0.1:{port}", folder, models)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class closing_port:
    """A free port."""

    def __enter__(self) -> int:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        return self.socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    async def look() -> bool:
        engine = SGLangEngine(address)
        try:
            await engine.ready()
            return True
        except EngineError:
            return False
        finally:
            await engine.close()

    until = time.monotonic() + 180
    while not asyncio.run(look()):
        assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.5)


Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""Function that changes the body of a request on its way to the server. None: it answers success by itself."""


def use(served: Served, body: Callable[[SGLangEngine], Awaitable[Any]], change: Change | None = None) -> Any:
    """Prepare an engine, load model `one`, and call `body` with it; `change` sees the requests after that."""

    async def run() -> Any:
        runner = None
        changes: list[Change] = [lambda path, data: data]
        address = served.address
        if change is not None:
            runner, address = await proxy(served.address, lambda path, data: changes[-1](path, data))
        engine = SGLangEngine(address, model=str(served.folder / "one"))
        try:
            await engine.prepare()
            await engine.pause()
            await engine.load(served.ref("one", 0))
            await engine.verify(served.ref("one", 0))
            await engine.resume()
            if change is not None:
                changes.append(change)
            return await body(engine)
        finally:
            await engine.resume()
            await engine.close()
            if runner is not None:
                await runner.cleanup()

    return asyncio.run(run())


async def proxy(address: str, change: Change) -> tuple[web.AppRunner, str]:
    async def forward(request: web.Request) -> web.Response:
        data = await request.read()
        if data:
            changed = change(request.path, await request.json())
            if changed is None:
                return web.json_response({"success": True, "message": "Succeeded to update model weights."})
            async with session.post(f"http://{address}{request.path_qs}", json=changed) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        async with session.request(request.method, f"http://{address}{request.path_qs}") as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    session = aiohttp.ClientSession()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)

    async def close(_: web.Application) -> None:
        await session.close()

    app.on_cleanup.append(close)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"127.0.0.1:{runner.addresses[0][1]}"


async def load(engine: SGLangEngine, ref: WeightRef) -> None:
    await engine.pause()
    try:
        await engine.load(ref)
        await engine.verify(ref)
    finally:
        await engine.resume()


@pytest.mark.parametrize(
    ("temperature", "truncation"),
    [(0.5, {}), (1.0, {}), (1.3, {}), (1.3, {"top_p": 0.6}), (1.3, {"top_k": 3}), (1.3, {"min_p": 0.2})],
)
def test_logprobs_are_those_after_temperature_and_before_truncation(
    served: Served, temperature: float, truncation: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(), temperature=temperature, **truncation)
    completion: Completion = use(served, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))
    difference = served.logprobs("one", completion, temperature) - torch.tensor(completion.logprobs)
    print(f"|Δlogprob| {difference.abs().max():.1e} at temperature {temperature} {truncation}")
    assert difference.abs().max() <= 1e-5
    assert len(completion.output_ids) == 40 and completion.finish_reason == "length" and not completion.wrong_logprobs


@pytest.mark.parametrize(
    ("truncation", "streams"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9, "top_k": 20, "temperature": 1.3}, True),
        ({"top_p": 0.9, "top_k": 20, "temperature": 1.3}, False),
        ({"min_p": 0.2}, True),
        ({"top_k": 20, "min_new_tokens": 40, "stop_token_ids": tuple(range(20, 60))}, True),
    ],
)
def test_a_sampling_mask_comes_with_logprobs_over_it(served: Served, truncation: dict[str, Any], streams: bool) -> None:
    params = SamplingParams(**{"max_new_tokens": 40, "stop_token_ids": (), **truncation})
    streamed: list[tuple[int, float]] = []
    listen = (lambda *each: streamed.append(each)) if streams else None
    request = GenerateRequest(PROMPT, params, sampling_mask=True, on_token=listen)
    completion: Completion = use(served, lambda engine: engine.generate(request))
    served.check_masks(completion, params.temperature)
    masks = completion.sampling_mask
    assert masks is not None and 1 < max(map(len, masks)) <= truncation.get("top_k", 99) and min(map(len, masks)) < 99
    assert not completion.wrong_logprobs and len(streamed) == 40 * streams
    assert not streams or [logprob for _, logprob in streamed] == completion.logprobs


def test_sampling_masks_go_on_after_an_update_has_interrupted(served: Served) -> None:
    async def body(engine: SGLangEngine) -> Completion:
        begun = asyncio.Event()
        params = SamplingParams(max_new_tokens=800, stop_token_ids=(), top_p=0.9)
        request = GenerateRequest(PROMPT, params, id="x", on_token=lambda *_: begun.set(), sampling_mask=True)
        task = asyncio.create_task(generate_through_aborts(engine, request))
        await begun.wait()
        await load(engine, served.ref("two", 7))
        return await task

    completion: Completion = use(served, body)
    assert set(completion.versions) == {0, 7} and len(completion.output_ids) == 800 and not completion.wrong_logprobs
    served.check_masks(completion)


def test_a_minimum_of_tokens_is_said_to_change_the_logprobs(served: Served) -> None:
    params = SamplingParams(max_new_tokens=40, min_new_tokens=40, stop_token_ids=(20, 21, 22, 23))
    completion: Completion = use(served, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))
    difference = served.logprobs("one", completion) - torch.tensor(completion.logprobs)
    assert difference.abs().max() > 1e-3
    assert "min_new_tokens" in completion.wrong_logprobs


def test_stops_streams_and_scores(served: Served) -> None:
    async def body(engine: SGLangEngine) -> None:
        assert await engine.prepare() and engine.context == CONTEXT - SPARE_TOKENS and not engine.takes_images
        stopped = await engine.generate(
            GenerateRequest(PROMPT, SamplingParams(max_new_tokens=200, stop_token_ids=tuple(range(20, 60))))
        )
        assert stopped.finish_reason == "stop" and stopped.matched == stopped.output_ids[-1]
        stopped = await engine.generate(
            GenerateRequest(PROMPT, SamplingParams(max_new_tokens=200, stop_token_ids=(), stop=("a", "b", "c", "d")))
        )
        assert stopped.finish_reason == "stop" and stopped.matched in ("a", "b", "c", "d")
        streamed: list[tuple[int, float]] = []
        request = GenerateRequest(PROMPT, ENDLESS, on_token=lambda token, logprob: streamed.append((token, logprob)))
        whole = await engine.generate(request)
        assert streamed == list(zip(whole.output_ids, whole.logprobs, strict=True)) and len(streamed) == 800
        expected = served.logprobs("one", Completion(output_ids=[12], logprobs=[0], versions=[0], finish_reason="stop"))
        assert abs(await engine.score([*PROMPT, 12]) - expected.item()) < 1e-5
        with pytest.raises(ImageError):
            await engine.generate(GenerateRequest(PROMPT, ENDLESS, images=(picture("red"),)))

    use(served, body)


def test_an_update_aborts_and_the_tokens_so_far_keep_their_version(served: Served) -> None:
    async def body(engine: SGLangEngine) -> None:
        begun = asyncio.Event()
        tasks = [
            asyncio.create_task(
                engine.generate(GenerateRequest(PROMPT, ENDLESS, id=str(i), on_token=lambda *_: begun.set()))
            )
            for i in range(3)
        ]
        await begun.wait()
        await engine.abort("0")
        first = await tasks[0]
        assert first.finish_reason == "abort" and 0 < len(first.output_ids) < 800
        await engine.pause()
        parts = await asyncio.gather(*tasks[1:])
        assert {part.finish_reason for part in parts} == {"abort"}
        assert {version for part in parts for version in part.versions} == {0}
        held_back = asyncio.create_task(engine.generate(GenerateRequest(PROMPT, ENDLESS)))
        await engine.load(served.ref("two", 7))
        assert not held_back.done()
        await engine.resume()
        after = await held_back
        assert set(after.versions) == {7}
        assert (served.logprobs("two", after) - torch.tensor(after.logprobs)).abs().max() < 2e-5

    use(served, body)


@pytest.mark.parametrize("mode", ["restart", "wait"])
def test_generations_in_flight_restart_or_are_waited_for(served: Served, tmp_path: Path, mode: str) -> None:
    refs = [served.ref("one", 0), served.ref("two", 7)]
    first, second = update_in_flight(tmp_path, served.folder / "one", "sglang", served.address, mode, refs, 800)
    assert first.versions == [0 if mode == "wait" else 7] * 800
    assert second.versions == [7] * 800
    for completion in (first, second):
        name = "two" if completion.versions[0] else "one"
        assert (served.logprobs(name, completion) - torch.tensor(completion.logprobs)).abs().max() < 2e-5


def test_an_update_that_answers_200_and_changed_nothing(served: Served) -> None:
    def drop(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        if path != "/update_weights_from_disk":
            return data
        data["model_path"] = str(served.folder / "one")
        return data

    with pytest.raises(
        EngineError, match=r"tensors are not those of .*They still have their values from before"
    ) as raised:
        use(served, lambda engine: load(engine, served.ref("two", 5)), drop)
    assert "model.embed_tokens.weight" in str(raised.value)


def test_sglang_makes_the_tokens_of_images_that_clew_has_recorded(tmp_path: Path) -> None:
    """Call the function alone: on a CPU, SGLang runs no model with images."""
    seeing_model(tmp_path, "paddleocr_vl")
    vision = load_vision(str(tmp_path))
    assert vision is not None
    images = [picture("red", 64, 16), picture("blue")]
    ids = [7, *vision.tokens_of(images[0]), 8, *vision.tokens_of(images[1]), 9]
    counts = [vision.tokens_of(image).count(vision.image_id) for image in images]
    code = (
        "import json, sys; from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor as P\n"
        "print(json.dumps(P._expand_input_ids(*json.loads(sys.argv[1]))))"
    )
    given = json.dumps([vision.one_token_each(ids, images), counts, vision.image_id])
    run = subprocess.run([PYTHON, "-c", code, given], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0 and json.loads(run.stdout.splitlines()[-1]) == ids, run.stderr


def test_wrong_weights_behind_clew_serve_are_an_error_and_no_sign_of_death(served: Served, tmp_path: Path) -> None:
    """A paused SGLang does not answer /health. Taken for dead, it would be asked to load the same weights forever."""

    def drop(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        return {**data, "model_path": str(served.folder / "one")} if path == "/update_weights_from_disk" else data

    async def body(engine: SGLangEngine) -> None:
        config = config_of(tmp_path, served.folder / "one", "sglang")
        await RemoteEngine(config, RemoteCore(config), engine).load_weights(served.ref("two", 5))

    with pytest.raises(EngineError, match="tensors are not those of") as raised:
        use(served, body, drop)
    assert not isinstance(raised.value, EngineUnreachable)


def test_an_update_that_never_reached_the_server(served: Served) -> None:
    def swallow(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        return None if path == "/update_weights_from_disk" else data

    with pytest.raises(EngineError, match="says that it loaded version 5, and then that it has 0"):
        use(served, lambda engine: load(engine, served.ref("two", 5)), swallow)


def test_where_checksums_cannot_be_compared_tensors_must_change_with_the_trainers(
    served: Served, tmp_path: Path
) -> None:
    """Check as on a GPU, where SGLang computes its checksums otherwise."""
    part = ""

    def divert(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        if path != "/update_weights_from_disk" or not part:
            return data
        return {**data, "model_path": str(tmp_path / "mixed")}

    async def body(engine: SGLangEngine) -> None:
        nonlocal part
        engine._checks_weights, engine._notices_changes = False, True
        tensors = {name: load_file(served.folder / name / "model.safetensors") for name in ("one", "two")}
        (tmp_path / "config.json").write_bytes((served.folder / "one" / "config.json").read_bytes())
        refs = [digested(tmp_path / str(place), tensors[name], place) for place, name in enumerate(("one", "two"))]
        await load(engine, refs[0])
        await load(engine, refs[1])
        await load(engine, refs[0])
        part = "layers.1.mlp.down_proj"
        mixed = {name: tensors["one" if part in name else "two"][name] for name in tensors["two"]}
        digested(tmp_path / "mixed", mixed, 1)
        with pytest.raises(EngineError, match="have not changed, although the trainer has changed them") as raised:
            await load(engine, refs[1])
        assert "1 of its" in str(raised.value) and f"{part}.weight" in str(raised.value)

    use(served, body, divert)


def digested(folder: Path, tensors: dict[str, torch.Tensor], version: int) -> WeightRef:
    """Write weights with their digests, as the trainer does."""
    folder.mkdir()
    metadata = {"format": "pt", DIGESTS_KEY: json.dumps(hex_digests(tensors))}
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_bytes((folder.parent / "config.json").read_bytes())
    return WeightRef(version=version, path=str(folder), digest="")


@pytest.mark.parametrize("part", ["lm_head", "model.layers.1", "k_proj", "norm"])
def test_an_update_that_is_half_applied(served: Served, part: str, tmp_path: Path) -> None:
    tensors = load_file(served.folder / "two" / "model.safetensors")
    half = {name: tensor for name, tensor in tensors.items() if part not in name}
    if part == "norm":  # the same in both models
        half = {name: tensor + ("norm" in name) * 0.125 for name, tensor in tensors.items()}
    if len(half) == len(tensors) and part == "lm_head":
        pytest.skip("the lm_head is the embedding")
    save_file(half, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((served.folder / "two" / "config.json").read_bytes())

    def divert(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        return {**data, "model_path": str(tmp_path)} if path == "/update_weights_from_disk" else data

    with pytest.raises(EngineError, match="tensors are not those of") as raised:
        use(served, lambda engine: load(engine, served.ref("two", 5)), divert)
    assert {"k_proj": "model.layers.0.self_attn.qkv_proj"}.get(part, part) in str(raised.value)


def test_a_tied_lm_head_follows_its_embedding(served: Served) -> None:
    async def body(engine: SGLangEngine) -> None:
        await load(engine, served.ref("two", 5))
        completion = await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=20)))
        assert (served.logprobs("two", completion) - torch.tensor(completion.logprobs)).abs().max() < 1e-5

    use(served, body)


def test_a_stale_cache_is_flushed(served: Served) -> None:
    """The engine flushes it, even if the update itself does not."""

    def keep_cache(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        return {**data, "flush_cache": False} if path == "/update_weights_from_disk" else data

    async def body(engine: SGLangEngine) -> None:
        greedy = SamplingParams(max_new_tokens=20, temperature=0.0, stop_token_ids=())
        await engine.generate(GenerateRequest(PROMPT, greedy))
        await load(engine, served.ref("two", 5))
        completion = await engine.generate(GenerateRequest(PROMPT, greedy))
        assert (served.logprobs("two", completion) - torch.tensor(completion.logprobs)).abs().max() < 1e-5

    use(served, body, keep_cache)


def test_a_broadcast_empties_the_cache_although_the_call_that_flushes_it_is_lost(
    served: Served, tmp_path: Path
) -> None:
    """The weights change so little that the probe, scored from the old cache, would pass."""
    drift = torch.Generator().manual_seed(0)
    model = copy.deepcopy(served.models["one"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=drift)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}

    async def body(engine: SGLangEngine) -> None:
        before = await engine.generate(GenerateRequest(PROMPT, ENDLESS))
        await engine.pause()
        async with broadcasting(tensors, version=5) as sent:
            await engine.receive(sent)
        await engine.load(broadcast_ref(tmp_path, tensors, version=5))
        await engine.resume()
        params = SamplingParams(max_new_tokens=20, stop_token_ids=())
        prompt = PROMPT + before.output_ids
        after = await engine.generate(GenerateRequest(prompt, params))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + after.output_ids])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1)[range(20), after.output_ids]
        assert (own - torch.tensor(after.logprobs)).abs().max() < 2e-5

    use(served, body, lambda path, data: None if path == "/flush_cache" else data)


@asynccontextmanager
async def broadcasting(tensors: dict[str, torch.Tensor], version: int) -> AsyncIterator[Broadcast]:
    """Send tensors to one server while the block runs, as the trainer does."""
    leads = weight_group.meeting_point("127.0.0.1", 0, 2, leads=True)
    store = weight_group.meeting_point("127.0.0.1", leads.port, 2)

    def send() -> None:
        group = weight_group.Group(store, "broadcast", "gloo", 0, 2)
        for tensor in tensors.values():
            group.broadcast(tensor)
        group.close()

    sending = asyncio.create_task(asyncio.to_thread(send))
    yield Broadcast(
        version=version, host="127.0.0.1", port=leads.port, group="broadcast", backend="gloo", rank=1, size=2,
        dtypes=["float32"] * len(tensors), shapes=[list(tensor.shape) for tensor in tensors.values()],
        names=list(tensors), buckets=[1, len(tensors) - 1],
    )  # fmt: skip
    await sending


def broadcast_ref(folder: Path, tensors: dict[str, torch.Tensor], version: int) -> WeightRef:
    """Write what the trainer writes of tensors that it has broadcast."""
    sums = RunningChecksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor.shape, as_array(tensor))
    write_json(folder / BROADCAST_FILE, {"digests": hex_digests(tensors), "checksums": sums.by_name()})
    return WeightRef(version=version, path=str(folder), digest="")


def test_a_file_that_does_not_fit_is_not_sent(served: Served, tmp_path: Path) -> None:
    tensors = load_file(served.folder / "two" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    (tmp_path / "config.json").write_bytes((served.folder / "two" / "config.json").read_bytes())

    async def body(engine: SGLangEngine) -> None:
        for wrong in ({name: tensors[name][:-1].clone()}, {"model.other.weight": torch.zeros(3)}):
            save_file({**tensors, **wrong}, tmp_path / "model.safetensors", {"format": "pt"})
            with pytest.raises(EngineError, match="was not sent") as raised:
                await load(engine, WeightRef(version=5, path=str(tmp_path), digest=""))
            assert next(iter(wrong)) in str(raised.value)
        whole = (served.folder / "two" / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[:-100])
        with pytest.raises(EngineError, match="its header says"):
            await load(engine, WeightRef(version=5, path=str(tmp_path), digest=""))
        with pytest.raises(EngineError, match="no safetensors file"):
            await load(engine, WeightRef(version=5, path=str(tmp_path / "none"), digest=""))
        completion = await engine.generate(GenerateRequest(PROMPT, ENDLESS))
        assert (served.logprobs("one", completion) - torch.tensor(completion.logprobs)).abs().max() < 1e-5

    use(served, body)


def test_a_refused_update_says_what_the_server_still_holds(served: Served) -> None:
    def break_format(path: str, data: dict[str, Any]) -> dict[str, Any] | None:
        return {**data, "load_format": "dummy"} if path == "/update_weights_from_disk" else data

    with pytest.raises(EngineError, match="It still holds the old weights"):
        use(served, lambda engine: load(engine, served.ref("two", 5)), break_format)


def test_tensors_outside_an_update_session_are_refused(served: Served) -> None:
    """SGLang's own rules, which the stand-in in tests/inference/test_sglang_client.py follows."""

    async def body(engine: SGLangEngine) -> None:
        names = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
        with pytest.raises(EngineError, match="begin_weight_update"):
            await engine._post("/update_weights_from_distributed", names)
        with pytest.raises(EngineError, match="no weight-update session is open"):
            await engine._post("/end_weight_update", {})
        await engine._post("/begin_weight_update", {})
        with pytest.raises(EngineError, match="already open"):
            await engine._post("/begin_weight_update", {})
        await engine._post("/end_weight_update", {})

    use(served, body)


def test_a_pause_that_comes_late_does_not_hold_requests_back(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They waited for the next update, and the trainer waited for them."""
    settings = config_of(tmp_path, served.folder / "one", "sglang")
    short = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=8, stop_token_ids=()))

    async def scenario() -> Completion:
        client = SGLangEngine.client(settings, served.address)
        engine = RemoteEngine(settings, RemoteCore(settings), client)
        try:
            await engine.start(Reporter(tmp_path / "status", "server"))
            await engine.load_weights(served.ref("one", 3))
            await client._post("/pause_generation", {"mode": "abort"})
            return await engine.generate(short)
        finally:
            await client.resume()
            await engine.close()

    completion = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert set(completion.versions) == {3} and len(completion.output_ids) == 8
    assert f"SGLang at {served.address} is paused, and no update needs that: resuming it" in caplog.text


def test_another_model_is_refused(served: Served, tmp_path: Path) -> None:
    tiny_model(tmp_path / "other", vocab=64)

    async def body(_: SGLangEngine) -> None:
        other = SGLangEngine(served.address, model=str(tmp_path / "other"))
        try:
            with pytest.raises(EngineError, match=r"vocab_size|architectures"):
                await other.prepare()
        finally:
            await other.close()

    use(served, body)


def test_options_are_checked_against_sglangs_own_parser(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option context-lenght"):
        SGLangEngine.launch(config(tmp_path, context_lenght=12), 1, tmp_path)
    with pytest.raises(ConfigError, match="Clew sets this itself"):
        SGLangEngine.launch(config(tmp_path, port=12), 1, tmp_path)
    command = SGLangEngine.launch(config(tmp_path, context_length=12, max_total_tokens=99), 1, tmp_path).command
    assert command[command.index("--context-length") + 1] == "12"
    assert command[command.index("--max-total-tokens") + 1] == "99"
