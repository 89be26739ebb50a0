"""`clew.record.Writer` lets a trainer other than Clew's own write a run directory that Clew can read.

docs/record.md says how columns that the other trainer does not know are filled in. This module imports no torch, but
accepts torch's tensors.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import numpy as np

from clew.errors import RecordError
from clew.record import chain, rows
from clew.record.batch_digest import digest_batch, digest_rows
from clew.record.files import write_bytes
from clew.record.inbox import group_name
from clew.record.media import is_media_name
from clew.record.origin import IMPORTED
from clew.record.run import RunDirectory
from clew.record.steps import OF_ROWS
from clew.record.summary import EMPTY_SUMMARY

NEEDED = ("group_id", "input_ids", "loss_mask", "logprobs", "reward")
"""Columns that must be given, because there is no sensible default."""
UNTRAINED = {"loss_mask": False, "logprobs": 0, "versions": -1, "turn_ids": -1, "temperatures": 1}
"""Value of an aligned column for a token that was not generated, and for padding."""
KINDS: dict[str, type] = {
    "data": dict,
    "rewards": dict,
    "interactions": list,
    "images": list,
    "finish_reason": str,
    "sampled_by": list,
}
"""Types that readers expect of optional columns."""


class Writer:
    """Writes a run directory, one step at a time. A trainer uses it in one process. ::

        with Writer("runs/mine/0", config={"lr": 1e-6}, trainer="mine") as writer:
            ...
            writer.step(sequences, stages={"advantages": advantages}, metrics={"loss": loss})

    `reward` of a sequence is the number that was trained on, and `rewards` names its parts. They need not add up to it:
    the trainer may have weighted, clipped or rounded them.
    """

    def __init__(self, path: Path | str, config: Mapping[str, Any] | None = None, *, trainer: str = "unknown") -> None:
        """Create the run directory, or continue one that a Writer made.

        Args:
            config: The trainer's configuration; values that JSON cannot hold become text. None leaves config.yaml as
                it is.
            trainer: The name of the trainer, for run.json.

        Raises:
            RecordError: Clew itself trained here, another process writes to the directory, or its record is damaged.
        """
        self.run = RunDirectory(Path(path))
        described = self.run.run_json.exists() and self.run.facts().get("trainer") is None
        if described or self.run.newest_weights() is not None:
            raise RecordError(f"{path} is a run of Clew, not of another trainer. Choose another folder.")
        self._lock = self.run.hold("trainer")
        self._trainer = trainer
        self.next_group = 0
        try:
            self._begin(config)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, config: Mapping[str, Any] | None) -> None:
        """Check the record so far, and write what describes the run."""
        for found in chain.breaks(self.run):
            if not found.harmless:
                raise RecordError(f"Cannot go on with {self.run.path}: {found} Or choose another folder.")
        self.run.clean_after_trainer()
        # An import runs none of the user's code, so the git revision of the current folder has nothing to do with it.
        # The folder may also be a stranger's repository, and git runs programs that a repository names.
        unknown: dict[str, Any] = {"git": None} if self._trainer == IMPORTED else {}
        self.run.describe(None, trainer=self._trainer, **unknown)
        if config is not None:
            import yaml

            plain = json.loads(json.dumps(dict(config), default=str))
            write_bytes(self.run.config_path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())
        self._count_groups(self.run.steps.consumed())

    def close(self) -> None:
        """Release the lock, so that another process can write."""
        self._lock.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def new_groups(self, count: int) -> list[str]:
        """Return names for the next groups, such as g000012. No committed step has used any of them."""
        first, self.next_group = self.next_group, self.next_group + count
        return [group_name(number) for number in range(first, self.next_group)]

    def step(
        self,
        sequences: Iterable[Mapping[str, Any] | rows.Sequence],
        *,
        stages: Mapping[str, SequenceABC[Any]] | None = None,
        metrics: Mapping[str, Any] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> int:
        """Commit what one optimizer step was trained on, and return the number of the step.

        Args:
            sequences: Mappings with columns of `clew.record.rows.Sequence`; at least those in `NEEDED`. Aligned columns
                are lists, arrays or tensors with T entries (entry i belongs to token i, given those before it), or one
                number for all trained tokens.
            stages: Computed values by name, with one entry per sequence in the form of an aligned column.
            metrics: Numbers by name; None is left out.
            timings: Seconds by name.

        Raises:
            RecordError: Something is missing or invalid. Then nothing was committed.
        """
        number = self.run.steps.count()
        now = time.time()
        batch = [
            row if row.consumed_at is not None else dataclasses.replace(row, consumed_at=now)
            for row in complete(sequences, version=number)
        ]
        if not batch:
            raise RecordError(f"step {number} has no sequences; a step consumes one or more.")
        arrays = {name: _stage(name, values, batch) for name, values in (stages or {}).items()}
        table = rows.to_table(batch)
        digests = digest_rows(rows.from_table(table))  # of the rows as a reader gets them, in the columns' types
        versions = np.concatenate([row.versions[row.loss_mask] for row in batch])
        summary = {
            **EMPTY_SUMMARY,
            "groups": sorted({row.group_id for row in batch}),
            "versions": [int(versions.min()), int(versions.max())] if versions.size else [number, number],
            "digests": {"data": digest_batch(digests)},
            "metrics": _numbers("metric", metrics),
            "environment": {"trainer": self._trainer},
            "committed_at": now,
            "timings": _numbers("timing", timings),
        }
        self.run.steps.write_data(number, table)
        self.run.steps.write_stages(number, 0, digests, arrays)
        self.run.steps.commit(number, summary)
        self._count_groups(summary["groups"])
        return number

    def _count_groups(self, names: Iterable[str]) -> None:
        numbers = (int(name[1:]) for name in names if re.fullmatch(r"g[0-9]+", name))
        self.next_group = max([self.next_group, *(number + 1 for number in numbers)])


def complete(sequences: Iterable[Mapping[str, Any] | rows.Sequence], *, version: int) -> list[rows.Sequence]:
    """Return sequences with all columns; what is missing is filled in as docs/record.md says.

    `version` is that of the weights that sampled the tokens, for sequences that do not give `versions`.

    Raises:
        RecordError: A sequence lacks a needed column, or has an unknown or invalid one.
    """
    made: list[rows.Sequence] = []
    episodes: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for place, given in enumerate(sequences):
        where = f"sequence {place}"
        if isinstance(given, rows.Sequence):
            _check_kinds(where, vars(given))
            made.append(dataclasses.replace(given, rewards=_numbers(f"{where}: reward", given.rewards)))
            continue
        _check_kinds(where, given)
        _check_names(where, given)
        values = {name: value for name, value in given.items() if value is not None}
        group_id = str(values["group_id"])
        if "episode_id" not in values:
            values["episode_id"] = f"{group_id}.e{episodes[group_id]}"
            episodes[group_id] += 1
        episode_id = str(values["episode_id"])
        if "id" not in values:
            values["id"] = f"{episode_id}.s{parts[episode_id]}"
            parts[episode_id] += 1
        made.append(_complete(values, where, version))
    for place, row in enumerate(made):
        if row.loss_mask[:1].any():
            raise RecordError(
                f"sequence {place} ({row.id}): its first token is in loss_mask, but nothing predicts it. Entry i of an "
                f"aligned column belongs to token i, given the tokens before it: was it shifted by one?"
            )
    for name, count in Counter(row.id for row in made).most_common(1):
        if count > 1:
            raise RecordError(f"{count} sequences of one step have the ID {name!r}; expected a different ID for each.")
    return made


def _check_kinds(where: str, fields: Mapping[str, Any]) -> None:
    """Raise RecordError if an optional column has another type than readers expect, or an image another name."""
    for name, kind in KINDS.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise RecordError(f"{where}: {name} is {value!r:.60}; expected a {kind.__name__}.")
    if strange := [name for name in fields.get("images") or [] if not is_media_name(name)]:
        raise RecordError(
            f"{where}: images names {strange[0]!r:.80}; expected names of files in media/, which are the hashes of "
            f"their contents. Put the image there with RunDirectory.media.put(content), which returns its name."
        )


def _check_names(where: str, fields: Mapping[str, Any]) -> None:
    """Raise RecordError if a needed column is missing, or a name is not that of a column."""
    if missing := [name for name in NEEDED if fields.get(name) is None]:
        raise RecordError(f"{where} has no {', '.join(missing)}; expected at least {', '.join(NEEDED)}.")
    if unknown := [name for name in fields if name not in rows.COLUMNS]:
        raise RecordError(
            f"{where} has {', '.join(map(repr, unknown))}; the columns are {', '.join(rows.COLUMNS)}. Put "
            f"anything else into data or an interaction."
        )


def _complete(values: dict[str, Any], where: str, version: int) -> rows.Sequence:
    where = f"{where} ({values['id']})"
    input_ids = _array(f"{where}: input_ids", values["input_ids"], np.int32)
    if input_ids.ndim != 1:
        raise RecordError(f"{where}: input_ids has the shape {list(input_ids.shape)}; expected one dimension.")
    mask = _aligned("loss_mask", values["loss_mask"], where, np.ones(len(input_ids), np.bool_))
    defaults = {"versions": version, "turn_ids": 0, "temperatures": 1.0}
    aligned = {
        name: _aligned(name, values.get(name, defaults.get(name)), where, mask)
        for name in rows.ALIGNED
        if name not in ("input_ids", "loss_mask")
    }
    reward = _number(f"{where}: reward", values["reward"])
    rewards = values.get("rewards", {} if np.isnan(reward) else {"reward": reward})
    versions = aligned["versions"][mask]
    masks = {name: _array(f"{where}: {name}", values[name], np.int32) for name in rows.MASKS if name in values}
    counts, ids = (masks.get(name) for name in rows.MASKS)
    if counts is not None and ids is not None and (counts.shape, counts.sum()) != (mask.shape, ids.size):
        raise RecordError(
            f"{where}: the numbers in sampling_mask_counts are not one per token, or do not add up to the length of "
            f"sampling_mask_ids."
        )
    row = rows.Sequence(
        **{
            "admitted_version": int(versions.min()) if versions.size else version,
            **values,
            **aligned,
            **masks,
            **{name: str(values[name]) for name in ("id", "group_id", "episode_id")},
            "input_ids": input_ids,
            "loss_mask": mask,
            "reward": reward,
            "rewards": _numbers(f"{where}: reward", rewards),
        }
    )
    if wrong := rows.wrong_mask(row):
        raise RecordError(f"{where} has {wrong}.")
    return row


def _aligned(name: str, value: Any, where: str, mask: np.ndarray) -> np.ndarray:
    """Return a column with one entry per token. A single number stands for all tokens in `mask`."""
    array = _array(f"{where}: {name}", value, rows.ALIGNED.get(name, np.float32))
    if array.ndim == 0:
        return np.where(mask, array, np.array(UNTRAINED.get(name, 0), array.dtype))
    if array.shape != mask.shape:
        raise RecordError(
            f"{where}: {name} has the shape {list(array.shape)}, input_ids {len(mask)} tokens; expected one "
            f"entry per token (0 for tokens that are not trained on), or a single number."
        )
    return array


def _stage(name: str, values: SequenceABC[Any], batch: list[rows.Sequence]) -> list[np.ndarray]:
    """Return the values of a stage for each sequence, 0 where a token is not trained on."""
    if name in OF_ROWS:
        raise RecordError(f"Cannot name a stage {name!r}: {', '.join(OF_ROWS)} are columns of every stage file.")
    if len(values) != len(batch):
        raise RecordError(f"stage {name!r} has {len(values)} entries; expected one for each of {len(batch)} sequences.")
    aligned = (
        _aligned(f"stage {name!r}", value, row.id, row.loss_mask) for value, row in zip(values, batch, strict=True)
    )
    return [np.where(row.loss_mask, value, np.float32(0)) for value, row in zip(aligned, batch, strict=True)]


_EXPECTED = {np.bool_: "0 or 1 for each token", np.int32: "whole numbers of 32 bits", np.float32: "numbers"}


def _array(what: str, value: Any, dtype: type) -> np.ndarray:
    """Return `value` as an array of a type in `_EXPECTED`.

    Raises:
        RecordError: A value is of another kind, or would change by more than rounding.
    """
    if hasattr(value, "detach"):  # a torch tensor; NumPy takes none with a gradient, on a GPU, or of bfloat16
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    try:
        given = np.asarray(value)
        with np.errstate(invalid="ignore"):  # NaN as a whole number
            array = given.astype(dtype)
        fits = given.dtype.kind not in "SUOc" and (  # O: such as None among numbers, which would become NaN
            dtype is np.float32 or bool((array == given).all())
        )
    except (OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RecordError(f"{what} is {value!r:.60}; expected {_EXPECTED[dtype]}.")
    return array


def _numbers(what: str, values: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: _number(f"{what} {name!r}", value) for name, value in (values or {}).items() if value is not None}


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RecordError(f"{what} is {value!r}; expected a number.") from None
