"""A batch as one .pt file of plain tensors, padded on the right to [B, T], as AReaL passes it from rollout to training.

Files are read with `weights_only=True`: a file with a pickled object is refused, and nothing in it is executed.
docs/record.md, "A batch as a .pt file", describes the fields.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clew.errors import RecordError
from clew.record import rows
from clew.record.files import write_bytes
from clew.record.inbox import group_name
from clew.record.rows import Sequence
from clew.record.writer import UNTRAINED, complete

NEEDED = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")
"""Tensors of AReaL's batch: all [B, T], except rewards, [B]."""
TEXTS = ("id", "group_id", "episode_id", "finish_reason", "error")
"""Fields that are lists of B strings (error: strings or None)."""
JSON = {"rewards_by_name": "rewards", "data": "data", "interactions": "interactions", "images": "images"}
"""Fields that are lists of B JSON texts, and the record's column for each."""
REPORTED = (*rows.MASKS, "sampled_by")
"""Fields that are lists of B JSON texts, named like the record's columns; a field is missing if no row has a value."""
STAGE = "stages."
ALWAYS_ELEMENTS = 2**24
"""Total number of elements that the tensors of any file may have. A file of more bytes may have one per byte."""


def save_padded(
    path: Path, sequences: SequenceABC[Sequence], stages: Mapping[str, SequenceABC[np.ndarray]] | None = None
) -> None:
    """Write a batch, atomically. `load_padded` returns exactly these sequences.

    Args:
        stages: Arrays that were computed from the batch, by name: one per sequence, aligned with its tokens.
    """
    content: dict[str, Any] = {"clew_format": rows.FORMAT, **padded(sequences)}
    real_BT = content["attention_mask"].numpy()
    for name in rows.TIMES:
        values = [getattr(row, name) for row in sequences]
        dtype = torch.int32 if name == "admitted_version" else torch.float64
        content[name] = torch.tensor([float("nan") if value is None else value for value in values], dtype=dtype)
    for name in TEXTS:
        content[name] = [getattr(row, name) for row in sequences]
    for name, column in JSON.items():
        content[name] = [rows.ENCODER.encode(getattr(row, column)) for row in sequences]
    for name in REPORTED:
        if any(getattr(row, name) is not None for row in sequences):
            content[name] = [json.dumps(getattr(row, name), default=np.ndarray.tolist) for row in sequences]
    content["stages"] = {name: _pad(real_BT, values, np.float32) for name, values in (stages or {}).items()}
    file = io.BytesIO()
    torch.save(content, file)
    write_bytes(path, file.getbuffer())


def padded(sequences: SequenceABC[Sequence]) -> dict[str, Tensor]:
    """Return a batch as tensors [B, T], padded on the right.

    They are input_ids (int64), attention_mask, loss_mask (bool), logprobs, temperatures (float32), versions and
    turn_ids (int32); and rewards, [B] (float64).
    """
    lengths = np.array([len(row.input_ids) for row in sequences], np.int64)
    real_BT = np.arange(lengths.max(initial=0)) < lengths[:, None]
    content = {"attention_mask": torch.from_numpy(real_BT)}
    for name, dtype in rows.ALIGNED.items():
        content[name] = _pad(real_BT, [getattr(row, name) for row in sequences], dtype, UNTRAINED.get(name, 0))
    content["input_ids"] = content["input_ids"].long()  # as embeddings and gather want them
    content["rewards"] = torch.tensor([row.reward for row in sequences], dtype=torch.float64)
    return content


def _pad(real_BT: np.ndarray, values: Iterable[np.ndarray], dtype: type, fill: float = 0) -> Tensor:
    padded_BT = np.full(real_BT.shape, fill, dtype)
    padded_BT[real_BT] = np.concatenate([np.empty(0, dtype), *values])
    return torch.from_numpy(padded_BT)


