"""Adapters: the base stays, readers of weights never notice, and peft, transformers and a resumed run read them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from clew.errors import ModelError, RecordError
from clew.inference.embedded import build_engine
from clew.models.loading import load_model
from clew.models.tensor_digest import hex_digests
from clew.record.weights import read_digests
from clew.training import checkpoint
from clew.training.engine import TrainEngine
from clew.training.published_weights import write_weights
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config, make_sequence, score

CPU = torch.device("cpu")
LORA = {"lora_rank": 4, "lora_alpha": 12.0}
IDS = torch.randint(6, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def engine_of(folder: Path, family: str = "qwen2", dtype: str = "float32", **sections: Any) -> TrainEngine:
    if not folder.exists():
        tiny_tokenizer(folder)
        tiny_model(folder, family, scale=0.2)
    sections["training"] = LORA | sections.get("training", {})
    return TrainEngine(make_config(folder, dtype=dtype, **sections))


def train(engine: TrainEngine, *seeds: int) -> list[dict[str, Any]]:
    return [engine.train_step(make_batch(seed=seed)).digests for seed in seeds]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "gemma3"])
def test_the_adapters_alone_are_trained_and_everybody_reads_the_same_model(tmp_path: Path, family: str):
    engine = engine_of(tmp_path / "model", family)
    base = load_model(str(tmp_path / "model"), "float32", CPU)
    torch.testing.assert_close(logits(engine.policy.model), logits(base), atol=1e-4, rtol=0)  # another attention kernel
    train(engine, 0, 1, 2)
    trained = [name for name, _ in engine.trained_parameters()]
    assert trained and all(".lora_" in name for name in trained)
    for name, parameter in engine.policy.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base.get_parameter(name.replace(".base_layer.", ".")))
    after = logits(engine.policy.model)
    assert (after - logits(base)).abs().max() > 1e-2

    checkpoint.save(engine, tmp_path / "step-000003")
    torch.testing.assert_close(
        logits(load_model(str(tmp_path / "step-000003"), "float32", CPU)), after, atol=1e-4, rtol=0
    )
    core = build_engine(base, engine.policy.tokenizer)
    core.load_weights(write_weights(engine, tmp_path / "version-000003", engine.version))
    (row, *_) = make_batch()
    assert core.score(row.input_ids.tolist()) == pytest.approx(float(score(engine.policy, [row])[0][-1]), abs=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_peft_reads_the_adapters(tmp_path: Path, family: str):
    engine = engine_of(tmp_path / "model", family)
    train(engine, 0, 1)
    checkpoint.save(engine, tmp_path / "step-000002")
    base = load_model(str(tmp_path / "model"), "float32", CPU)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "step-000002" / "adapter"))
    torch.testing.assert_close(logits(theirs), logits(engine.policy.model), atol=1e-4, rtol=0)
    with safe_open(tmp_path / "step-000002" / "trainer" / "state.safetensors", "pt") as state:
        assert all(".lora_" in name for name in state.keys() if name != "random.torch")  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, dtype: str):
    options: dict[str, Any] = {"algorithm": {"minibatches": 2, "kl_coef": 0.1}}
    engine = engine_of(tmp_path / "model", dtype=dtype, **options)
    train(engine, 0, 1, 2)
    checkpoint.save(engine, tmp_path / "step-000003")
    ahead = train(engine, 3, 4)
    again = engine_of(tmp_path / "model", dtype=dtype, **options)
    checkpoint.load(again, tmp_path / "step-000003")
    assert train(again, 3, 4) == ahead
    other = engine_of(tmp_path / "model", dtype=dtype, seed=7, **options)
    assert other.weights_digest() != engine_of(tmp_path / "model", dtype=dtype, **options).weights_digest()


@pytest.mark.parametrize("how", ["nudge", "truncate", "remove", "alpha"])
def test_an_altered_merged_model_or_adapter_configuration_is_found(tmp_path: Path, how: str):
    engine = engine_of(tmp_path / "model")
    folder = tmp_path / "step-000000"
    checkpoint.save(engine, folder)
    file = folder / "model.safetensors" if how != "alpha" else folder / "adapter" / "adapter_config.json"
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(content[:-100])
    elif how == "alpha":
        file.write_bytes(content.replace(b'"lora_alpha": 12', b'"lora_alpha": 99'))
    else:
        content[-50] ^= 1
        file.write_bytes(content)
    wrong = "is missing" if how == "remove" else "has the digest"
    said = f"step-000000 was altered .*: {file.relative_to(folder)} {wrong}"
    for look in (checkpoint.check, checkpoint.digests_in):
        with pytest.raises(RecordError, match=said):
            look(folder, engine)
    with pytest.raises(RecordError, match=said):
        checkpoint.load(engine, folder)


def test_the_model_before_the_first_step_is_the_base_bit_for_bit(tmp_path: Path):
    engine = engine_of(tmp_path / "model")
    checkpoint.save(engine, tmp_path / "step-000000")
    one, two = (load_model(str(tmp_path / name), "float32", CPU) for name in ("model", "step-000000"))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter.view(torch.int32), two.get_parameter(name).view(torch.int32))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_in_bfloat16_the_probe_is_of_the_rounded_weights(tmp_path: Path, family: str):
    engine = engine_of(tmp_path / "model", family, dtype="bfloat16")
    train(engine, *range(6))
    base = load_model(str(tmp_path / "model"), "bfloat16", CPU)
    core = build_engine(base, engine.policy.tokenizer)
    ref = write_weights(engine, tmp_path / "version-000006", engine.version)
    core.load_weights(ref)
    assert core.score(ref.probe_ids) == pytest.approx(ref.probe_logprob, abs=0.02)  # as close as two kernels are
    exact = float(score(engine.policy, [with_ids(ref.probe_ids)])[0][-1])
    assert exact != ref.probe_logprob  # the trainer's own, whose adapters are not rounded into the weights


def with_ids(ids: list[int]) -> Any:
    row = make_sequence("g0.e0.s0", prompt=len(ids) - 1, response=1)
    return dataclasses.replace(row, input_ids=np.array(ids, np.int32))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_travel_alone_to_an_engine_that_adds_them_itself(tmp_path: Path):
    engine = engine_of(tmp_path / "model", inference={"backend": "vllm"})
    train(engine, 0, 1)
    ref = write_weights(engine, tmp_path / "version", 2)
    assert ref.holds_adapters() and not (tmp_path / "version" / "model.safetensors").exists()
    base = load_model(str(tmp_path / "model"), "float32", CPU)
    theirs = PeftModel.from_pretrained(base, ref.path)
    torch.testing.assert_close(logits(theirs), logits(engine.policy.model), atol=1e-4, rtol=0)
    assert ref.probe_logprob == pytest.approx(float(theirs_logprob(theirs, ref.probe_ids)), abs=1e-4)
    with safe_open(tmp_path / "version" / "adapter_model.safetensors", "pt") as file:
        sent = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert read_digests(ref) == hex_digests(sent)
    assert theirs.peft_config["default"].to_dict()["lora_alpha"] == LORA["lora_rank"], "B is scaled already"
    for backend, args in (("vllm", {"enable-lora": False}), ("vllm", {"tensor-parallel-size": 2}), ("sglang", {})):
        merged = engine_of(tmp_path / "model", inference={"backend": backend, "args": args})
        assert not write_weights(merged, tmp_path / "merged", 2).holds_adapters()


@torch.no_grad()
def theirs_logprob(model: Any, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -2], -1)[ids[-1]]


def test_the_reference_is_the_base(tmp_path: Path):
    engine = engine_of(tmp_path / "model", algorithm={"kl_coef": 0.05})
    plain = TrainEngine(make_config(tmp_path / "model"))
    train(engine, 0, 1, 2)
    batch = make_batch(seed=3)
    result = engine.train_step(batch)
    for found, expected in zip(result.stages["reference_logprobs"], score(plain.policy, batch), strict=True):
        assert np.array_equal(found, expected)
    assert result.metrics["kl"] > 1e-4


def test_what_does_not_fit_is_named(tmp_path: Path):
    engine = engine_of(tmp_path / "model")
    train(engine, 0)
    folder = tmp_path / "step-000001"
    checkpoint.save(engine, folder)
    with pytest.raises(ModelError, match=r"was trained with training.lora_rank=4, this run has 2"):
        checkpoint.load(engine_of(tmp_path / "model", training={"lora_rank": 2}), folder)
    with pytest.raises(ModelError, match=r"was trained with training.lora_rank=4, this run has null"):
        checkpoint.load(TrainEngine(make_config(tmp_path / "model")), folder)
    tiny_tokenizer(tmp_path / "other")
    tiny_model(tmp_path / "other", seed=9)
    with pytest.raises(
        ModelError, match=r"other \(model.path\) is not the model that the adapters in .* were trained on"
    ):
        checkpoint.load(engine_of(tmp_path / "other"), folder)
    file = folder / "adapter" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)
    with pytest.raises(RecordError, match=r"step-000001 was altered .*lora_.*\(weights\) has the digest"):
        checkpoint.load(engine, folder)
    with pytest.raises(ModelError, match="peft cannot add adapters to MambaForCausalLM"):
        engine_of(tmp_path / "mamba", "mamba")
