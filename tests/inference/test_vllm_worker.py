"""Loaders of the kinds that vLLM has, on plain tensors: each element that they put somewhere is found there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clew.inference.vllm import VLLMEngine, differences
from clew.inference.vllm_worker import Extension
from clew.models.tensor_digest import hex_digests

QKV = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}


class Fused(nn.Module):
    """Rank `rank` of `size` of a layer as vLLM holds it: q, k, v in one matrix, o by its columns, one norm each."""

    def __init__(self, rank: int = 0, size: int = 1, forget: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.size, self.forget = rank, size, forget
        self.qkv = nn.Parameter(torch.zeros(16 // size, 8, dtype=dtype), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(8, 8 // size, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == self.forget:
                continue
            if name in QKV:
                start, rows = QKV[name]
                rows //= self.size
                self.qkv.data.narrow(0, start // self.size, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "o":
                columns = 8 // self.size
                self.o.data.copy_(tensor[:, self.rank * columns : (self.rank + 1) * columns])
            else:
                self.norm.data.copy_(tensor)


class Runner:
    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = model
        self.model_config = SimpleNamespace(dtype=dtype)

    def reset_lora_state(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


def loaded(model: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, list[Any]]:
    worker: Any = Extension()
    worker.model_runner = Runner(model, dtype)
    worker.clew_load(str(folder))
    return worker.clew_held()


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with the tensors, and the trainer's digest of each."""
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "norm": (8,)}
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, hex_digests(tensors)


@pytest.mark.parametrize("size", [1, 2])
def test_fused_split_and_replicated_tensors_are_found(published: tuple[Path, dict[str, str]], size: int) -> None:
    folder, digests = published
    answers = [loaded(Fused(rank, size), folder) for rank in range(size)]
    assert differences(digests, answers) == []
    assert sum(answer["norm"][1] for answer in answers) == 8 * size, "every rank holds the norm"


class Sorted(Fused):
    """Rows of k and q that lie in another order than in the file, as in BLOOM; o is copied before it is split."""

    def load_weights(self, weights: Any) -> None:
        rows = {"q": (4, 2), "k": (2, 2)}
        for name, tensor in weights:
            by_head = tensor.view(*rows[name], 8).transpose(0, 1).reshape(tensor.shape) if name in rows else tensor
            by_head = tensor.t().contiguous().t() if name == "o" else by_head
            super().load_weights([(name, by_head)])


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_the_loader_sorts_are_found(published: tuple[Path, dict[str, str]], size: int) -> None:
    folder, digests = published
    assert differences(digests, [loaded(Sorted(rank, size), folder) for rank in range(size)]) == []


def test_rows_that_the_engine_holds_in_another_order_are_named(published: tuple[Path, dict[str, str]]) -> None:
    folder, digests = published
    worker: Any = Extension()
    worker.model_runner = Runner(model := Sorted())
    worker.clew_load(str(folder))
    model.qkv.data[[0, 1]] = model.qkv.data[[1, 0]]
    assert differences(digests, [worker.clew_held()]) == ["q: holds other values"]


def test_a_tensor_that_the_loader_forgot_is_named(published: tuple[Path, dict[str, str]]) -> None:
    folder, digests = published
    assert differences(digests, [loaded(Fused(forget="k"), folder)]) == [
        "k: 0 of 32 elements are held where the engine computes from"
    ]


def test_a_tensor_that_the_engine_does_not_read_may_stay_as_it_was(
    published: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, digests = published
    tensors = load_file(folder / "model.safetensors") | {"spare": torch.ones(8).bfloat16()}
    save_file(tensors, folder / "model.safetensors")
    digests = hex_digests(tensors)
    assert loaded(Fused(forget="norm"), folder)["spare"], "it could be the norm, which nothing has written"
    workers = [loaded(Fused(forget="spare"), folder)]
    engine = VLLMEngine("127.0.0.1:1")
    for version in range(3):
        engine._sent = {**digests, "q": f"{version:016x}"}
        assert engine._left_out(workers) == ["spare"]
    assert caplog.text.count("vLLM at 127.0.0.1:1 does not read 1 tensor of the model: spare.") == 1
    assert engine._left_out([{}]) == [], "an update that did nothing is none"
    assert differences(digests, workers) == ["spare: not loaded"], "unless it is left out"
    engine._sent = {**digests, "unheard": f"{1:016x}"}
    engine._first_sent["unheard"] = engine._sent["unheard"]
    assert engine._left_out(workers) == ["spare"], "the worker has not read the other one at all"
    engine._sent = {**digests, "spare": f"{1:016x}"}
    assert engine._left_out(workers) == [], "the trainer has changed it"


def test_another_file_than_the_trainer_wrote_is_named(published: tuple[Path, dict[str, str]]) -> None:
    folder, digests = published
    assert differences({**digests, "o": f"{1:016x}"}, [loaded(Fused(), folder)]) == ["o: holds other values"]


def test_a_tensor_that_no_worker_has_heard_of_is_named(published: tuple[Path, dict[str, str]]) -> None:
    folder, digests = published
    assert differences({**digests, "lm_head": f"{1:016x}"}, [loaded(Fused(), folder)]) == ["lm_head: not loaded"]


def test_weights_that_were_packed_into_a_copy_do_not_count(published: tuple[Path, dict[str, str]]) -> None:
    class Packed(Fused):
        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            self.o = nn.Parameter(torch.empty(0), requires_grad=False)

    folder, digests = published
    assert differences(digests, [loaded(Packed(), folder)]) == [
        "o: 0 of 64 elements are held where the engine computes from"
    ]


def test_tensors_that_the_engine_has_cast_are_named(published: tuple[Path, dict[str, str]]) -> None:
    folder, digests = published
    found = differences(digests, [loaded(Fused(dtype=torch.float32), folder, torch.float32)])
    assert len(found) == 5 and "norm: held as torch.float32, which is not how it was written" in found


class Widened(Fused):
    """The norm in float32, cast while it is copied, or in a tensor of its own before that."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.norm, self.before = nn.Parameter(torch.zeros(8), requires_grad=False), before

    def load_weights(self, weights: Any) -> None:
        before = [(name, each.float() if self.before and name == "norm" else each) for name, each in weights]
        super().load_weights(before)


@pytest.mark.parametrize("before", [False, True])
def test_tensors_that_a_bfloat16_model_keeps_in_float32_are_compared(
    published: tuple[Path, dict[str, str]], before: bool
) -> None:
    folder, digests = published
    assert differences(digests, [loaded(Widened(before), folder)]) == []
    wrong = differences({**digests, "norm": f"{1:016x}"}, [loaded(Widened(before), folder)])
    assert wrong == ["norm: holds other values"]


def test_weights_that_sleep_of_level_2_has_discarded_are_named_until_they_are_loaded_again(
    published: tuple[Path, dict[str, str]],
) -> None:
    folder, digests = published
    worker: Any = Extension()
    model = Fused()
    worker.model_runner = Runner(model)
    worker.clew_load(str(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # waking gives the same addresses, and nothing of what was there
    assert differences(digests, [worker.clew_held()]) == [f"{name}: holds other values" for name in digests]
    worker.clew_load(str(folder))
    assert differences(digests, [worker.clew_held()]) == []
