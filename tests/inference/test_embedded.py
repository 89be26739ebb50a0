"""The embedded engine is held equal to the slow reference."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig

from clew.errors import EngineError
from clew.inference import attention
from clew.inference import engine_core as core_module
from clew.inference.embedded import EmbeddedEngine, build_engine
from clew.inference.engine_core import Core
from clew.inference.local import LocalEngine
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.inference.reference import ReferenceEngine
from clew.inference.request_checks import default_stop_ids, matched_stop
from clew.inference.retries import generate_through_aborts
from clew.models.loading import load_model, load_tokenizer
from clew.record.weights import DIGEST_KEY, WeightRef
from tests.models import ATTENTION_FAMILIES, VOCAB, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
Asked = list[tuple[list[int], SamplingParams]]


def folder_with(path: Path, family: str = "qwen2", **kwargs: Any) -> Path:
    tiny_tokenizer(path)
    tiny_model(path, family, **{"scale": 0.12, **kwargs})
    return path


def engines(path: Path, **kwargs: Any) -> tuple[ReferenceEngine, Core]:
    """The reference and what serves, each with a model of its own."""
    tokenizer = load_tokenizer(str(path))
    reference = ReferenceEngine(load_model(str(path), "float32", CPU), tokenizer)
    return reference, build_engine(load_model(str(path), "float32", CPU), tokenizer, **kwargs)


def run(engine: Core, asked: Asked) -> list[Completion]:
    """Run all requests at once, to the end."""
    for index, (ids, params) in enumerate(asked):
        engine.submit(GenerateRequest(id=str(index), input_ids=ids, params=params))
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {request.id: completion for request, completion in engine.step()}
    return [done[str(index)] for index in range(len(asked))]


def assert_equal(expected: Completion, found: Completion, tolerance: float = 5e-5) -> None:
    """tolerance: nats; what float32 rounds differs from processor to processor."""
    assert found.output_ids == expected.output_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=tolerance)
    assert (found.finish_reason, found.matched) == (expected.finish_reason, expected.matched)


def various(seed: int, count: int = 16) -> Asked:
    """Requests of all kinds; a third share a prompt."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(6, 100) for _ in range(rng.randint(1, 20))] if index % 3 else [7, 8, 9],
            SamplingParams(
                max_new_tokens=rng.randint(1, 60),
                min_new_tokens=rng.choice([0, 1]),
                temperature=rng.choice([0, 1, 0.7]),
                top_p=rng.choice([1, 0.9]),
                top_k=rng.choice([0, 10]),
                min_p=rng.choice([0, 0.05]),
                seed=index,
                stop=("12", "b") if index % 5 == 0 else (),
            ),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("family", "tie"),
    [(family, True) for family in ATTENTION_FAMILIES] + [("qwen2", False), ("llama", False), ("gpt2", False)],
)
def test_equals_the_reference(tmp_path: Path, family: str, tie: bool) -> None:
    reference, engine = engines(folder_with(tmp_path, family, tie=tie), max_running=5)
    assert isinstance(engine, EmbeddedEngine)
    asked = various(0)
    for expected, found in zip(run(reference, asked), run(engine, asked), strict=True):
        assert_equal(expected, found)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_masks_lie_as_cudas_kernels_want_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A mask at another address ends the process on CUDA: "misaligned address". mistral has a sliding window."""
    seen: list[tuple[int, ...]] = []
    plain = attention.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        if attn_mask is not None:
            seen.append((int(attn_mask.storage_offset()), *attn_mask.stride()[:-1]))
        return plain(*tensors, attn_mask=attn_mask, **kwargs)

    _, engine = engines(folder_with(tmp_path, family), max_running=5)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    run(engine, various(0))
    decoding = [lies for lies in seen if lies[-1] == lies[-2] == lies[-3]]  # torch copies those of a prefill
    assert len(decoding) > 100 and all(step % attention.ALIGNED == 0 for lies in decoding for step in lies)


def test_a_model_that_refuses_a_cache_is_served_by_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its own code raises at a call that it was not made for."""
    tokenizer, model = tiny_tokenizer(tmp_path), tiny_model(tmp_path, "gpt2")
    plain = model.forward

    def forward(input_ids: Any, use_cache: bool = False) -> Any:
        assert not use_cache
        return plain(input_ids, use_cache=False)

    model.forward = forward  # type: ignore[method-assign]
    engine = build_engine(model, tokenizer)
    assert isinstance(engine, ReferenceEngine) and "the cached path fails (TypeError at module.py:" in caplog.text
    assert len(run(engine, [([7], SamplingParams(max_new_tokens=3, stop_token_ids=()))])[0].output_ids) == 3


