"""Entry point of `clew replay`: chooses the way to replay, and prints the result."""

from __future__ import annotations

import asyncio
import time
from bdb import BdbQuit
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew import config as configuration
from clew import dotted
from clew.config import Algorithm, Config
from clew.console import progress, tracked
from clew.diagnose.stages import WITHOUT_MODEL, chain_holds, check_stages, suggestions
from clew.errors import ConfigError, Interrupted, RecordError
from clew.loop.differences import TOLERANCES, Difference, DifferenceFound
from clew.printing import print
from clew.record.bundle import opened
from clew.record.run import RunDirectory
from clew.record.steps import parse_steps

BREAKS = ("advantages", "loss", "backward", "update")

REWARDS_SHOWN = 20
"""Maximum number of episodes with a changed reward that are shown."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `clew replay`, as its help describes them.

    `stages`, `stop`, `reward` and `overrides` are different ways to replay, so at most one of them may be set. There is
    one exception: for another trainer's record, `overrides` may go with `stages`; see `describes_other_trainer`.
    """

    steps: str | None = None
    """Steps to replay; None: all of a run, or the one of a bundle."""
    stages: str | None = None
    """Stages to compute again from recorded inputs, separated by commas."""
    only: str | None = None
    stop: str | None = None
    """Stage before which to stop in a debugger, one of `BREAKS`."""
    reward: bool = False
    device: str | None = None
    ranks: int = 1
    """Number of processes that train; this is one of them."""
    verify: bool = True
    overrides: Sequence[str] = ()
    trust: Sequence[str] = ()
    """Modules that may be imported, see `clew.dotted.only_trusted`."""

    @property
    def modes(self) -> list[str]:
        """Names of the options that choose a way to replay."""
        stages, stop = self.stages is not None, self.stop is not None
        ways = {"--stage": stages, "--reward": self.reward, "--break": stop, "key=value": bool(self.overrides)}
        return [name for name, chosen in ways.items() if chosen]

    @property
    def describes_other_trainer(self) -> bool:
        """True if both are given. The overrides then describe how another trainer computed the stages."""
        return self.modes == ["--stage", "key=value"]

    def check(self) -> None:
        """Raise ConfigError if a value is unknown, or options do not go together in any run."""
        if self.stop is not None and self.stop not in BREAKS:
            raise ConfigError(f"--break {self.stop}: expected one of {', '.join(BREAKS)}.")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: expected cpu or cuda.")
        if self.only is not None and self.stages is None and not self.reward:
            raise ConfigError(
                f"--only {self.only} needs --stage or --reward, because a step is always trained as a whole."
            )
        if not self.verify and (self.stages is not None or self.reward or self.overrides):
            raise ConfigError(
                f"--no-verify trains again without comparing, and {self.modes[0]} does not. Leave one out."
            )
        if self.ranks > 1 and self.modes:
            raise ConfigError(
                f"--ranks {self.ranks} trains with several processes, {self.modes[0]} with one. Leave one out."
            )

    def check_against(self, run: RunDirectory, first: int) -> None:
        """Raise ClewError if this run cannot be replayed in this way from step `first` on."""
        if len(self.modes) > 1 and not (self.describes_other_trainer and not run.steps.by_clew):
            raise ConfigError(f"{' and '.join(self.modes)} are different ways to replay. Use one of them.")
        if not run.steps.json_path(first).exists() and (self.stages is not None or self.ranks > 1):
            raise RecordError(
                f"Cannot compare step {first} of {run.path}: it was begun and never committed. Leave out --stage and "
                f"--ranks to train it here, add --break to stop in it, or ask `clew blame` for the cause."
            )
        if (self.stages is not None or self.reward) and run.supervised and self.stages != "data":
            raise RecordError(
                f"{run.path} is a run of `clew sft`: it has no rewards and no advantages. Without --stage and --reward "
                f"its steps are trained again and compared."
            )
        if self.stop not in (None, "update") and run.supervised:
            raise RecordError(f"{run.path} is a run of `clew sft`, where only --break update works.")
        if self.overrides and self.stages is None and not run.steps.by_clew:
            raise RecordError(
                f"Cannot train {run.path} again: another trainer wrote it, without what Clew needs. `--stage "
                f"advantages` with key=value computes its advantages again."
            )


