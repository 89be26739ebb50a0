"""`clew show RUN --prompt ROW`: all groups of one prompt, those that were trained on and those that were left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from clew import data
from clew.console import tracked
from clew.errors import ClewError, RecordError
from clew.record import rows
from clew.record.run import RunDirectory
from clew.view.episode import lag
from clew.view.find_episode import settings_of
from clew.view.text import MISSING, Rows, as_text, number, one_line, pairs, prompt_text

CANDIDATES = 5
"""Maximum number of prompts that an error lists."""

DIGITS = 15
"""Maximum number of digits of a row's number; a longer one is text."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of episodes of the prompt."""

    step: int | None
    """Step that trained on the group; None if it was left out."""
    group: str
    rewards: list[float]
    """Reward of each episode; NaN for one that failed."""
    length: float
    """Mean number of generated tokens of an episode."""
    lag: str
    """Mean and maximum lag of the generated tokens."""
    error: str | None
    """Reason why the group was left out; None if it was trained on."""


def show_prompt(console: Console, run: RunDirectory, wanted: str) -> None:
    """Print the groups of one prompt, sorted by ID. Raises RecordError if `wanted` fits no prompt, or several.

    Args:
        wanted: The number of a row in the data file, counted from 0, or a text that the prompt contains. If there is no
            row of this number, the number is searched for as text. If the row has no group, only a prompt that consists
            of the number is found.
    """
    config = settings_of(run)
    content, attempts, of_row = _find_prompt(run, config, wanted)
    trained = sum(attempt.step is not None for attempt in attempts)
    facts = [(f"data.{name}", one_line(as_text(value))) for name, value in rows.parse_data(content).items()]
    of_file = [("row", f"{wanted} of {config.get('data.path')}, counted from 0")] if of_row else []
    console.print(pairs([*of_file, *facts, ("groups", f"{trained} trained on, {len(attempts) - trained} left out")]))
    console.print()
    made = Rows(
        *("step", "group", "rewards", "mean", "length", "lag", "why it was left out"),
        left=("group",),
        words=("rewards", "why it was left out"),
        spare=("lag", "length"),
    )
    for attempt in sorted(attempts, key=lambda attempt: attempt.group):
        scored = [reward for reward in attempt.rewards if np.isfinite(reward)]
        made.add_row(
            MISSING if attempt.step is None else str(attempt.step),
            attempt.group,
            one_line(" ".join(number(reward, ".4g") for reward in attempt.rewards)),
            number(float(np.mean(scored)) if scored else None),
            number(attempt.length, ".1f"),
            attempt.lag,
            one_line(attempt.error or ""),
        )
    console.print(made)


def _find_prompt(run: RunDirectory, config: Mapping[str, Any], wanted: str) -> tuple[str, list[Attempt], bool]:
    """Find the prompt that `wanted` means. Raises RecordError if it means no prompt, or several.

    Returns:
        The prompt's row of data as the record has it, its groups, and whether `wanted` is the number of the row.
    """
    column = str(config.get("data.prompt", "prompt"))

    def text_of(data: Mapping[str, Any]) -> str:
        return prompt_text(data.get(column, data))

    row, no_row = None, ""
    if wanted.isdecimal() and len(wanted) <= DIGITS:
        try:
            row = _row_of_file(config, int(wanted))
        except RecordError as error:
            no_row = str(error)
    if row is not None and (of_row := _groups_by_row(run, lambda data: data == row)):
        return next(iter(of_row)), [attempt for attempts in of_row.values() for attempt in attempts], True
    if row is not None:  # only whole prompts, because many prompts contain the number
        groups_by_row = _groups_by_row(run, lambda data: text_of(data).strip() == wanted)
    else:
        groups_by_row = _groups_by_row(run, lambda data: wanted in text_of(data))
    if not groups_by_row:
        raise RecordError(f"{no_row} {_why_missing(run, wanted, row, column)}".lstrip())
    texts = {content: text_of(rows.parse_data(content)) for content in groups_by_row}
    exact = [content for content, text in texts.items() if text == wanted]
    meant = exact if len(exact) == 1 else [*texts]
    if len(meant) > 1:
        listed = "; ".join(repr(text[:80]) for text in list(texts.values())[:CANDIDATES])
        more = f"; and {len(texts) - CANDIDATES} more" if len(texts) > CANDIDATES else ""
        raise RecordError(
            f"--prompt {wanted!r} is in {len(texts)} prompts of this run: {listed}{more}. Give more of its text, or "
            f"the number of its row in the data file. {no_row}".rstrip()
        )
    return meant[0], groups_by_row[meant[0]], False


