"""View of the tokens of a sequence, each coloured by its advantage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.text import Text

from clew.algorithms.rejection import reasons_of
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.view.text import MISSING, number, visible

LEGEND = "underlined: generated; green: advantage above 0, red: below 0; stronger colour: further from 0"
LEGEND_UNTRAINED = "underlined: generated; no advantages are on record for this sequence"
REPEATED = 8
"""Minimum length of a run of equal tokens, such as those of an image, that is shown as one token. Generated tokens are
always shown one by one."""
_BYTES = 4
"""Maximum number of tokens that one character may be spread over."""


class Tokenizer(Protocol):
    """The part of a tokenizer's interface that is used here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


def load_tokenizer(run: RunDirectory, console: Console) -> Tokenizer | None:
    """Return the tokenizer of the newest checkpoint that has one.

    If no checkpoint has one, or it cannot be read, print why and return None.
    """
    path = max(run.checkpoints.glob("step-*/tokenizer.json"), default=None)
    if path is None:
        console.print(Text("Tokens are shown by their ids: no checkpoints/step-*/tokenizer.json."))
        return None
    from tokenizers import Tokenizer as FastTokenizer

    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        name, why = path.relative_to(run.path), visible(str(error), keep="")
        console.print(Text(f"Tokens are shown by their ids: {name} cannot be read ({why})."))
        return None


def token_texts(ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text that each token adds, or ⟨its id⟩ if it adds none.

    The bytes of one character may be spread over several tokens. The last of these gets the whole character, and the
    others are shown by their ids.
    """
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    texts = []
    # Tokens are decoded together with those just before: some tokenizers drop a space at the beginning of a text.
    begin = done = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[begin:done], skip_special_tokens=False)
        added = tokenizer.decode(ids[begin:end], skip_special_tokens=False)[len(before) :]
        if added.endswith("\ufffd") and end - done < _BYTES and end < len(ids):
            texts.append(f"⟨{ids[end - 1]}⟩")
            continue
        texts.append(added or f"⟨{ids[end - 1]}⟩")
        begin, done = done, end
    return texts


def shown_once(ids: list[int], generated: list[bool]) -> list[tuple[int, int]]:
    """Return the positions of the tokens to show, each with the number of equal tokens in a row that it stands for."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for (_, made), run in itertools.groupby(zip(ids, generated, strict=True)):
        count = len(list(run))
        if made or count < REPEATED:
            runs += [(place, 1) for place in range(begin, begin + count)]
        else:
            runs.append((begin, count))
        begin += count
    return runs


def show_tokens(
    console: Console, sequence: Sequence, stages: dict[str, np.ndarray], tokenizer: Tokenizer | None
) -> None:
    """Print the text with each token coloured, and then a table with one line per token.

    Args:
        stages: [T] arrays by name, such as advantages, from the step that trained on the sequence; empty if none has.
        tokenizer: Turns tokens into text; None: show their ids.
    """
    texts = token_texts(sequence.input_ids.tolist(), tokenizer)
    generated = sequence.loss_mask.tolist()
    stages = {name: values_T for name, values_T in stages.items() if len(values_T) == len(texts)}  # else altered
    advantages = np.nan_to_num(stages.get("advantages", [0.0] * len(texts)))
    largest = np.abs(advantages).max(initial=0.0)
    styles = [
        _style(made, advantage / largest if largest else 0.0)
        for made, advantage in zip(generated, advantages, strict=True)
    ]
    console.print(Text(LEGEND if "advantages" in stages else LEGEND_UNTRAINED, style="dim"))
    flow = Text()
    shown = shown_once(sequence.input_ids.tolist(), generated)
    for place, count in shown:
        flow.append(visible(texts[place]).replace("\n", "↵\n") + times(count), styles[place])
    console.print(flow, soft_wrap=True)
    columns = _columns(sequence, stages)
    header = "".join(f"{name:>{width}}" for name, (width, _) in columns.items())
    console.print(Text(f"{'position':>8}{'id':>8}{header}  text", style="bold"))
    for place, count in shown:
        cells = (f"{show(place) if generated[place] else '':>{width}}" for width, show in columns.values())
        line = Text(f"{place:>8}{sequence.input_ids[place]:>8}{''.join(cells)}  ")
        line.append(visible(texts[place] + times(count), keep=""), styles[place])
        console.print(line, soft_wrap=True)


def _columns(sequence: Sequence, stages: dict[str, np.ndarray]) -> dict[str, tuple[int, Callable[[int], str]]]:
    """Return the columns for generated tokens, by name: the width, and a function from position to text."""

    def stage(name: str) -> Callable[[int], str]:
        return lambda place: number(stages[name][place], ".4f") if name in stages else MISSING

    columns: dict[str, tuple[int, Callable[[int], str]]] = {
        "logprob": (9, lambda place: number(sequence.logprobs[place], ".4f")),
        "current": (9, stage("logprobs")),
        "version": (8, lambda place: str(sequence.versions[place])),
        "advantage": (10, stage("advantages")),
        "loss": (10, stage("loss")),
    }
    if "rejected" in stages:
        columns["rejected"] = 13, lambda place: "+".join(reasons_of(stages["rejected"][place : place + 1]))
    if (counts := sequence.sampling_mask_counts) is not None:
        columns["drawn from"] = 12, lambda place: str(counts[place] or "all")
    return columns


def times(count: int) -> str:
    """Return the suffix of a token that stands for several equal ones; empty if it stands only for itself."""
    return f" x{count} " if count > 1 else ""


def _style(generated: bool, strength: float) -> str:
    """Return the style of a token. `strength` is its advantage, divided by the largest absolute one of the sequence."""
    if not generated:
        return "dim"
    if not strength:
        return "underline"
    pale = round(170 * (1 - abs(strength)))
    return f"underline rgb({pale},190,{pale})" if strength > 0 else f"underline rgb(230,{pale},{pale})"
