"""`clew show`: a run, a step, a group, an episode or its tokens, as recorded.

It reads the index, the JSON of every step (for the check of the chain), and the few Parquet files
that it needs. So it is fast, even if there are thousands of steps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from clew.errors import RecordError
from clew.record import chain
from clew.record.bundle import opened
from clew.record.rejected import count_rejected
from clew.record.rows import Sequence, by_episode
from clew.record.run import RunDirectory, open_run
from clew.record.run_warnings import read_warnings, warnings_in_words
from clew.record.steps import parse_steps
from clew.view.episode import as_objects, lag, read_stages, rejected_of, rewards_by_name, show_episode, versions
from clew.view.find_episode import Found, Name, committed_steps, find_group, read_batch, settings_of
from clew.view.health_check import changes_of, judge, print_health
from clew.view.health_rules import Collector
from clew.view.off_policy import show_off_policy
from clew.view.prompt import show_prompt
from clew.view.status import ended_early
from clew.view.text import MISSING, Rows, as_text, duration, moment, number, one_line, pairs, prompt_text, visible

STEPS_SHOWN = 20
SHARE_SHOWN = 0.005
"""Minimum share of the run's time for an activity to be listed."""
WAITS = {"rollout": "waiting for batches", "evaluation": "waiting for evaluations"}
"""Names shown for the timings of a step in which the trainer waits."""
COLUMNS = ("step", "groups", "sequences", "reward", "length", "lag", "k3", "rejected", "grad norm", "loss", "seconds")
SUPERVISED_COLUMNS = ("step", "groups", "tokens", "grad norm", "loss", "seconds")
"""Columns of the table of steps for a run of `clew sft`, which has neither rollout nor rewards."""
EVALUATIONS_SHOWN = 10
FIELD_SHOWN = 2000
"""Number of characters that are shown of a field of the prompt's data row."""


def show(
    path: Path,
    what: str | None = None,
    *,
    steps: str | None = None,
    tokens: bool = False,
    prompt: str | None = None,
    off_policy: bool = False,
    console: Console,
) -> None:
    """Print what the record has. The help of `clew show` describes the arguments.

    Raises:
        RecordError: There is no such thing on record, it cannot be read, or options do not go together.
    """
    if tokens and (what is None or what.isdecimal()):
        raise RecordError("--tokens shows an episode or a sequence. Name one of them, such as g000123.e0.")
    if steps is not None and what is not None:
        raise RecordError(f"--steps chooses among the steps of a run: leave out {what}, or --steps.")
    if prompt is not None and (what is not None or steps is not None or off_policy):
        raise RecordError("--prompt shows one prompt over all steps: leave out the other options.")
    if off_policy and what is not None:
        raise RecordError("--off-policy ranks the sequences of a run: leave out everything else but --steps.")
    if what is None and prompt is None and not off_policy and path.is_dir() and not (path / "status").is_dir():
        if steps is not None:
            raise RecordError(f"--steps chooses among the steps of a run, and {path} is a folder of runs: name a run.")
        _show_runs(console, path)
        return
    with opened(path) as (run, bundle):
        if prompt is not None:
            show_prompt(console, run, prompt)
            return
        if off_policy:
            show_off_policy(console, run, parse_steps(steps or ":", run.steps.count()), path)
            return
        collector = Collector()
        broken = chain.breaks(run, see=collector if what is None else None)
        if what is None:
            _show_run(console, run, steps, path, bundle, collector, broken=bool(broken))
        elif what.isdecimal():
            _show_step(console, run, int(what))
        else:
            name = Name.parse(what)
            found = find_group(run, name)
            if name.episode is not None:
                show_episode(console, run, found, name, tokens)
            elif tokens:
                raise RecordError(f"--tokens shows an episode or a sequence. Name one of them, such as {what}.e0.")
            else:
                _show_group(console, run, found)
        if broken:
            console.print()
        for line in chain.breaks_in_words(broken):
            console.print(Text(visible(line), style="red"))


# Runs -----------------------------------------------------------------------------------------------------------------


def _show_runs(console: Console, folder: Path) -> None:
    """Print a table of the runs in ROOT or ROOT/EXPERIMENT."""
    paths = sorted(status.parent for depth in ("*", "*/*") for status in folder.glob(f"{depth}/status/"))
    if not paths:
        raise RecordError(
            f"{folder} is no run directory (it has no status/), and there is no run in it or in its subfolders. "
            f"The path of a run is ROOT/EXPERIMENT/TRIAL."
        )
    rows = Rows(
        *("run", "steps", "reward", "evaluation", "checkpoint", "made", "model"),
        left=("run", "made"),
        words=("model",),
        spare=("made", "checkpoint", "model", "evaluation"),
    )
    unreadable = list[str]()
    for path in paths:
        name = visible(str(path.relative_to(folder)))
        try:
            rows.add_row(name, *_cells_of_run(open_run(path)))
        except RecordError as error:  # the other runs are still worth showing
            rows.add_row(name)
            unreadable.append(f"{name}: {visible(str(error))}")
    console.print(rows)
    for line in unreadable:
        console.print(Text(line, style="red"))