def test_a_model_with_state_is_served_by_the_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    engine = build_engine(tiny_model(tmp_path, "mamba"), tokenizer)
    assert isinstance(engine, ReferenceEngine) and "linear_attention" in caplog.text
    assert len(run(engine, [([7], SamplingParams(max_new_tokens=3, stop_token_ids=()))])[0].output_ids) == 3


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReferenceEngine, Core]:
    return engines(folder_with(tmp_path_factory.mktemp("both")), max_running=4)


Event = tuple[str, int, int]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "step", "abort", "release"]), st.integers(1, 40), st.integers(1, 30)
        ),
        max_size=25,
    )
)
def test_whatever_arrives_or_is_aborted_each_output_equals_the_reference(
    both: tuple[ReferenceEngine, Core], events: list[Event]
) -> None:
    """An aborted request is resubmitted with its tokens so far, and goes on with the same random numbers."""
    reference, engine = both
    asked: Asked = []
    so_far: dict[str, Completion] = {}

    def submit(index: int) -> None:
        ids, params = asked[index]
        before = so_far.get(str(index))
        done = len(before.output_ids) if before else 0
        rest = replace(params, max_new_tokens=params.max_new_tokens - done)
        engine.submit(
            GenerateRequest(id=str(index), input_ids=ids + (before.output_ids if before else []), params=rest)
        )

    def collect(finished: list[tuple[GenerateRequest, Completion]]) -> list[int]:
        for request, completion in finished:
            before = so_far.get(request.id)
            if before:
                completion = replace(
                    completion,
                    output_ids=before.output_ids + completion.output_ids,
                    logprobs=before.logprobs + completion.logprobs,
                )
            so_far[request.id] = completion
        return [int(request.id) for request, completion in finished if completion.finish_reason == "abort"]

    for kind, size, number in events:
        if kind == "submit":
            rng = random.Random(size)  # equal sizes give equal prompts
            asked.append(
                (
                    [rng.randrange(6, 100) for _ in range(size)],
                    SamplingParams(max_new_tokens=number, seed=len(asked), temperature=number % 2),
                )
            )
            submit(len(asked) - 1)
        elif kind == "step":
            for _ in range(number):
                collect(engine.step())
        else:
            which = str(number % max(1, len(asked)))
            for index in collect(engine.abort(which) if kind == "abort" else engine.release_memory()):
                submit(index)
    while engine.has_work:
        collect(engine.step())
    for index, expected in enumerate(run(reference, asked)):
        assert_equal(expected, so_far[str(index)])
    assert isinstance(engine, EmbeddedEngine) and engine.running() == 0 and engine.cache.rows == 0


def test_equal_prompts_share_one_prefill(both: tuple[ReferenceEngine, Core]) -> None:
    engine, seen = both[1], list[int]()
    embedding = engine.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].numel()))
    run(engine, [([11, 12, 13, 14], SamplingParams(max_new_tokens=4, seed=seed)) for seed in range(4)])
    hook.remove()
    assert seen == [4, 4, 4, 4]  # the prompt once, then a token of each row three times


def test_the_cache_is_bounded_and_the_rest_waits(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, float32
    gib = 3 * 128 * bytes_per_token / 2**30
    engine = EmbeddedEngine(load_model(str(path), "float32", CPU), load_tokenizer(str(path)), cache_gib=gib)
    assert engine.cache.bytes_per_token == bytes_per_token
    for index in range(8):
        params = SamplingParams(max_new_tokens=50, stop_token_ids=())
        engine.submit(GenerateRequest(id=str(index), input_ids=[7 + index], params=params))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.running())
        held = sum(tensor.numel() * tensor.element_size() for tensor in engine.cache.keys + engine.cache.values)
        assert held <= engine.cache.budget
    assert most == 3
    with pytest.raises(EngineError, match=r"240 tokens \(prompt 3, max_new_tokens 237\).*inference\.cache_gib"):
        params = SamplingParams(max_new_tokens=237)
        tight = EmbeddedEngine(load_model(str(path), "float32", CPU), None, cache_gib=gib / 3)
        tight.submit(GenerateRequest(id="", input_ids=[7, 8, 9], params=params))


