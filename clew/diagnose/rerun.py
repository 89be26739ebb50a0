"""What `clew replay` does, and what it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from clew import config as configuration
from clew.diagnose.differences import Difference
from clew.diagnose.stages import ALONE, check_stages
from clew.errors import ConfigError, RecordError
from clew.record.bundle import opened
from clew.record.run import RunDirectory
from clew.record.steps import parse_steps

if TYPE_CHECKING:
    from clew.training.ranks import Ranks

BREAKS = ("advantages", "loss", "backward", "update")

SIDE_BY_SIDE = ("loss", "grad_norm", "reward", "entropy", "behaviour_k3", "clip_share", "kl", "lr")
"""The metrics that a counterfactual shows."""


def rerun(
    target: Path,
    steps: str | None,
    *,
    stages: str | None,
    only: str | None,
    stop: str | None,
    reward: bool,
    device: str | None,
    ranks: int = 1,
    overrides: list[str],
) -> bool:
    """True when everything agrees with the record. Raises ClewError.

    ranks: how many processes train; this is one of them.
    """
    if stop is not None and stop not in BREAKS:
        raise ConfigError(f"--break {stop}: expected one of {', '.join(BREAKS)}.")
    if only is not None and stages is None and not reward:
        raise ConfigError(f"--only {only} goes with --stage or --reward: a step is trained as a whole.")
    ways = {"--stage": stages, "--reward": reward, "--break": stop, "key=value": overrides}
    asked = [name for name, value in ways.items() if value]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different ways to replay: ask for one of them.")
    if ranks > 1 and asked:
        raise ConfigError(f"--ranks {ranks} trains again and compares; {asked[0]} is done by one process.")
    with opened(target) as (run, bundle):
        first, last = _range(run, steps, bundle)
        if stages is not None:
            return _stages(run, first, last, stages.split(","), only)
        if bundle is not None and bundle["stages_only"]:
            print("this bundle has no weights: the stages that need none are compared")
            return _stages(run, first, last, ALONE, only)
        if reward:
            return _rewards(run, first, last, only)
        if overrides:
            return _counterfactual(run, first, last, overrides, kept=bundle is None)
        return _train_again(run, first, last, stop, device)


def _range(run: RunDirectory, steps: str | None, bundle: dict[str, Any] | None) -> tuple[int, int]:
    """The first and the last step that are asked for."""
    count = run.steps.count()
    if not count:
        raise RecordError(f"{run.path} has no committed step to replay.")
    lowest = bundle["first"] if bundle is not None else 0
    if steps is None:
        return (bundle["step"], bundle["step"]) if bundle is not None else (0, count - 1)
    meant = parse_steps(steps, count)
    first, last = meant[0], meant[-1]
    if first < lowest:
        raise RecordError(f"--steps {steps}: the bundle {run.path} holds the steps {lowest} to {count - 1}.")
    return first, last


def _stages(run: RunDirectory, first: int, last: int, stages: Sequence[str], only: str | None) -> bool:
    found: list[Difference] = []
    for step in range(first, last + 1):
        found = check_stages(run, step, stages, only)
        if found:
            break
    _tell(found)
    if not found:
        print(
            f"{_named(first, last)}: {', '.join(stages)} follow from the recorded inputs{f' ({only})' if only else ''}."
        )
    return not found


def _rewards(run: RunDirectory, first: int, last: int, only: str | None) -> bool:
    from clew.diagnose.rewards import rewards_again

    config = configuration.load(run.config_path, ["launch.mode=local"])
    found = rewards_again(run, config, range(first, last + 1), only)
    for each in found:
        print(each)
    rewards = "the rewards of all episodes are" if not found else f"{len(found)} episodes are not"
    print(f"{_named(first, last)}: {rewards} what {config.rollout.reward or config.rollout.workflow} gives now.")
    return not found


def _train_again(run: RunDirectory, first: int, last: int, stop: str | None, device: str | None) -> bool:
    from clew.training.ranks import Ranks

    with Ranks.joined() as ranks:
        return _train_again_on(ranks, run, first, last, stop, device)


def _train_again_on(
    ranks: Ranks, run: RunDirectory, first: int, last: int, stop: str | None, device: str | None
) -> bool:
    from clew.diagnose.replay import engine_at, replay, stop_at

    began = time.perf_counter()
    engine = engine_at(run, first, device, ranks)
    print(f"from checkpoint {engine.version} of {run.path} ({time.perf_counter() - began:.1f} s)", flush=True)
    if stop is not None:
        stop_at(engine, first, stop)
    because = None
    for done in replay(run, engine, last):
        if done.because != because:
            because = done.because
            print(f"compared {done.tolerance}{f': {because}' if because else ''}", flush=True)
        if done.differences:
            _tell(done.differences)
            return False
        if done.step >= first:
            metrics = done.result.metrics
            print(
                f"step {done.step}: agrees. loss {metrics['loss']:.6g}, gradient {metrics['grad_norm']:.6g}, weights "
                f"{done.result.digests['weights']} ({sum(done.result.timings.values()):.2f} s)",
                flush=True,
            )
    print(f"{_named(first, last)}: every stage agrees with the record.")
    return True


def _tell(found: list[Difference]) -> None:
    """The first difference; of what follows from it, the names of the stages."""
    if not found:
        return
    print(f"FIRST DIFFERENCE  {found[0]}")
    if len(found) > 1:
        print(f"after it, these stages of the step differ too: {', '.join(each.stage for each in found[1:])}")


def _counterfactual(run: RunDirectory, first: int, last: int, overrides: list[str], *, kept: bool) -> bool:
    """The same data otherwise, from step `first` on, into a new run directory."""
    from clew.diagnose.replay import engine_at, replay
    from clew.trainer.branch import branch
    from clew.trainer.learn import learn_from_record

    engine = engine_at(run, first)
    recorded = configuration.load(run.config_path)
    root = run.path.parent.parent if kept else Path(recorded.root)
    ours = [
        f"root={root}",
        f"experiment={recorded.experiment}",
        f"trial={_free_trial(root / recorded.experiment, recorded.trial)}",
    ]
    last_words = ["debug.replay_rollout_data=true", "debug.dump_rollout_data=false", f"debug.path={run.path}"]
    last_words.append("launch.ranks=1")
    config = configuration.load(run.config_path, [*ours, *overrides, *last_words])
    for done in replay(run, engine, first - 1):
        if done.differences:
            _tell(done.differences)
            return False
    new = RunDirectory(config.run_path)
    began_with = branch(run, new, engine)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(began_with)})})
    print(f"into {new.path}, from step {first} on with {' '.join(overrides)}", flush=True)
    learn_from_record(config, lambda step, summary: None, until=last + 1)
    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(_side_by_side(run, new, range(first, last + 1)))
    return True


def _free_trial(experiment: Path, trial: str) -> str:
    number = 1
    while (experiment / f"{trial}-replay-{number}").exists():
        number += 1
    return f"{trial}-replay-{number}"


def _side_by_side(run: RunDirectory, new: RunDirectory, steps: range) -> Table:
    """Metrics by step, recorded → here; those that differ anywhere."""
    rows = [(step, run.steps.read(step)["metrics"], new.steps.read(step)["metrics"]) for step in steps]
    names = [name for name in SIDE_BY_SIDE if any(then.get(name) != now.get(name) for _, then, now in rows)]
    table = Table(title="recorded → here", title_justify="left", box=None, pad_edge=False)
    for name in ("step", *names):
        table.add_column(name, justify="right")
    for step, then, now in rows:
        table.add_row(str(step), *(_change(then.get(name), now.get(name)) for name in names))
    return table


def _change(then: float | None, now: float | None) -> str:
    before, after = ("-" if value is None else f"{value:.4g}" for value in (then, now))
    return before if then == now else f"{before} → {after}"


def _named(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