def _cells_of_run(run: RunDirectory) -> tuple[str | Text, ...]:
    config = settings_of(run)
    count = run.steps.count()
    evaluation = run.evals.newest()
    return (
        f"{count or max(run.checkpointed(), default=0)}/{config.get('training.steps', MISSING)}",
        _reward_range(run, count),
        number(evaluation.get("pass@1")) if evaluation else MISSING,
        as_text(max(run.checkpointed(), default=MISSING)),
        moment(run.facts().get("created")),
        one_line(as_text(config.get("model.path", MISSING))),
    )


def _show_run(
    console: Console,
    run: RunDirectory,
    steps: str | None,
    path: Path,
    bundle: dict[str, Any] | None,
    collector: Collector,
    *,
    broken: bool,
) -> None:
    """Print a run, with the arguments `steps` and `path` of `show`. `bundle` is None for a run directory."""
    history, rejected = collector.history(), count_rejected(run)
    warned, _ = read_warnings(run.warnings_path)
    count = run.steps.count()
    chosen = range(count)[-STEPS_SHOWN:] if steps is None else parse_steps(steps, count)
    _show_facts(console, run, str(path), bundle, rejected.lines(), history.seconds)
    if line := ended_early(run, with_error=True):
        console.print(Text(line, "yellow"))
    if warned:
        console.print()
        console.print(pairs(("warning", line) for line in warnings_in_words(warned)))
    _show_evaluations(console, run.evals.read_all())
    if chosen:
        columns = SUPERVISED_COLUMNS if run.supervised else COLUMNS
        spare = ("sequences", "groups", "seconds", "k3", "length", "lag", "rejected", "grad norm", "loss")
        rows = Rows(*columns, spare=[name for name in spare if name in columns])
        for step in chosen:
            cells = _cells_of_step(run.steps.read(step))
            rows.add_row(*(cells[name] for name in columns))
        console.print()
        console.print(rows)
    unjudged = [] if run.supervised else history.unjudged()  # not for `clew sft`
    print_health(console, judge(run, history, rejected, warned), len(history.steps), unjudged, path, broken=broken)


def _show_facts(
    console: Console,
    run: RunDirectory,
    path: str,
    bundle: dict[str, Any] | None,
    reasons: list[str],
    seconds: dict[str, float],
) -> None:
    """Print what the run is and how far it came.

    `reasons` say why groups and episodes were rejected. `seconds` are the sums of the steps' timings by name.
    """
    config, facts, supervised, count = settings_of(run), run.facts(), run.supervised, run.steps.count()
    model = [as_text(config.get(f"model.{name}", "")) for name in ("path", "dtype", "device")]
    groups = f"{len(run.inbox.names())} waiting in the inbox, {len(run.rejected_groups())} rejected"
    packages = "  ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items())
    lines = [
        ("run", path),
        *([("bundle", _holds(bundle))] if bundle is not None else []),
        ("experiment", f"{config.get('experiment', MISSING)}, trial {config.get('trial', MISSING)}"),
        ("model", "  ".join(model).strip() or MISSING),
        ("packages", f"{packages}  python {facts.get('python', MISSING)}"),
        ("git", facts.get("git") or MISSING),
        ("created", moment(facts.get("created"))),
        ("steps", f"{count} committed of {config.get('training.steps', MISSING)}"),
        *([("time", _time_in_words(seconds))] if sum(seconds.values()) > 0 else []),
        *(("changed", f"from step {step}: {words}") for step, words in changes_of(run)),
        *([("groups", groups)] if not supervised else []),
        *([("rejected", "\n".join(reasons))] if reasons else []),
        *([("reward", _reward_range(run, count))] if not supervised else []),
        ("checkpoints", _checkpoints(run)),
    ]
    console.print(pairs(lines))


