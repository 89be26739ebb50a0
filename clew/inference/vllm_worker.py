"""Clew's part inside vLLM's workers (--worker-extension-cls): loads weights, and says what the engine then holds.

vLLM's Python loads this file, and Clew's dependencies may be missing there. So it imports only torch, NumPy and
safetensors.

vLLM can answer 200 to an update that went wrong: half of a fused tensor may not be loaded, or a kernel may compute from
a packed copy of its own. So while vLLM's own loaders run (`clew_load`, `clew_receive`), `CopyTrace` notes where each
element is copied, whatever they do with it (fused projections, tensor parallelism, experts). `clew_held` then reads the
weights back from there and returns their digests, which Clew compares with the trainer's. `clew_adapters` does so for
adapters.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clew.inference.weight_group import joined, receive_buckets
from clew.models.tensor_digest import Layout, digest_scattered, digest_tensor
from clew.processes import die_with_parent
from clew.record.weight_broadcast import Broadcast


def compute_from_weights() -> None:
    """Have vLLM's CPU build compute from the weights themselves.

    By default it packs each linear layer into a copy and leaves `weight` empty: weights could not be loaded in place
    any more, and a tied lm_head would keep the packed copy of its first weights.
    """
    if import_module("vllm.platforms").current_platform.is_cpu():
        vars(import_module("vllm._custom_ops"))["_supports_onednn"] = False
        vars(import_module("vllm.model_executor.layers.utils"))["check_cpu_sgl_kernel"] = lambda *_: False


if "vllm" in sys.modules:  # a worker imports this file before it builds its model
    die_with_parent(os.getppid())  # otherwise it would live on when vLLM's server dies
    compute_from_weights()


class Copied(NamedTuple):
    """A piece of a tensor in the file, and where the engine holds it."""

    offset: int
    """Flat position of the piece's first element in the tensor."""
    strides: tuple[int, ...]
    """Steps from one element of the piece to the next, in the tensor, by dimension."""
    held: Tensor
    """View of the engine's memory, in the piece's shape."""
    rearranged: tuple[Layout, ...] = ()
    """Contiguous copies of views between the tensor and the piece, which is then a piece of the last of them. BLOOM's
    loader sorts the rows of query_key_value so, for example."""


Copies = dict[str, tuple[Tensor, list[Copied]]]
"""Tensors on the meta device (shape and type alone), with the places where the engine holds them, by name."""


KEEPING = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
"""Operations that return their input's numbers in a tensor of its own: on another device, or in another order."""


class CopyTrace(TorchDispatchMode):
    """Notes which piece of which tensor is copied where, while vLLM's loaders run.

    Loaders copy views of the tensors in the file. A view's address shows of which tensor it is, and of which piece.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, list[Copied]] = {}
        self._addresses: list[int] = []
        self._watched: list[tuple[str, Tensor, tuple[Layout, ...]]] = []
        """Tensors that are followed, in the order of their `_addresses`: name, tensor, how it was rearranged."""

    def watch(self, name: str, source: Tensor, rearranged: tuple[Layout, ...] = ()) -> None:
        """Follow a contiguous tensor, which has just been read. It is kept alive, so that no other gets its address."""
        place = bisect_right(self._addresses, source.data_ptr())
        self._addresses.insert(place, source.data_ptr())
        self._watched.insert(place, (name, source, rearranged))
        self.copies.setdefault(name, [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        elif (
            func in KEEPING
            and result.is_contiguous()
            and torch.promote_types(result.dtype, args[0].dtype) == result.dtype
        ):
            self._follow(args[0], result)
        return result

    def _find(self, view: Tensor) -> tuple[str, int, tuple[Layout, ...]] | None:
        """Return the name of the tensor that this is a view of, where it begins there, and how that was rearranged."""
        place = bisect_right(self._addresses, view.data_ptr()) - 1
        if place < 0:
            return None
        name, whole, rearranged = self._watched[place]
        offset = (view.data_ptr() - whole.data_ptr()) // whole.element_size()
        return (name, offset, rearranged) if offset < whole.numel() and view.dtype == whole.dtype else None

    def _note(self, held: Tensor, source: Tensor) -> None:
        if (found := self._find(source)) is not None:
            name, offset, rearranged = found
            strides = source.expand(held.shape).stride()
            self.copies[name].append(Copied(offset, strides, held.detach(), rearranged))

    def _follow(self, source: Tensor, copy: Tensor) -> None:
        """Follow a copy of a view, which the loader has made on the way to the parameter."""
        if (found := self._find(source)) is not None:
            name, offset, rearranged = found
            same = offset == 0 and source.is_contiguous()
            more = () if same else (Layout(offset, tuple(source.shape), source.stride()),)
            self.watch(name, copy, (*rearranged, *more))


def read_folder(folder: str) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each of a folder's *.safetensors by name, contiguous."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            yield {name: opened.get_tensor(name).contiguous() for name in opened.keys()}  # noqa: SIM118


def load_traced(model: Any, tensors: dict[str, Tensor]) -> Copies:
    """Load tensors into vLLM's model. Return each on the meta device, with its places in the engine, by name."""
    trace = CopyTrace()
    for name, tensor in tensors.items():
        trace.watch(name, tensor)
    with trace:
        model.load_weights(iter(tensors.items()))
    return {name: (tensors[name].to("meta"), copies) for name, copies in trace.copies.items()}