def test_a_request_that_does_not_fit_yet_does_not_widen_the_cache(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    gib = 256 * (2 * 2 * 2 * 8 * 4) / 2**30  # one row of the whole context
    engine = EmbeddedEngine(load_model(str(path), "float32", CPU), load_tokenizer(str(path)), cache_gib=gib)
    for index, (tokens, new) in enumerate([(170, 20), (8, 20), (8, 20), (170, 20)]):
        params = SamplingParams(max_new_tokens=new, stop_token_ids=())
        engine.submit(GenerateRequest(id=str(index), input_ids=[7 + index] * tokens, params=params))
    while engine.has_work:
        engine.step()
        held = sum(tensor.numel() * tensor.element_size() for tensor in engine.cache.keys + engine.cache.values)
        assert held <= engine.cache.budget


def test_ends_where_the_context_ends(both: tuple[ReferenceEngine, Core]) -> None:
    asked: Asked = [([7] * 250, SamplingParams(max_new_tokens=50, stop_token_ids=()))]
    for engine in both:
        [completion] = run(engine, asked)
        assert len(completion.output_ids) == 6 and completion.finish_reason == "length"
        with pytest.raises(EngineError, match=r"256 tokens.*256"):
            engine.submit(GenerateRequest(id="", input_ids=[7] * 256, params=SamplingParams()))


def test_a_context_shorter_than_the_self_check(tmp_path: Path) -> None:
    for family in ("qwen2", "gpt2"):
        reference, engine = engines(folder_with(tmp_path / family, family, context=5))
        assert isinstance(engine, EmbeddedEngine)
        asked: Asked = [([7, 8], SamplingParams(stop_token_ids=()))]
        assert_equal(run(reference, asked)[0], run(engine, asked)[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stop_token_ids": (5000,)}, "stop_token_ids holds 5000"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
        ({"stop_token_ids": ("1",)}, "stop_token_ids holds '1'"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids holds 1.5"),
        ({"stop": (7,)}, "stop holds 7"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"temperature": None}, "temperature is None"),
        ({"max_new_tokens": 5.5}, "max_new_tokens is 5.5"),
    ],
)
def test_a_request_that_no_step_could_compute_is_refused(
    both: tuple[ReferenceEngine, Core], wrong: dict[str, Any], words: str
) -> None:
    params: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3, **wrong}
    for engine in both:
        with pytest.raises(EngineError, match=words):
            engine.submit(GenerateRequest(id="", input_ids=[7, 8], params=SamplingParams(**params)))
        with pytest.raises(EngineError, match="input_ids"):
            engine.submit(GenerateRequest(id="", input_ids=[7, 8.5], params=SamplingParams()))  # type: ignore[list-item]
        assert not engine.has_work


def test_end_tokens_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    model = load_model(str(path), "float32", CPU)
    model.generation_config.eos_token_id = [1, 5000]
    engine = build_engine(model, load_tokenizer(str(path)))
    assert engine.default_stop_ids == (1,)
    assert len(run(engine, [([7, 8], SamplingParams(max_new_tokens=9, min_new_tokens=9))])[0].output_ids) == 9