def _cells_of_step(summary: dict[str, Any]) -> dict[str, str]:
    metrics, timings = summary.get("metrics", {}), summary.get("timings")
    lags = [metrics.get(name, math.nan) for name in ("lag_mean", "lag_max")]
    return {
        "step": str(summary["step"]),
        "groups": str(len(summary["groups"])),
        "sequences": number(metrics.get("sequences"), ".0f"),
        "tokens": number(metrics.get("tokens"), ".0f"),
        "reward": number(metrics.get("reward")),
        "length": number(metrics.get("response_length"), ".1f"),
        "lag": f"{lags[0]:.2f}/{lags[1]:.0f}" if min(lags) >= 0 else MISSING,
        "k3": number(metrics.get("behaviour_k3"), ".1e"),
        "rejected": number(metrics.get("rejected_share"), ".1%"),
        "grad norm": number(metrics.get("grad_norm")),
        "loss": number(metrics.get("loss"), ".2e"),
        "seconds": number(sum(timings.values()) if timings else None, ".2f"),
    }


def _checkpoints(run: RunDirectory) -> str:
    """Return the checkpoints of a run, and which of them has the best evaluation."""
    best = run.checkpoints / "best"
    name = best.readlink().name if best.is_symlink() else None
    shown = (path.name + " (best)" * (path.name == name) for path in sorted(run.checkpoints.glob("step-*")))
    return "  ".join(shown) or MISSING


def _time_in_words(seconds: dict[str, float]) -> str:
    """Return the time of all steps and what it was spent on, the longest first."""
    total = sum(seconds.values())
    parts = (
        f"{WAITS.get(name, name)} {duration(value)} ({100 * value / total:.0f} %)"
        for name, value in seconds.items()
        if value >= SHARE_SHOWN * total
    )
    return f"{duration(total)} in all steps: {', '.join(parts)}"


def _holds(bundle: dict[str, Any]) -> str:
    first, step = bundle["first"], bundle["step"]
    held = f"step {step}" if first == step else f"the steps {first} to {step}"
    return f"it holds {held}{', without weights' if bundle['stages_only'] else ''}"


def _show_evaluations(console: Console, evaluations: list[dict[str, Any]]) -> None:
    if not evaluations:
        return
    console.print()
    if "loss" in evaluations[-1]:  # of `clew sft`
        losses = Rows("evaluation of", "held-out loss", "tokens")
        for each in evaluations:
            losses.add_row(f"version {each['version']}", number(each.get("loss"), ".4f"), str(each.get("tokens")))
        console.print(losses)
        return
    passes = [name for name in evaluations[-1] if name.startswith("pass@")]
    rows = Rows(
        *("evaluation of", *passes, "reward", "length", "truncated", "episodes", "failed"),
        spare=("truncated", "length", "episodes", "reward", "failed"),
    )
    left_out = max(0, len(evaluations) - EVALUATIONS_SHOWN)
    for place, evaluation in enumerate([evaluations[0], *evaluations[1 + left_out :]]):
        if left_out and place == 1:
            rows.add_row(f"… {left_out} more …")
        rows.add_row(
            f"version {evaluation['version']}",
            *(number(evaluation.get(name)) for name in (*passes, "reward")),
            number(evaluation.get("length"), ".1f"),
            number(evaluation.get("truncated")),
            number(evaluation.get("episodes"), ".0f"),
            number(evaluation.get("failed"), ".0f"),
        )
    console.print(rows)


def _reward_range(run: RunDirectory, count: int) -> str:
    """Return the mean reward of the first and of the last step, as text."""
    ends = [run.steps.read(step).get("metrics", {}).get("reward") for step in sorted({0, count - 1}) if count]
    known = [number(reward) for reward in ends if reward is not None]
    return " → ".join(known) or MISSING


# A step ---------------------------------------------------------------------------------------------------------------


def _show_step(console: Console, run: RunDirectory, step: int) -> None:
    if not run.steps.json_path(step).exists():
        count = run.steps.count()
        if step < count or run.steps.committed_after(step) is not None:
            run.steps.read(step)  # raises the error that says what is missing
        made = ""
        if run.steps.has_data(count):
            made = f" {ended_early(run, with_error=True) or f'Step {count} is being made.'}"
        raise RecordError(f"{run.path} has no step {step}: {committed_steps(count)}.{made}")
    summary = run.steps.read(step)
    oldest, newest = summary["versions"]
    metrics, timings, plan = (summary.get(name) or {} for name in ("metrics", "timings", "plan"))
    facts = [
        ("step", f"{step}, committed {moment(summary.get('committed_at'))}"),
        # -1: no policy generated the tokens, as in `clew sft`
        *([("versions", f"{oldest} to {newest} (of the trained tokens)")] if newest >= 0 else []),
        *((f"digest of {name}", _flat(value)) for name, value in summary["digests"].items()),
        ("plan", f"micro-batches of each update: {_counts(plan)}"),
        ("seconds", "  ".join(f"{name} {value:.3f}" for name, value in timings.items())),
    ]
    console.print(pairs(facts))
    console.print()
    console.print(
        Columns([Text(f"{visible(name)} {value:.4g}") for name, value in metrics.items()], equal=True, padding=(0, 3))
    )
    console.print()
    if run.steps.has_data(step):
        _show_groups(console, run, step)
    else:
        console.print(run.steps.gone(step))
    console.print()
    console.print(pairs([("environment", _flat(summary.get("environment", {})))]))  # last, because it is long