def packed_weights(model: Any) -> list[tuple[Tensor, str]]:
    """Return the weights of experts that vLLM's CPU kernels read in their own layout, each with the layout's name."""
    found: list[tuple[Tensor, str]] = []
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        layout = getattr(getattr(kernel, "fused_experts", None), "isa", None)
        if layout is not None:
            found += [(module.w13_weight, layout), (module.w2_weight, layout)]
    return found


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def unwritten(model: Any, copies: Copies) -> list[tuple[torch.Size, int]]:
    """Return each parameter's shape, and how many of its elements the copies have not written."""
    held = [piece.held for _, pieces in copies.values() for piece in pieces]
    views = {(view.data_ptr(), view.shape, view.stride()): view for view in held}
    written = Counter[int]()
    for view in views.values():
        written[storage_of(view)] += view.numel()
    return [(each.shape, each.numel() - written[storage_of(each)]) for each in model.parameters()]


class Extension:
    """Methods that `/collective_rpc` can call on each of vLLM's workers, which have the first two attributes.

    What one call leaves for the next is kept in this class, as a process has one worker.
    """

    model_runner: Any
    rank: int

    holds_base = True
    """False once an update has replaced the weights that the server began with."""

    copies: ClassVar[Copies] = {}
    """Tensors of the last update."""

    before_packing: ClassVar[dict[str, list[Any]]] = {}
    """Answers that `clew_held` gave about weights before they were packed: packed bytes cannot be compared."""

    def clew_adapters(self, folder: str) -> dict[str, list[Any]]:
        """Return, like `clew_held`, what the engine holds of a folder's adapters in the memory that it computes from.

        Nothing counts as held if they were not loaded, or if the server does not hold the weights that it began with.
        """
        manager: Any = self.model_runner.lora_manager._adapter_manager
        parse: Any = vars(import_module("vllm.lora.utils"))["parse_fine_tuned_lora_name"]
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        places: dict[str, tuple[Any, int]] = {}  # layer with a module's adapter, and the adapter's number there
        for name, layer in manager.modules.items():  # q_proj, k_proj and v_proj share a layer, with an adapter each
            for number, part in enumerate(manager.packed_modules.get(name, [name])):
                places[part] = layer, number
        newest = max((id, slot) for slot, id in enumerate([*manager.lora_index_to_id, -1]) if id is not None)
        """Number and slot of the adapter that was loaded last. An attached server may hold others, too."""
        result: dict[str, list[Any]] = {}
        for tensors in read_folder(folder):
            for name, written in tensors.items():
                part, is_a = parse(name, mapper and mapper.get_rename_mapper())
                result[name] = ["0", 0, written.numel(), []]
                if part not in places or newest[0] < 0 or not self.holds_base:
                    continue
                layer, number = places[part]
                stacked = layer.lora_a_stacked if is_a else layer.lora_b_stacked
                rows, columns = written.shape
                held = stacked[number][newest[1], 0, :rows, :columns].contiguous()  # the rest: room for a larger rank
                cast = [str(held.dtype)] if held.dtype != written.dtype else []
                result[name] = [f"{digest_tensor(held, name=name):016x}", held.numel(), written.numel(), cast]
        return result

    def clew_load(self, folder: str) -> None:
        """Load a folder's *.safetensors in place."""
        copies: Copies = {}
        with torch.no_grad():
            for tensors in read_folder(folder):
                copies |= load_traced(self.model_runner.model, tensors)
        if copies:  # otherwise this call only asked whether Clew's extension is there
            Extension.holds_base = False
            self._loaded(copies)

    def _loaded(self, copies: Copies) -> None:
        """Finish a load, so that the engine computes from the new weights alone.

        Where it holds them is kept for `clew_held`. Experts that its CPU kernels read in a layout of their own are
        packed, and what was computed with the old weights is forgotten.
        """
        Extension.copies, Extension.before_packing = copies, {}
        if packed := packed_weights(self.model_runner.model):
            storages, held = {storage_of(weight) for weight, _ in packed}, self.clew_held()
            for name, (_, pieces) in copies.items():
                if any(storage_of(piece.held) in storages for piece in pieces):
                    self.before_packing[name] = held[name]
            pack = vars(import_module("vllm._custom_ops"))["cpu_prepack_moe_weight"]
            for weight, layout in packed:
                weight.data.copy_(pack(weight.data, layout))
        if (reset := getattr(self.model_runner, "reset_lora_state", None)) is not None:
            reset()  # an older vLLM has no such function, and nothing that it would reset
        self.model_runner.reset_encoder_cache()

    def clew_receive(self, sent: dict[str, Any]) -> None:
        """Take part in the trainer's broadcast, and load each bucket in place as it comes."""
        model = self.model_runner.model
        broadcast, copies = Broadcast(**sent), Copies()
        device = next(model.parameters()).device
        Extension.holds_base = False
        with torch.no_grad(), joined(broadcast, self.rank) as group:
            for tensors in receive_buckets(broadcast, group, device):
                copies |= load_traced(model, tensors)
        self._loaded(copies)

    def _as_written(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        """Return numbers in the type in which they were written, if the engine holds the same ones in a wider type.

        A bfloat16 model has some tensors in float32 in vLLM, such as A_log of Qwen3-Next and the router of GLM-4-MoE.
        """
        if held.dtype == dtype or self.model_runner.model_config.dtype != dtype:
            return held
        narrow = held.to(dtype)
        return narrow if torch.equal(narrow.to(held.dtype), held) else held

    def clew_held(self) -> dict[str, list[Any]]:
        """Return what the engine holds of each tensor that the last update loaded.

        Returns:
            By name: the digest of the elements held, in hexadecimal; how many elements are held, each counted as often
            as it is held; how many the tensor has; and the types that hold them, if the engine has cast any. Only
            elements that the engine still computes from count. Empty for a tensor that no part of the model has a
            place for: each parameter that it could belong to has been written with others.
        """
        model = self.model_runner.model
        alive = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        places = unwritten(model, self.copies)
        result: dict[str, list[Any]] = {}
        for name, (written, pieces) in self.copies.items():
            if name in self.before_packing:
                result[name] = self.before_packing[name]
                continue
            matrix = written.ndim > 1  # these may be fused or transposed, and so fit into another shape
            fits = ((matrix or shape[1:] == ()) and room >= written.numel() for shape, room in places)
            if not pieces and not any(fits):
                result[name] = []
                continue
            digest = count = 0
            cast: set[str] = set()
            for piece in pieces:
                if storage_of(piece.held) in alive:
                    offset, strides, rearranged = piece.offset, piece.strides, piece.rearranged
                    held = self._as_written(piece.held, written.dtype)
                    digest += digest_scattered(held, offset, strides, name=name, rearranged=rearranged)
                    count += held.numel()
                    if held.dtype != written.dtype:
                        cast.add(str(held.dtype))
            result[name] = [f"{digest % 2**64:016x}", count, written.numel(), sorted(cast)]
        return result