def load_padded(path: Path, *, group_size: int | None = None, first_group: int = 0) -> list[Sequence]:
    """Read a file that `save_padded` or AReaL wrote.

    Args:
        group_size: Number of consecutive rows per group if the file names no groups; None: all rows are one group.
        first_group: Number of the first such group.

    Raises:
        RecordError: The file cannot be read, is newer than this version of Clew, has a pickled object, or wrong shapes.
    """
    content = _read(path)
    count = len(content["attention_mask"])
    if "group_id" not in content:
        size = group_size or max(count, 1)
        if count % size:
            raise RecordError(f"{path} has {count} rows, which is not a multiple of the group size {size}.")
        content["group_id"] = [group_name(first_group + row // size) for row in range(count)]
    columns: dict[str, list[Any]] = {
        name: _cut(content[name], content["attention_mask"]) for name in rows.ALIGNED if name in content
    }
    columns["reward"] = content["rewards"].double().tolist()
    columns |= {name: content[name] for name in TEXTS if name in content}
    for name in rows.TIMES:
        if name in content:
            # a consumed_at of NaN means: not consumed
            columns[name] = [None if value != value else value for value in content[name].tolist()]
    try:
        texts = {**JSON, **{name: name for name in REPORTED}}
        columns |= {column: list(map(json.loads, content[name])) for name, column in texts.items() if name in content}
    except ValueError as error:
        raise RecordError(f"{path}: one of {', '.join((*JSON, *REPORTED))} is not JSON ({error}).") from None
    try:
        return complete(({name: values[row] for name, values in columns.items()} for row in range(count)), version=0)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def load_stages(path: Path) -> dict[str, list[np.ndarray]]:
    """Return the stages in a file of `save_padded`; AReaL's files have none. Raises as `load_padded` does."""
    content = _read(path)
    stages = {name.removeprefix(STAGE): values for name, values in content.items() if str(name).startswith(STAGE)}
    return {name: _cut(values, content["attention_mask"]) for name, values in stages.items()}


def _cut(values_BT: Tensor, attention_mask_BT: Tensor) -> list[np.ndarray]:
    """Return each row's values without those of padding; a prompt may also be padded on the left."""
    values_BT = values_BT.detach().float() if values_BT.is_floating_point() else values_BT
    return [values[mask].numpy() for values, mask in zip(values_BT, attention_mask_BT.bool(), strict=True)]


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a .pt file, after checking that the tensors in `NEEDED` are there, and their shapes.

    Its stages are beside the other fields, with `STAGE` before their names.
    """
    content = _load(path)
    if not isinstance(content, dict):
        raise RecordError(f"{path} holds a {type(content).__name__}; expected a dictionary of tensors by name.")
    rows.check_format(path, content.get("clew_format", 0))
    if missing := [name for name in NEEDED if name not in content]:
        raise RecordError(
            f"{path} has no {', '.join(missing)}; it holds {', '.join(map(str, content))}. Expected the padded batch "
            f"of docs/record.md: {', '.join(NEEDED)}."
        )
    stages = content.pop("stages", {})
    if not isinstance(stages, dict):
        raise RecordError(f"{path}: stages is {_describe(stages)}; expected a dictionary of tensors.")
    content |= {f"{STAGE}{name}": values for name, values in stages.items()}
    _check_size(path, content)
    _check_shapes(path, content)
    return content


def _load(path: Path) -> Any:
    """Return what torch.load reads, without running any code. Raises RecordError if it cannot be read."""
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_packed(path)
        # Memory-mapped: nothing is read or allocated before the sizes are checked.
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=zipped)
        if isinstance(content, dict) and "clew_format" in content:  # torch.load does not verify checksums
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise RecordError(
                        f"{path} was altered after it was written: a checksum differs. Export it once more."
                    )
        return content
    except RecordError:
        raise
    except FileNotFoundError:
        raise RecordError(f"{path} is missing.") from None
    except Exception as error:  # unpickling a damaged file may raise anything
        if pickled := re.search(r"GLOBAL (\S+)", str(error)):
            raise RecordError(
                f"{path} holds a pickled object ({pickled[1]}), which could run any code; none of it was executed. "
                f"Expected tensors, lists and text only: convert it where you trust it, with "
                f"torch.save({{name: torch.as_tensor(...)}}, path)."
            ) from None
        raise RecordError(
            f"{path} cannot be read as a .pt file ({type(error).__name__} in torch.load); it has "
            f"{path.stat().st_size} bytes. It was truncated or altered, or is of another form."
        ) from None


def _check_packed(path: Path) -> None:
    """Raise RecordError for an archive that torch did not write: a few compressed MB may unpack to many GB."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    unpacked, size = sum(member.file_size for member in members), path.stat().st_size
    if unpacked > size or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise RecordError(
            f"Cannot read {path}: its {size} bytes unpack to {unpacked}, and torch.save never compresses. "
            f"Write it again with torch.save."
        )


def _check_size(path: Path, content: dict[str, Any]) -> None:
    """Raise RecordError for tensors that are much larger than the file, such as expanded views of a single number."""
    size, elements = path.stat().st_size, 0
    for name, value in content.items():
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
                raise RecordError(f"Cannot read {path}: {name} is not a dense tensor of numbers. Save it as one.")
            elements += value.numel()
            if elements > max(ALWAYS_ELEMENTS, size):
                raise RecordError(
                    f"Cannot read {path}: with {name}, {list(value.shape)}, its tensors have {elements} elements, and "
                    f"the file has {size} bytes. Some are expanded views of fewer: save them with .contiguous()."
                )
        elif isinstance(value, list):
            elements += sum(len(each) for each in value if isinstance(each, str))
            if elements > max(16 * ALWAYS_ELEMENTS, 16 * size):
                raise RecordError(f"Cannot read {path}: the texts of {name} are longer than the whole file.")


def _check_shapes(path: Path, content: dict[str, Any]) -> None:
    shape = list(content["attention_mask"].shape) if isinstance(content["attention_mask"], Tensor) else []
    if len(shape) != 2:
        raise RecordError(f"{path}: attention_mask is {_describe(content['attention_mask'])}; expected [B, T].")
    for name, value in content.items():
        if name in rows.ALIGNED or str(name).startswith(STAGE):
            expected = shape
        elif name == "rewards" or name in rows.TIMES:
            expected = shape[:1]
        else:
            continue
        if not isinstance(value, Tensor) or list(value.shape) != expected:
            raise RecordError(f"{path}: {name} is {_describe(value)}; expected a tensor {expected}.")
    for name in (*TEXTS, *JSON, *REPORTED):
        if name in content and (not isinstance(content[name], list) or len(content[name]) != shape[0]):
            raise RecordError(f"{path}: {name} is {_describe(content[name])}; expected a list of {shape[0]} texts.")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
