"""Checksums of weights as SGLang computes them, and its command line; tests/engines has the server itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clew.config_fields import Inference
from clew.errors import ConfigError, EngineError
from clew.inference.sglang import differences, server_arguments
from clew.inference.sglang_checksums import RunningChecksums, checksums, parts_of, read_folder
from clew.models.tensor_digest import as_array


def theirs(*tensors: torch.Tensor, padding: int = 0) -> str:
    """SGLang's checksum of the tensors, joined and padded with rows of zeros."""
    joined = torch.cat([*tensors, torch.zeros(padding, *tensors[0].shape[1:], dtype=tensors[0].dtype)])
    return hashlib.sha256(bytes(joined.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()[:16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_joined_padded_and_cast_tensors(tmp_path: Path, dtype: torch.dtype, served: torch.dtype) -> None:
    shapes = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}
    torch.manual_seed(0)
    layer = {f"model.layers.0.self_attn.{name}.weight": torch.randn(rows, 6) for name, rows in shapes.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in {**layer, "lm_head.weight": torch.randn(70, 6)}.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    values = [tensor.to(served) for tensor in tensors.values()]
    held = {
        "model.layers.0.self_attn.qkv_proj.weight": theirs(*values[:3]),
        "model.layers.0.self_attn.o_proj.weight": theirs(values[3]),
        "lm_head.weight": theirs(values[4], padding=58),
    }
    number = "F32" if served == torch.float32 else "BF16"
    sent = read_folder(str(tmp_path))
    plain = {name: [each] for name, each in held.items()}
    plain["lm_head.weight"].insert(0, theirs(values[4]))
    assert checksums(held, sent, number) == plain
    if served == dtype:
        sums = RunningChecksums()
        for name, tensor in tensors.items():
            sums.add(name, tensor.shape, as_array(tensor))
        assert sums.by_name() == plain, "the same of tensors that come one after another"
    tensors["model.layers.0.self_attn.k_proj.weight"][1, 1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    found = checksums(held, sent, number)
    assert [name for name in held if held[name] not in found[name]] == ["model.layers.0.self_attn.qkv_proj.weight"]
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in checksums(held, read_folder(str(tmp_path)), number)


def test_a_tensor_that_the_model_itself_joins(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensor = torch.arange(24.0).view(8, 3)
    save_file({name: tensor}, tmp_path / "model.safetensors")
    assert checksums([name], read_folder(str(tmp_path)), "F32") == {name: [theirs(tensor)]}


def test_parts_of_a_joined_tensor() -> None:
    assert parts_of("model.layers.3.mlp.gate_up_proj.weight") == [
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    assert parts_of("model.norm.weight") == ["model.norm.weight"]


def test_files_that_are_cut_off_or_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no safetensors file"):
        read_folder(str(tmp_path))
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(30)}, path)
    whole = path.read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(EngineError, match=r"model\.safetensors"):
            read_folder(str(tmp_path))


def test_models_with_other_tensors() -> None:
    one = {"a": [3], "b": [3]}
    assert differences(one, one) == []
    assert differences(one, {"a": [4], "c": [3], "lm_head.weight": [3]}) == ["b", "c", "a"]
    assert differences({}, one) == [], "the server's model is not known"


def test_the_command_line() -> None:
    known = {"--port", "--context-length", "--enable-multimodal", "--device", "--warmups", "--override", "--api-key"}
    args = {"context_length": 64, "--enable-multimodal": True, "warmups": ["a", "b"], "override": {"x": 1}}
    chosen = Inference(args=args).options
    line = "--port 1 --device cpu --context-length 64 --enable-multimodal --warmups a b --override"
    assert server_arguments({"port": 1}, {"device": "cpu"}, chosen, known) == [*line.split(), '{"x": 1}']
    assert server_arguments({}, {"device": "cpu"}, {"device": None, "enable-multimodal": False}, known) == []
    for wrong in ({"contxt-length": 64}, {"port": 2}, {"api-key": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            server_arguments({"port": 1}, {}, wrong, known)


def test_files_that_are_not_in_the_index_are_not_the_models(tmp_path: Path) -> None:
    """The hub's folders of Mistral hold the weights twice."""
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.0.wq": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert read_folder(str(tmp_path)).keys() == {"norm.weight", "layers.0.wq"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"norm.weight": "model-00001-of-00001.safetensors"}}')
    assert read_folder(str(tmp_path)).keys() == {"norm.weight"}
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(EngineError, match=r"Cannot read the weights in .*model-00001-of-00001"):
        read_folder(str(tmp_path))
    index.write_text("[]")
    with pytest.raises(EngineError, match=r"Cannot read the list of weights in .*index\.json"):
        read_folder(str(tmp_path))