def test_a_pad_token_ends_a_sequence_only_if_there_is_no_end_token(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    generation_config, tokenizer = GenerationConfig(eos_token_id=None), load_tokenizer(str(path))
    assert default_stop_ids(generation_config, tokenizer, VOCAB) == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    assert default_stop_ids(generation_config, tokenizer, VOCAB) == (tokenizer.pad_token_id,)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_step_that_fails_is_raised_to_every_caller(tmp_path: Path, threaded: bool) -> None:
    class Tokenizer:
        eos_token_id = pad_token_id = None

        def decode(self, ids: list[int]) -> str:
            raise RuntimeError("no such kernel")

    async def scenario() -> None:
        model = load_model(str(folder_with(tmp_path)), "float32", CPU)
        engine = LocalEngine(build_engine(model, Tokenizer()), threaded=threaded)
        plain, bad = SamplingParams(max_new_tokens=100), SamplingParams(stop=("x",))
        answers = await asyncio.gather(
            *(engine.generate(GenerateRequest([7, 8], params)) for params in (plain, bad)), return_exceptions=True
        )
        for answer in answers:
            assert type(answer) is EngineError and "RuntimeError: no such kernel" in str(answer)
        ref = WeightRef(version=1, path=str(tmp_path), digest="")
        for call in (
            engine.generate(GenerateRequest([7], plain)),
            engine.version(),
            engine.load_weights(ref),
            engine.abort(),
        ):
            with pytest.raises(EngineError, match="no such kernel") as raised:
                await asyncio.wait_for(call, 10)
            assert type(raised.value) is EngineError, "nobody tries again"
        await engine.close()

    asyncio.run(scenario())


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_abort_that_fails_is_raised_to_every_caller(tmp_path: Path, threaded: bool, cancelled: bool) -> None:
    async def scenario() -> None:
        core = engines(folder_with(tmp_path))[1]
        assert isinstance(core, EmbeddedEngine)
        core.cache.remove = out_of_memory  # type: ignore[method-assign]
        engine, begun = LocalEngine(core, threaded=threaded), asyncio.Event()
        params = SamplingParams(max_new_tokens=240, stop_token_ids=())
        ask = GenerateRequest([7, 8], params, on_token=lambda *_: begun.set())
        first, second = [asyncio.ensure_future(engine.generate(replace(ask, id=id))) for id in "ab"]
        await begun.wait()
        if cancelled:
            first.cancel()
        else:
            with pytest.raises(EngineError, match="an abort or a load failed with RuntimeError: out of memory"):
                await asyncio.wait_for(engine.abort("a"), 10)
        for answer in await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10):
            assert isinstance(answer, asyncio.CancelledError) or "out of memory" in str(answer)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.version()
        await asyncio.wait_for(engine.close(), 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("threaded", [False, True])
def test_a_load_that_fails_is_refused_and_one_that_cannot_be_undone_ends_the_engine(
    tmp_path: Path, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "broadcast.json").write_text("{")
    wrong = WeightRef(version=1, path=str(tmp_path / "model"), digest="", probe_ids=[7, 8], probe_logprob=9.0)
    sent, params = replace(wrong, path=str(tmp_path / "sent")), SamplingParams(max_new_tokens=3, stop_token_ids=())

    async def scenario() -> None:
        core = engines(folder_with(tmp_path / "model"))[1]
        core.pending_weights = 1, {}
        engine = LocalEngine(core, threaded=threaded)
        with pytest.raises(EngineError, match=r"Cannot load weights from .*sent: .*broadcast\.json"):
            await asyncio.wait_for(engine.load_weights(sent), 10)
        with monkeypatch.context() as patch:
            patch.setattr(core_module, "backed_up", out_of_memory)
            with pytest.raises(EngineError, match=r"Cannot load version 1 .*out of memory"):
                await asyncio.wait_for(engine.load_weights(wrong), 10)
        assert (await engine.generate(GenerateRequest([7], params))).versions == [0, 0, 0]
        monkeypatch.setattr(core_module, "restore", out_of_memory)
        for call in (engine.load_weights(wrong), engine.generate(GenerateRequest([7], params))):
            with pytest.raises(EngineError, match=r"engine stopped: an abort or a load failed with .*out of memory"):
                await asyncio.wait_for(call, 10)
        await asyncio.wait_for(engine.close(), 10)

    asyncio.run(scenario())


def test_stop_ids_stop_strings_and_min_new_tokens(both: tuple[ReferenceEngine, Core]) -> None:
    engine = both[1]
    [free] = run(engine, [([7, 8], SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=()))])
    text = engine.tokenizer.decode(free.output_ids)
    stop = text[4:6]
    ends = text.index(stop) + 2
    [stopped] = run(engine, [([7, 8], SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=(), stop=(stop,)))])
    assert stopped.output_ids == free.output_ids[:ends] and (stopped.finish_reason, stopped.matched) == ("stop", stop)
    token = free.output_ids[3]
    [by_id] = run(engine, [([7, 8], SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=(token,)))])
    assert by_id.output_ids == free.output_ids[: free.output_ids.index(token) + 1] and by_id.matched == token
    params = SamplingParams(max_new_tokens=30, min_new_tokens=20, seed=5, stop_token_ids=(token,))
    [late] = run(engine, [([7, 8], params)])
    assert token not in late.output_ids[:20]


