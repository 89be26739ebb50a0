"""View of an episode: what was said, what reward it got and when, and its tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from clew.algorithms.rejection import reasons_of
from clew.errors import RecordError
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.view.find_episode import Found, Name, episode_of
from clew.view.text import MISSING, as_text, content_text, moment, number, pairs, visible
from clew.view.tokens import load_tokenizer, show_tokens


def show_episode(console: Console, run: RunDirectory, found: Found, name: Name, tokens: bool) -> None:
    sequences = episode_of(run, found, name)
    parts = {sequence.id: [sequence.id, *(str(i.get("id")) for i in as_objects(sequence))] for sequence in sequences}
    shown = [sequence for sequence in sequences if name.part is None or name.part in parts[sequence.id]]
    if not shown:
        raise RecordError(f"{run.path} has no {name.part}; it has {', '.join(itertools.chain(*parts.values()))}.")
    interactions = [
        each for sequence in shown for each in as_objects(sequence) if name.part in (None, sequence.id, each.get("id"))
    ]
    last = sequences[-1]
    first = sequences[0]
    rewards = f" = {rewards_by_name(first.rewards)}" if first.rewards else ""
    facts = [
        ("episode", str(name.episode)),
        ("group", f"{found.id}, {found.fate}"),
        ("reward", number(first.reward, ".6g") + rewards),
        ("finish", last.finish_reason),
        *((f"sequence {each.id}", lengths(each)) for each in shown if len(each.input_ids)),
        ("versions", f"{versions(sequences)}, admitted at {last.admitted_version}"),
        *itertools.chain.from_iterable(map(_reported, shown)),
        ("lag", lag(sequences, found.step)),
        ("admitted", moment(last.admitted_at)),
        ("started", _after(last.started_at, last.admitted_at)),
        ("finished", _after(last.finished_at, last.admitted_at)),
        ("consumed", _after(last.consumed_at, last.admitted_at)),
    ]
    console.print(pairs(facts))
    if last.error:
        console.print()
        console.print(Text("error", style="bold red"))
        console.print(Text(visible(last.error)), soft_wrap=True)
    if tokens:
        _show_tokens(console, run, found, shown)
    else:
        _show_interactions(console, interactions)


def _show_tokens(console: Console, run: RunDirectory, found: Found, sequences: list[Sequence]) -> None:
    stages = read_stages(console, run, found.step if found.committed else None)
    tokenizer = load_tokenizer(run, console)
    for sequence in sequences:
        console.print()
        console.print(Text(f"{sequence.id}: {lengths(sequence)}", style="bold"))
        own = {name: arrays[sequence.id] for name, arrays in stages.items() if sequence.id in arrays}
        show_tokens(console, sequence, own, tokenizer)


def read_stages(console: Console, run: RunDirectory, step: int | None) -> dict[str, dict[str, np.ndarray]]:
    """Return the recorded stages of a step by name and sequence ID, [T] each; empty if the step has no stages.

    If they cannot be read, print the reason and return an empty dictionary: the rest is still worth showing.
    """
    if step is None or not run.steps.stage_path(step, 0).exists():
        return {}
    try:
        return run.steps.read_stages(step).arrays
    except RecordError as error:
        console.print(Text(f"no advantages: {visible(str(error))}", style="red"))
        return {}


def as_objects(sequence: Sequence) -> list[dict[str, Any]]:
    """Return the interactions of a sequence. A text, which another trainer may have recorded, becomes a completion."""
    return [each if isinstance(each, dict) else {"completion": each} for each in sequence.interactions]


def _show_interactions(console: Console, interactions: list[dict[str, Any]]) -> None:
    """Print everything that is known of each interaction, without repeating the messages of the one before."""
    if not interactions:
        console.print(Text("\nno interaction is recorded; --tokens shows the tokens, if there are any", style="dim"))
    before: dict[str, Any] = {}
    for interaction in interactions:
        known = dict(interaction)
        started, finished = known.pop("started_at", None), known.pop("finished_at", None)
        sampling = known.pop("sampling", None) or {}
        settings = sampling if isinstance(sampling, dict) else {"sampling": sampling}
        prompt, completion = known.pop("prompt", None), known.pop("completion", None)
        facts = {**known, "started": moment(started), "took": _after(finished, started), **settings}
        facts.pop("id", None)
        console.print()
        console.print(Text(visible(as_text(interaction.get("id", "interaction")), keep=""), style="bold"))
        said = "  ".join(f"{name}={as_text(value)}" for name, value in facts.items())
        console.print(Text(visible(said, keep=""), style="dim"), soft_wrap=True)
        _show_prompt(console, prompt, before)
        _say(console, "completion", completion, "bold green")
        before = interaction


def _show_prompt(console: Console, prompt: Any, before: dict[str, Any]) -> None:
    if prompt is None:
        console.print(
            Text(
                "the text of the prompt is not on record, because the workflow passed no prompt=... to "
                "engine.generate; --tokens shows its tokens",
                style="dim",
            )
        )
        return
    if not isinstance(prompt, list):
        _say(console, "prompt", prompt, "bold cyan")
        return
    earlier = before.get("prompt")
    repeated = len(earlier) if isinstance(earlier, list) and earlier == prompt[: len(earlier)] else 0
    if repeated:
        console.print(Text(f"the {repeated} messages of {before.get('id')}, and", style="dim"))
    for message in prompt[repeated:]:
        if not isinstance(message, dict):
            _say(console, "message", message, "bold cyan")
            continue
        more = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        content = message.get("content")
        said = [content_text(content)] if content is not None else []
        said += [f"{name}: {as_text(value)}" for name, value in more.items()]
        _say(console, as_text(message.get("role", "message")), "\n".join(said), "bold cyan")


def _say(console: Console, who: str, what: Any, style: str) -> None:
    console.print(Text(visible(who, keep=""), style=style))
    console.print(Text(visible(as_text(what))), soft_wrap=True)


def lengths(sequence: Sequence) -> str:
    """Return the number of tokens of a sequence, and how many of them were generated, as text."""
    return f"{len(sequence.input_ids)} tokens, {int(sequence.loss_mask.sum())} of them generated"


def _after(seconds: float | None, since: float | None) -> str:
    return f"{seconds - since:+.2f} s" if seconds and since else MISSING


def lag(sequences: list[Sequence], step: int | None) -> str:
    """Return mean and maximum lag of the trained tokens, as text: how many versions older than the step they are.

    The lag is unknown ("-") if a token is newer than the step, because another trainer may count versions differently,
    or if no policy generated it (version -1).
    """
    if step is None or not sequences:
        return MISSING
    generated = np.concatenate([sequence.versions[sequence.loss_mask] for sequence in sequences])
    lags = step - generated
    known = lags.size and lags.min() >= 0 and generated.min() >= 0  # -1: no policy generated them
    return f"{lags.mean():.2f}/{lags.max()}" if known else MISSING


def rejected_of(sequences: Iterable[Sequence], rejected: dict[str, np.ndarray]) -> str:
    """Return, as text, how many trained tokens of these sequences were rejected, and why.

    Args:
        rejected: Reason for each token [T], by sequence ID; see `clew.algorithms.rejection`.
    """
    recorded = [(each, rejected[each.id]) for each in sequences if each.id in rejected]
    known = [why_T[each.loss_mask] for each, why_T in recorded if len(why_T) == len(each.loss_mask)]  # else altered
    why = np.concatenate([np.zeros(0), *known])
    count = int((why > 0).sum())
    if not count:
        return MISSING
    return f"{'all' if count == len(why) else f'{count} of {len(why)}'} ({', '.join(reasons_of(why))})"


def rewards_by_name(rewards: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in rewards.items())


def _reported(sequence: Sequence) -> list[tuple[str, str]]:
    """Return lines with what the engine reported about a sequence: servers, sampling mask and routed experts."""
    lines: list[tuple[str, str]] = []
    if sequence.sampled_by:
        lines.append((f"sampled by, {sequence.id}", sampled_by(sequence)))
    if sequence.sampling_mask_counts is not None:
        lines.append((f"sampling mask, {sequence.id}", mask_in_words(sequence.sampling_mask_counts)))
    if sequence.routed_experts is not None:
        tokens, layers, experts = sequence.routed_experts.shape
        lines.append((f"routed experts, {sequence.id}", f"{experts} in each of {layers} layers, for {tokens} tokens"))
    return lines


def sampled_by(sequence: Sequence) -> str:
    """Return, as text, the servers that generated the tokens, and spans whose version differs from the recorded one."""
    spans = sequence.sampled_by or []
    tokens = Counter[str]()
    for span in spans:
        tokens[str(span.get("server"))] += span["end"] - span["start"]
    others = [
        f"tokens {span['start']} to {span['end'] - 1} were made by its version {span['version']}"
        for span in spans
        if str(span.get("version")).isdigit()
        and (sequence.versions[span["start"] : span["end"]] != int(span["version"])).any()
    ]
    names = ", ".join(f"{visible(name)} ({count} tokens)" for name, count in tokens.items())
    return "; ".join([names, *(f"NOT AS LABELLED: {visible(each)}" for each in others)])


def mask_in_words(counts: np.ndarray) -> str:
    """Return, as text, the number of candidates that each token was drawn from.

    `counts` is `Sequence.sampling_mask_counts`.
    """
    cut = counts[counts > 0]
    if not len(cut):
        return MISSING
    return f"{len(cut)} tokens, each drawn from {cut.min()} to {cut.max()} (median {np.median(cut):.0f})"


def versions(sequences: Iterable[Sequence]) -> str:
    """Return the range of versions that generated the tokens, such as "3 to 5"; "-" if none were generated."""
    generated = np.concatenate([sequence.versions[sequence.loss_mask] for sequence in sequences])
    if not generated.size or generated.max() < 0:
        return MISSING
    oldest, newest = generated.min(), generated.max()
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"