def rerun(target: Path, options: Options) -> bool:
    """Replay steps of a run directory or a bundle in the way that the options ask for.

    Returns:
        True if everything agrees with the record, or if nothing is compared.

    Raises:
        ClewError: The options do not go together, or the steps cannot be replayed.
    """
    options.check()
    with opened(target, options.trust) as (run, bundle):
        first, last = _range(run, options.steps, bundle)
        if options.only is not None and options.steps is None:
            first = last = _step_of(run, options.only, first, last)
        options.check_against(run, first)
        if options.stages is not None:
            algorithm = (
                _algorithm_of_another(options.overrides, options.stages) if options.describes_other_trainer else None
            )
            return _stages(run, first, last, options.stages.split(","), options.only, algorithm)
        if bundle is not None and bundle["stages_only"]:
            if options.modes or options.device is not None:
                raise RecordError(
                    f"Cannot use {', '.join(options.modes) or '--device'} on {target}: it was written with "
                    f"--stages-only, so it lacks the weights and the rest of the run."
                )
            print("this bundle has no weights: the stages that need none are compared")
            return _stages(
                run, first, last, WITHOUT_MODEL if run.steps.by_clew and not run.supervised else ("data",), None
            )
        if options.reward:
            return _rewards(run, first, last, options.only)
        if options.overrides:
            from clew.diagnose.counterfactual import counterfactual

            counterfactual(run, first, last, [*options.overrides], kept=bundle is None)
            return True
        return _train_again(run, first, last, options.stop, options.device, options.verify, named=target)


def _range(run: RunDirectory, steps: str | None, bundle: dict[str, Any] | None) -> tuple[int, int]:
    count = run.steps.count()
    if steps == str(count) and run.steps.has_data(count):
        return count, count  # it failed, or was interrupted
    if not count:
        begun = f" `--step {count}` trains on the batch of the one that was begun."
        raise RecordError(f"{run.path} has no committed step to replay.{begun if run.steps.has_data(count) else ''}")
    lowest = bundle["first"] if bundle is not None else 0
    if steps is None:
        if bundle is not None:
            return bundle["step"], bundle["step"]
        first = next((step for step in range(count) if run.steps.has_data(step)), 0)
        if first:
            print(f"from step {first} on: the record no longer has the sequences of earlier steps")
        return first, count - 1
    meant = parse_steps(steps, count)
    first, last = meant[0], meant[-1]
    if first < lowest:
        raise RecordError(f"--steps {steps}: the bundle {run.path} holds the steps {lowest} to {count - 1}.")
    return first, last


def _step_of(run: RunDirectory, only: str, first: int, last: int) -> int:
    """Return the step that trained on the group, the episode or the sequence with this ID."""
    for step in tracked(range(first, last + 1), f"searching for {only}", total=last + 1 - first, unit="steps"):
        table = run.steps.read_table(step)
        if any(only in table.column(name).to_pylist() for name in ("id", "episode_id", "group_id")):
            return step
    raise RecordError(f"Cannot find {only}: {_steps_text(first, last)} of {run.path} did not train on it.")


NOT_RECOMPUTED = (
    "not computed again: metrics (such as metrics.response_length), evaluation, timings, committed_at, environment, "
    "tensors, the other stages, and checkpoints. Without --stage, metrics, tensors, stages and checkpoints are."
)
"""Message that lists what `--stage` does not check."""

LIMIT = "sampling.max_new_tokens"
"""Field that algorithm.loss_constant and overlong_penalty are derived from if they are not set themselves."""


def _algorithm_of_another(overrides: Sequence[str], stages: str) -> Algorithm:
    """Return the algorithm, as the overrides describe it, with which another trainer computed advantages and loss.

    Raises:
        ConfigError: An override is neither a field of algorithm nor `LIMIT`, or something that is needed is missing.
    """
    names = [override.partition("=")[0] for override in overrides]
    for name, override in zip(names, overrides, strict=True):
        if not name.startswith("algorithm.") and name != LIMIT:
            raise ConfigError(
                f"{override}: with --stage, key=value describes how another trainer computed advantages and loss. "
                f"Use fields of algorithm, such as algorithm.advantages=group, or {LIMIT}."
            )
    needed = "{experiment: another, model: {path: another}, data: {path: another}}"
    algorithm = configuration.parse(needed, Path("key=value"), [*overrides]).algorithm
    for name in ("loss_constant", "overlong_penalty"):
        value = getattr(algorithm, name)
        if value is not None and not {f"algorithm.{name}", LIMIT} & {*names}:
            raise ConfigError(f"Cannot derive algorithm.{name}: {LIMIT} is not on record. Set one of the two.")
    if algorithm.minibatches > 1 and algorithm.loss_mean != "token" and "loss" in stages.split(","):
        raise ConfigError(
            f"algorithm.minibatches={algorithm.minibatches} with algorithm.loss_mean={algorithm.loss_mean}: the "
            f"loss depends on which sequences shared a mini-batch, and that is not on record. Use --stage advantages, "
            f"which can be computed again."
        )
    return algorithm


def _stages(
    run: RunDirectory,
    first: int,
    last: int,
    stages: Sequence[str],
    only: str | None,
    algorithm: Algorithm | None = None,
) -> bool:
    found: list[Difference] = []
    unbroken = chain_holds(run, range(first, last + 1))
    for step in tracked(range(first, last + 1), "comparing", total=last + 1 - first, unit="steps"):
        found = check_stages(run, step, stages, only, algorithm)
        if found:
            break
    _print_differences(run, found)
    if not found:
        near = f", {TOLERANCES['another trainer']}" if algorithm is not None else ""
        of = f" ({only})" if only else ""
        print(f"{_steps_text(first, last)}: {', '.join(stages)} follow from the recorded inputs{near}{of}.")
        print(NOT_RECOMPUTED)
    return unbroken and not found