@pytest.mark.parametrize("stop", ["Observation:", "观察的结果", "🛑🛑🛑🛑"])
def test_a_stop_string_whose_tokens_are_single_bytes(stop: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ids = tokenizer.encode(f"yes {stop}").ids
    assert len(ids) == len(f"yes {stop}".encode())
    request = GenerateRequest([7], SamplingParams(stop=("no such text", stop)))
    found = [matched_stop(request, ids[:count], tokenizer) for count in range(1, len(ids) + 1)]
    assert found == [None] * (len(ids) - 1) + [stop]


def test_a_stop_string_across_an_abort(both: tuple[ReferenceEngine, Core]) -> None:
    engine = both[1]
    [free] = run(engine, [([7, 8], SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=()))])
    text = engine.tokenizer.decode(free.output_ids)
    stop = text[4:12]

    async def scenario() -> Completion:
        local = LocalEngine(engine)
        params = SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=(), stop=(stop,))
        request = asyncio.ensure_future(generate_through_aborts(local, GenerateRequest([7, 8], params)))
        for _ in range(7):  # one to submit, then a step each
            await asyncio.sleep(0)
        assert engine.running() == 1
        await local.abort()
        return await request

    completion = asyncio.run(scenario())
    assert completion.output_ids == free.output_ids[: text.index(stop) + 8] and completion.matched == stop


@pytest.mark.parametrize("threaded", [False, True])
def test_many_through_aborts_and_loads_equal_the_reference(tmp_path: Path, threaded: bool) -> None:
    reference, core = engines(folder_with(tmp_path), max_running=4)
    asked = various(3, 24)
    ref = WeightRef(
        version=1, path=str(tmp_path), digest="", probe_ids=[7, 8, 9, 10], probe_logprob=reference.score([7, 8, 9, 10])
    )

    async def scenario() -> list[Completion]:
        engine = LocalEngine(core, threaded=threaded)
        requests = [
            asyncio.ensure_future(generate_through_aborts(engine, GenerateRequest(ids, params)))
            for ids, params in asked
        ]
        for version in range(1, 6):
            await asyncio.sleep(0.02)
            await engine.load_weights(replace(ref, version=version))
        completions = await asyncio.gather(*requests)
        await engine.close()
        return completions

    found = asyncio.run(scenario())
    for expected, completion in zip(run(reference, asked), found, strict=True):
        assert_equal(expected, completion)
        assert completion.versions == sorted(completion.versions)
    assert len({version for completion in found for version in completion.versions}) > 1