def _row_of_file(config: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a row of the run's data file as the record has it. Raises RecordError if there is no such file or row."""
    path = str(config.get("data.path", MISSING))
    try:
        found = data.load_rows(path, split=str(config.get("data.split", "train")), limit=place + 1)
    except ClewError as error:
        raise RecordError(f"{error} To find a prompt without the data file, give a text that it holds.") from error
    if len(found) <= place:
        raise RecordError(f"{path} has no row {place}: it has {len(found)}, counted from 0.")
    return rows.parse_data(rows.ENCODER.encode(found[place]))


def _groups_by_row(run: RunDirectory, is_meant: Callable[[dict[str, Any]], bool]) -> dict[str, list[Attempt]]:
    """Return the groups of each matching data row, by the row's text in the record.

    Files are read one after the other, so that memory does not grow with the run.
    """
    steps = [entry["step"] for entry in run.steps.index() if run.steps.has_data(entry["step"])]
    files: list[tuple[int | None, Path]] = [(step, run.steps.data_path(step)) for step in steps]
    files += [(None, run.rejected / f"{group}.parquet") for group in sorted(run.rejected_groups())]
    attempts: dict[str, list[Attempt]] = {}
    for step, path in tracked(files, "looking for the prompt", total=len(files), unit="files"):
        if path.exists():  # it may have been pruned since the list was made
            for content, attempt in _in_table(path, step, is_meant):
                attempts.setdefault(content, []).append(attempt)
    return attempts


def _in_table(
    path: Path, step: int | None, is_meant: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[str, Attempt]]:
    """Yield the data row and the group for each group of a file whose data row matches. No other group is unpacked."""
    batch = rows.read_table(path).drop_columns("interactions")
    contents = batch.column("data").to_pylist()
    meant = {content for content in set(contents) if is_meant(rows.parse_data(content))}
    if not meant:
        return
    groups: dict[str, list[int]] = {}
    for place, (content, group) in enumerate(zip(contents, batch.column("group_id").to_pylist(), strict=True)):
        if content in meant:
            groups.setdefault(group, []).append(place)
    for group, places in groups.items():
        sequences = rows.checked(path, batch.take(places))
        episodes = {id: several[0].reward for id, several in rows.by_episode(sequences).items()}
        attempt = Attempt(
            step=step,
            group=group,
            rewards=list(episodes.values()),
            length=sum(int(sequence.loss_mask.sum()) for sequence in sequences) / len(episodes),
            lag=lag(sequences, step),
            error=next((sequence.error for sequence in sequences if sequence.error), None) if step is None else None,
        )
        yield contents[places[0]], attempt


def _why_missing(run: RunDirectory, wanted: str, row: Mapping[str, Any] | None, column: str) -> str:
    """Return the error for a prompt that was not found. `row` is the row of the data file with that number."""
    kept = sum(run.steps.has_data(entry["step"]) for entry in run.steps.index())
    where = f"{kept} steps that have their sequences on record, or in rejected/"
    if row is None:
        return (
            f"{run.path} has no prompt that holds {wanted!r} in the {where}. Give another part of its text, or "
            f"its row in the data file."
        )
    prompt = prompt_text(row.get(column, row))
    return (
        f"{run.path} has no group of row {wanted} ({prompt[:80]!r}) in the {where}. Either the run has not reached it "
        f"yet, or the data file has changed since: then search for a part of the prompt's text."
    )