def _show_groups(console: Console, run: RunDirectory, step: int) -> None:
    """Print a row for each group of a step: its rewards, advantages and prompt."""
    groups: dict[str, list[Sequence]] = {}
    for sequence in read_batch(run, step):
        groups.setdefault(sequence.group_id, []).append(sequence)
    column = settings_of(run).get("data.prompt", "prompt")
    stages = read_stages(console, run, step)
    rejected, advantages = stages.get("rejected", {}), stages.get("advantages", {})
    rows = Rows(
        *("group", "sequences", "lag", "rejected", "mean", "spread", "rewards", "advantages", "prompt"),
        left=("group",),
        words=("rewards", "advantages", "prompt"),
        spare=("sequences", "spread", "mean", "advantages", "lag"),
    )
    for group, sequences in groups.items():
        rewards = {id: several[0].reward for id, several in by_episode(sequences).items()}
        rows.add_row(
            group,
            str(len(sequences)),
            lag(sequences, step),
            rejected_of(sequences, rejected),
            number(float(np.mean(list(rewards.values())))),
            number(float(np.std(list(rewards.values())))),
            " ".join(number(reward, ".4g") for reward in rewards.values()),
            " ".join(number(_mean_advantage(each, advantages), ".2f") for each in by_episode(sequences).values()),
            one_line(prompt_text(sequences[0].data.get(column, sequences[0].data))),
        )
    console.print(rows)


def _mean_advantage(episode: list[Sequence], advantages: dict[str, np.ndarray]) -> float:
    """Return the mean advantage of an episode's trained tokens; NaN if it is unknown."""
    recorded = [(each, advantages[each.id]) for each in episode if each.id in advantages]
    known = [values_T[each.loss_mask] for each, values_T in recorded if len(values_T) == len(each.loss_mask)]
    values_N = np.concatenate(known) if known else np.empty(0)
    return float(values_N.mean(dtype=np.float64)) if values_N.size else math.nan


def _flat(value: Any) -> str:
    """Return a value as one line of text: the entries of a list, or those of a dict after their names."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {_flat(part)}" for name, part in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# A group --------------------------------------------------------------------------------------------------------------


def _show_group(console: Console, run: RunDirectory, group: Found) -> None:
    episodes = group.episodes()
    if not episodes:
        console.print(pairs([("group", group.id), ("fate", group.fate)]))
        return
    first = next(iter(episodes.values()))[0]
    admitted = f"{moment(first.admitted_at)}, at version {first.admitted_version}"
    facts = [
        ("group", group.id),
        ("fate", group.fate),
        *([] if run.supervised else [("admitted", admitted), ("lag", lag(group.sequences, group.step))]),
        *((f"data.{name}", _field(value)) for name, value in first.data.items()),
    ]
    console.print(pairs(facts))
    console.print()
    stages = read_stages(console, run, group.step if group.committed else None)
    rejected, advantages = stages.get("rejected", {}), stages.get("advantages", {})
    rows = Rows(
        *("episode", "sequences", "tokens", "rejected", "reward", "advantage", "rewards", "finish", "versions"),
        "completion",
        left=("episode", "finish", "versions"),
        words=("rewards", "completion"),
        spare=("sequences", "versions", "finish", "rewards", "advantage", "tokens"),
    )
    for episode, sequences in episodes.items():
        last = sequences[-1]
        failed = last.finish_reason == "error"
        completion = as_text(as_objects(last)[-1].get("completion")) if last.interactions else ""
        said = (last.error or "") if failed else completion
        rows.add_row(
            episode,
            str(len(sequences)),
            str(sum(int(sequence.loss_mask.sum()) for sequence in sequences)),
            rejected_of(sequences, rejected),
            number(sequences[0].reward, ".4g"),
            number(_mean_advantage(sequences, advantages), ".4g"),
            one_line(rewards_by_name(sequences[0].rewards)),
            visible(last.finish_reason, keep=""),
            versions(sequences),
            one_line(f"error: {said}", style="red") if failed else one_line(said),
        )
    console.print(rows)


def _field(value: Any) -> str:
    text = as_text(value)
    return text if len(text) <= FIELD_SHOWN else f"{text[:FIELD_SHOWN]}… ({len(text)} characters)"


def _counts(plan: Any) -> str:
    """Return the number of micro-batches in each update as text, without the empty ones that even out the ranks."""
    return " ".join(str(sum(map(bool, update))) for update in plan) or MISSING