def _rewards(run: RunDirectory, first: int, last: int, only: str | None) -> bool:
    from clew.diagnose.rewards import recompute_rewards

    config = configuration.load(run.config_path, ["launch.mode=local"])
    found = asyncio.run(recompute_rewards(run, config, range(first, last + 1), only))
    for each in found[:REWARDS_SHOWN]:
        print(each)
    if more := found[REWARDS_SHOWN:]:
        print(f"… and {len(more)} more")
    if traces := [each.traceback.rstrip() for each in found if each.traceback]:
        print(f"traceback of the first error:\n{traces[0]}")
    count = "1 episode is" if len(found) == 1 else f"{len(found)} episodes are"
    rewards = "the rewards of all episodes are" if not found else f"the rewards of {count} not"
    print(f"{_steps_text(first, last)}: {rewards} what {config.rollout.reward or config.rollout.workflow} gives now.")
    if found and not _changed_rewards(run, config, {each.step for each in found}):
        print(
            "The files of the reward and the workflow are those that the record names. So they may depend on the time, "
            "on chance, on the environment, or on a module that they import."
        )
    return not found


def _changed_rewards(run: RunDirectory, config: Config, steps: Iterable[int]) -> bool:
    """Return whether the file of the workflow or of the reward function has changed since one of the steps was made."""
    from clew.training.custom import digest_of_file

    named = {"rollout.reward": config.rollout.reward, "rollout.workflow": config.rollout.workflow}
    files = {field: dotted.file_of(path) for field, path in named.items() if path}
    now = {field: digest_of_file(str(file)) for field, file in files.items() if file}
    then = [run.steps.read(step).get("code", {}) for step in steps]
    return any(each.get(field) != now.get(field) for each in then for field in named)


def _train_again(
    run: RunDirectory, first: int, last: int, stop: str | None, device: str | None, verify: bool, *, named: Path
) -> bool:
    from clew.diagnose.debugger import stop_at
    from clew.loop.replay import configure_as, engine_at, replay
    from clew.training.ranks import Ranks

    with Ranks.joined() as ranks, ExitStack() as progress_stack:
        began = time.perf_counter()
        engine = engine_at(run, first, device, ranks)
        print(f"from checkpoint {engine.version} of {named} ({time.perf_counter() - began:.1f} s)", flush=True)
        if stop is not None:
            stop_at(engine, range(first, last + 1), stop)
        because, unbroken = None, True
        if verify and ranks.leads:
            unbroken = chain_holds(run, range(engine.version, min(last + 1, run.steps.count())))
        advance = None
        if engine.version < first and ranks.leads and stop is None:  # a debugger needs the terminal
            doing = f"training again up to step {first - 1}"
            advance = progress_stack.enter_context(progress(doing, total=first - engine.version, unit="steps"))
        try:
            for done in replay(run, engine, min(last, run.steps.count() - 1), verify=verify):
                if done.step < first and not done.differences:
                    if advance is not None:
                        advance()
                    continue
                progress_stack.close()
                if verify and done.because != because:
                    because = done.because
                    print(f"compared {done.tolerance}{f': {because}' if because else ''}", flush=True)
                if done.differences:
                    _print_differences(run, done.differences)
                    return False
                numbers, seconds = _loss_and_gradient(done.result.metrics), sum(done.result.timings.values())
                weights = f"weights {done.result.digests['weights']} ({seconds:.2f} s)"
                print(f"step {done.step}: {'agrees' if verify else 'trained'}. {numbers}, {weights}", flush=True)
            progress_stack.close()
            if last == run.steps.count():
                nothing = "it is trained, and there is nothing to compare it with"
                print(f"step {last} was not committed: {nothing}", flush=True)
                configure_as(run, engine, None)
                metrics = engine.train_step(run.steps.read_data(last)).metrics
                print(f"step {last}: {_loss_and_gradient(metrics)}")
                return unbroken
        except DifferenceFound as altered:
            _print_differences(run, [altered.difference])
            return False
        except BdbQuit:
            raise Interrupted("left the debugger; nothing was compared from there on, and nothing written.") from None
        result = "every stage agrees with the record" if verify else "nothing was compared"
        print(f"{_steps_text(first, last)}: {result}.")
        return unbroken


def _loss_and_gradient(metrics: Mapping[str, float]) -> str:
    return f"loss {metrics['loss']:.6g}, gradient {metrics['grad_norm']:.6g}"


def _print_differences(run: RunDirectory, found: list[Difference]) -> None:
    """Print the first difference, what it suggests, and the names of the stages that differ after it."""
    if not found:
        return
    print(f"FIRST DIFFERENCE  {found[0]}")
    for line in suggestions(found[0], {"": run}):
        print(line)
    if after := [stage for stage in dict.fromkeys(each.stage for each in found) if stage != found[0].stage]:
        print(f"after it, these stages of the step differ too: {', '.join(after)}")


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