def test_a_request_that_comes_during_a_load_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has a thread of its own, as on CUDA: it loads while the loop takes requests."""
    reference, engine = engines(folder_with(tmp_path))
    ref = WeightRef(version=1, path=str(tmp_path), digest="", probe_ids=[7, 8], probe_logprob=reference.score([7, 8]))
    loading, go_on, plain = threading.Event(), threading.Event(), core_module.copy_weights

    def slowly(*args: Any) -> None:
        loading.set()
        assert go_on.wait(60)
        plain(*args)

    async def scenario() -> Completion:
        local = LocalEngine(engine, threaded=True)
        monkeypatch.setattr(core_module, "copy_weights", slowly)
        load = asyncio.ensure_future(local.load_weights(ref))
        await asyncio.to_thread(loading.wait, 60)
        assert await local.version() == 0
        request = asyncio.ensure_future(
            local.generate(GenerateRequest([7], SamplingParams(max_new_tokens=3, stop_token_ids=())))
        )
        await asyncio.sleep(0)
        go_on.set()
        await load
        completion = await request
        await local.close()
        return completion

    assert asyncio.run(scenario()).versions == [1, 1, 1]


@pytest.mark.parametrize("threaded", [False, True])
def test_memory_that_is_released_is_gone_and_requests_go_on_where_they_were(tmp_path: Path, threaded: bool) -> None:
    reference, core = engines(folder_with(tmp_path), max_running=4)
    assert isinstance(core, EmbeddedEngine)
    asked = various(3, 24)

    async def scenario() -> tuple[list[Completion], list[int]]:
        engine, freed = LocalEngine(core, threaded=threaded), []
        requests = [
            asyncio.ensure_future(generate_through_aborts(engine, GenerateRequest(ids, params)))
            for ids, params in asked
        ]
        for _ in range(4):
            await asyncio.sleep(0.02)
            freed.append(core.cache_bytes())
            tensors = [weakref.ref(tensor) for tensor in core.cache.keys + core.cache.values]
            await engine.release_memory()
            await asyncio.sleep(0.03)  # in which aborted requests come again
            assert (core.cache_bytes(), core.running()) == (0, 0)
            assert not any(tensor() is not None for tensor in tensors)
            await engine.resume_memory()
        completions = await asyncio.gather(*requests)
        await engine.close()
        return completions, freed

    found, freed = asyncio.run(scenario())
    assert max(freed) > 0
    for expected, completion in zip(run(reference, asked), found, strict=True):
        assert_equal(expected, completion)


def test_loads_weights_in_place_and_checks_the_probe(tmp_path: Path) -> None:
    first, second = folder_with(tmp_path / "first"), folder_with(tmp_path / "second", seed=1)
    _, engine = engines(first)
    reference, _ = engines(second)
    probe = [7, 8, 9, 10, 11]
    right = WeightRef(version=3, path=str(second), digest="", probe_ids=probe, probe_logprob=reference.score(probe))
    wrong_probe = replace(right, probe_logprob=right.probe_logprob - 1)
    before = run(engine, various(1, 4))
    with pytest.raises(EngineError, match=r"version 3 .*logprob .*tolerance 0\.001, float32"):
        engine.load_weights(wrong_probe)
    assert engine.version == 0 and run(engine, various(1, 4)) == before
    engine.load_weights(right)
    assert engine.version == 3
    asked = various(1, 4)
    for expected, found in zip(run(reference, asked), run(engine, asked), strict=True):
        assert_equal(expected, found)
        assert set(found.versions) == {3}


def test_refuses_weights_that_are_not_this_models(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model")
    _, engine = engines(path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied
    broken = tmp_path / "broken"
    broken.mkdir()
    norm = "model.norm.weight"
    before = run(engine, various(1, 4))
    for change, words in [
        ({norm: None}, rf"match the served model.s: 1 missing \({norm}\)"),
        ({"extra": torch.zeros(1)}, r"1 unknown \(extra\)"),
        ({norm: torch.zeros(3)}, f"1 of another shape \\({norm} \\[3\\] \\(expected \\[32\\]\\)"),
    ]:
        kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(kept, broken / "model.safetensors")
        with pytest.raises(EngineError, match=words):
            engine.load_weights(WeightRef(version=1, path=str(broken), digest=""))
    whole = (path / "model.safetensors").read_bytes()
    for length in (1000, len(whole) - 1):
        (broken / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(EngineError, match=str(broken)):
            engine.load_weights(WeightRef(version=1, path=str(broken), digest=""))
    save_file(tensors, broken / "model.safetensors", metadata={DIGEST_KEY: "0a"})
    with pytest.raises(EngineError, match="written with the digest 0a, and the update names 0b"):
        engine.load_weights(WeightRef(version=1, path=str(broken), digest="0b"))
    for folder in (tmp_path, tmp_path / "nope"):
        with pytest.raises(EngineError, match=r"no \*\.safetensors"):
            engine.load_weights(WeightRef(version=1, path=str(folder), digest=""))
    assert engine.version == 0 and run(engine, various(1, 4)) == before
    engine.load_weights(WeightRef(version=2, path=str(path), digest=""))


def test_bfloat16(tmp_path: Path) -> None:
    path = folder_with(tmp_path, scale=0.1)
    tokenizer = load_tokenizer(str(path))
    reference = ReferenceEngine(load_model(str(path), "bfloat16", CPU), tokenizer)
    engine = build_engine(load_model(str(path), "bfloat16", CPU), tokenizer)
    [completion] = run(engine, [([7, 8, 9], SamplingParams(max_new_tokens=20, stop_token_ids=()))])
    ids = [7, 8, 9]
    for token, logprob in zip(completion.output_ids, completion.logprobs, strict=True):
        ids.append(token)
        assert logprob == pytest.approx(reference.score(ids), abs=0.1)
