"""Entry point of `clew replay`: chooses the way to replay, and prints the result."""

from __future__ import annotations

import sys
import time
from bdb import BdbQuit
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew import config as configuration
from clew.config import Algorithm
from clew.console import tracked
from clew.diagnose.stages import WITHOUT_MODEL, chain_holds, check_stages, suggestions
from clew.errors import ConfigError, Interrupted, RecordError
from clew.loop.differences import Difference, DifferenceFound
from clew.loop.tolerance import TOLERANCES
from clew.printing import print
from clew.record.bundle import opened
from clew.record.run import RunDirectory
from clew.record.steps import parse_steps, steps_in_words

if TYPE_CHECKING:
    from clew.loop.replay import Replayed
    from clew.training.engine import TrainEngine

BREAKS = ("advantages", "loss", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `clew replay`, as its help describes them.

    `stages`, `stop`, `reward` and `overrides` are different ways to replay, so at most one of them may be set. There is
    one exception: for another trainer's record, `overrides` may go with `stages`; see `describes_other_trainer`.
    """

    steps: str | None = None
    """Steps to replay; None: all steps of a run, or the one step of a bundle."""
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
        """True if `stages` and `overrides` are set, and no other mode. The overrides then describe how another trainer
        computed the stages."""
        return self.modes == ["--stage", "key=value"]

    def check(self) -> None:
        """Raise ConfigError if a value is unknown, or if options can never be combined, whatever the run."""
        if self.stop is not None and self.stop not in BREAKS:
            raise ConfigError(f"--break {self.stop}: expected one of {', '.join(BREAKS)}.")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: expected cpu or cuda.")
        if self.only is not None and self.stages is None and not self.reward:
            raise ConfigError(
                f"--only {self.only} needs --stage or --reward, because a step is always trained as a whole."
            )
        if self.device is not None and self.modes not in ([], ["--break"]):
            raise ConfigError(
                f"--device {self.device} says where steps are trained, and {self.modes[0]} does not use it. Leave one "
                f"out.{' Use model.device=' + self.device + ' in its place.' if self.modes == ['key=value'] else ''}"
            )
        if not self.verify and (self.stages is not None or self.reward or self.overrides):
            raise ConfigError(
                f"--no-verify trains again without comparing, and {self.modes[0]} does not allow that. Leave one out."
            )
        if self.ranks > 1 and self.modes:
            raise ConfigError(
                f"--ranks {self.ranks} trains with several processes, but {self.modes[0]} uses one. Leave one out."
            )

    def check_against(self, run: RunDirectory, first: int) -> None:
        """Raise ClewError if this run cannot be replayed in this way from step `first` on."""
        if len(self.modes) > 1 and not (self.describes_other_trainer and not run.steps.by_clew):
            raise ConfigError(f"{' and '.join(self.modes)} are different ways to replay. Use one of them.")
        if not run.steps.json_path(first).exists() and (self.stages is not None or self.ranks > 1):
            raise RecordError(
                f"Cannot compare step {first} of {run.path}: it was begun but never committed. Leave out --stage and "
                f"--ranks to train it here, add --break to stop in it, or ask `clew blame` for the cause."
            )
        if (self.stages is not None or self.reward) and run.supervised and self.stages != "data":
            raise RecordError(
                f"{run.path} is a run of `clew sft`: it has no rewards and no advantages. Leave out --stage and "
                f"--reward to train its steps again and compare them."
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
        steps = _chosen_steps(run, options, bundle)
        options.check_against(run, steps[0])
        if options.stages is not None:
            stages, algorithm = options.stages.split(","), None
            if options.describes_other_trainer:
                algorithm = _algorithm_of_another(options.overrides, stages)
            return _recompute_stages(run, steps, stages, options.only, algorithm)
        if bundle is not None and bundle["stages_only"]:
            training = {"--device": options.device, "--no-verify": not options.verify, "--ranks": options.ranks > 1}
            if unusable := [*options.modes, *(name for name, chosen in training.items() if chosen)]:
                raise RecordError(
                    f"Cannot use {', '.join(unusable)} on {target}: it was written with "
                    f"--stages-only, so it lacks the weights and the rest of the run."
                )
            print("this bundle has no weights: the stages that need none are compared")
            stages = WITHOUT_MODEL if run.steps.by_clew and not run.supervised else ("data",)
            return _recompute_stages(run, steps, stages)
        if options.reward:
            from clew.diagnose.reward_replay import compare_rewards

            return compare_rewards(run, steps, options.only)
        if options.overrides:
            from clew.diagnose.counterfactual import counterfactual

            counterfactual(run, steps, [*options.overrides], from_bundle=bundle is not None)
            return True
        return _train_again(run, steps, options, named=target)


def _chosen_steps(run: RunDirectory, options: Options, bundle: dict[str, Any] | None) -> range:
    """Return the steps to replay. Raises RecordError if there are none, or if they are not on record."""
    count, text = run.steps.count(), options.steps
    if text == str(count) and run.steps.has_data(count):
        return range(count, count + 1)  # it failed, or was interrupted
    if not count:
        begun = f" `--step {count}` trains on the batch of the step that was begun."
        raise RecordError(f"{run.path} has no committed step to replay.{begun if run.steps.has_data(count) else ''}")
    if text is not None:
        steps = parse_steps(text, count)
        if bundle is not None and steps[0] < bundle["first"]:
            held = f"the steps {bundle['first']} to {count - 1}"
            raise RecordError(f"--steps {text}: the bundle {run.path} holds {held}.")
        return steps
    if bundle is not None:
        steps = range(bundle["step"], bundle["step"] + 1)
    else:
        first = next((step for step in range(count) if run.steps.has_data(step)), 0)
        if first and options.stages is None and not options.reward:  # training begins at a checkpoint
            first = next((version for version in run.checkpointed() if first <= version < count), first)
        if first:
            print(f"replaying from step {first} on: the record no longer has everything that earlier steps need")
        steps = range(first, count)
    return steps if options.only is None else _step_of(run, options.only, steps)


def _step_of(run: RunDirectory, only: str, steps: range) -> range:
    """Return the step that trained on the group, the episode or the sequence with this ID."""
    for step in tracked(steps, f"searching for {only}", total=len(steps), unit="steps"):
        table = run.steps.read_table(step)
        if any(only in table.column(name).to_pylist() for name in ("id", "episode_id", "group_id")):
            return range(step, step + 1)
    raise RecordError(f"Cannot find {only}: {steps_in_words(steps)} of {run.path} did not train on it.")


# Stages from recorded inputs ------------------------------------------------------------------------------------------


NOT_RECOMPUTED = (
    "not computed again: metrics (such as metrics.response_length), evaluation, timings, committed_at, environment, "
    "tensors, the other stages, and checkpoints. Leave out --stage to compute metrics, tensors and checkpoints again."
)
"""Message that lists what `--stage` does not check."""

LIMIT = "sampling.max_new_tokens"
"""Field from which the defaults of algorithm.loss_constant and algorithm.overlong_penalty are derived."""


def _algorithm_of_another(overrides: Sequence[str], stages: Sequence[str]) -> Algorithm:
    """Return the algorithm that the overrides describe: the one with which another trainer made the record.

    Raises:
        ConfigError: An override is neither a field of algorithm nor `LIMIT`, or a setting that a stage needs is not
            known.
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
    if algorithm.minibatches > 1 and algorithm.loss_mean != "token" and "loss" in stages:
        raise ConfigError(
            f"algorithm.minibatches={algorithm.minibatches} with algorithm.loss_mean={algorithm.loss_mean}: the "
            f"loss depends on which sequences shared a mini-batch, and that is not on record. Use --stage advantages "
            f"instead."
        )
    return algorithm


def _recompute_stages(
    run: RunDirectory,
    steps: range,
    stages: Sequence[str],
    only: str | None = None,
    algorithm: Algorithm | None = None,
) -> bool:
    """Compute stages of these steps again, and stop at the first step that differs from its record.

    The other arguments are those of `check_stages`.

    Returns:
        True if nothing differs, and the chain of commits is intact.
    """
    found: list[Difference] = []
    unbroken = chain_holds(run, steps)
    for step in tracked(steps, "comparing", total=len(steps), unit="steps"):
        found = check_stages(run, step, stages, only, algorithm)
        if found:
            break
    _print_differences(run, found)
    if not found:
        near = f", {TOLERANCES['another trainer']}" if algorithm is not None else ""
        of = f" ({only})" if only else ""
        print(f"{steps_in_words(steps)}: {', '.join(stages)} follow from the recorded inputs{near}{of}.")
        print(NOT_RECOMPUTED)
    return unbroken and not found


# Training again -------------------------------------------------------------------------------------------------------


def _train_again(run: RunDirectory, steps: range, options: Options, *, named: Path) -> bool:
    """Train the steps again from the nearest earlier checkpoint, and print how each compares with its record."""
    from clew.loop.replay import engine_at, replay
    from clew.training.ranks import Ranks

    committed = run.steps.count()
    with Ranks.joined() as ranks:
        began = time.perf_counter()
        engine = engine_at(run, steps[0], options.device, ranks)
        print(f"from checkpoint {engine.version} of {named} ({time.perf_counter() - began:.1f} s)", flush=True)
        if options.stop is not None:
            _stop_at(engine, steps, options.stop)
        unbroken = True
        if options.verify and ranks.leads:
            unbroken = chain_holds(run, range(engine.version, min(steps.stop, committed)))
        try:
            replayed = replay(run, engine, min(steps[-1], committed - 1), verify=options.verify)
            # Each iteration trains a step: first those before the requested steps, then these.
            before = range(engine.version, steps[0])
            shown = ranks.leads and options.stop is None  # a debugger needs the terminal
            differs_before = _first_differing(islice(replayed, len(before)), before, shown=shown)
            because = None
            # What follows a step that differs would differ, too.
            for done in replayed if differs_before is None else [differs_before]:
                if options.verify and done.because != because:
                    because = done.because
                    print(f"compared {done.tolerance}{f': {because}' if because else ''}", flush=True)
                if done.differences:
                    _print_differences(run, done.differences)
                    return False
                _print_trained(done, "agrees" if options.verify else "trained")
            if steps[-1] == committed:
                _train_uncommitted(run, engine, committed)
                return unbroken
        except DifferenceFound as altered:
            _print_differences(run, [altered.difference])
            return False
        except BdbQuit:
            raise Interrupted("left the debugger: nothing after that was compared, and nothing was written.") from None
        result = "every stage agrees with the record" if options.verify else "nothing was compared"
        print(f"{steps_in_words(steps)}: {result}.")
        return unbroken


def _stop_at(engine: TrainEngine, steps: range, stage: str) -> None:
    """Make the engine stop in a debugger whenever it comes to `stage` of one of these steps.

    The stage's inputs are in scope. Before the loss and before its backward pass, it stops in each micro-batch.
    """
    known: dict[str, Any] = {}

    def watch(at: str, scope: dict[str, Any]) -> None:
        known.update({name: scope[name] for name in ("batch", "tokens", "plan") if name in scope})
        if at != stage or engine.version not in steps:
            return
        names = {"engine": engine, "model": engine.policy.model, "step": engine.version, **known, **scope}
        where = ""
        if "micro" in scope:
            # rows_N in the scope counts rows from 0 within the micro-batch, so it does not index `batch`
            names["batch_rows_N"] = rows_N = known["tokens"].row_of_S[scope["micro"].where_N]
            minibatches = [[set(rows) for rows in minibatch] for minibatch in known["plan"]]
            update, micro, count = next(
                (number, place, len(minibatch))
                for number, minibatch in enumerate(minibatches)
                for place, rows in enumerate(minibatch)
                if set(rows_N.tolist()) <= rows
            )
            where = f" of micro-batch {micro} of {count} in update {update} (token i is of batch[batch_rows_N[i]])"
        print(
            f"step {engine.version}, before {stage}{where}. In scope: {', '.join(names)}", file=sys.stderr, flush=True
        )
        # Compiled code, so that the debugger's frame has these names; `pass` is the line at which it stops.
        exec(compile("breakpoint()\npass\n", f"<step {engine.version}, before {stage}>", "exec"), names)

    engine.watch = watch


def _first_differing(replayed: Iterable[Replayed], steps: range, *, shown: bool) -> Replayed | None:
    """Train the steps before the requested ones, by iterating over `replayed`.

    Args:
        shown: True to show the progress.

    Returns:
        The first of these steps that differs from the record; None if they all agree.
    """
    if shown and steps:
        replayed = tracked(replayed, f"training again up to step {steps[-1]}", total=len(steps), unit="steps")
    return next((done for done in replayed if done.differences), None)


def _train_uncommitted(run: RunDirectory, engine: TrainEngine, step: int) -> None:
    """Train on the batch of a step that failed or was interrupted. There is no record to compare the result with."""
    from clew.loop.replay import configure_as

    print(f"step {step} was not committed: it is trained here, but there is no record to compare it with", flush=True)
    configure_as(run, engine, None)
    metrics = engine.train_step(run.steps.read_data(step)).metrics
    print(f"step {step}: {_loss_and_gradient(metrics)}")


def _print_trained(done: Replayed, what: str) -> None:
    seconds = sum(done.result.timings.values())
    weights = f"weights {done.result.digests['weights']} ({seconds:.2f} s)"
    print(f"step {done.step}: {what}. {_loss_and_gradient(done.result.metrics)}, {weights}", flush=True)


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
