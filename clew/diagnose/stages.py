"""Checks of a step's record that need neither model nor checkpoint.

They check that a batch is the one that was trained on, and compute again the stages that need only recorded inputs
(`clew replay --stage`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

from clew.config import Algorithm
from clew.errors import ConfigError, RecordError
from clew.loop import differences
from clew.loop.differences import Difference, DifferenceFound
from clew.loop.recompute import COMPUTED, suspect_user_code
from clew.loop.tolerance import EXACT, TOLERANCES
from clew.printing import few, print
from clew.reading import flat
from clew.record import chain
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.record.steps import Stages
from clew.record.summary import configured
from clew.training.custom import needs_critic

WITHOUT_MODEL = ("data", "rewards", "advantages", "loss")
"""Stages that can be checked without a model."""


def check_stages(
    run: RunDirectory, step: int, stages: SequenceABC[str], only: str | None, algorithm: Algorithm | None
) -> list[Difference]:
    """Return the first difference in each of these stages of a step; if the data was altered, only that one.

    Args:
        stages: Names of the stages, out of `WITHOUT_MODEL`.
        only: ID of a group, an episode or a sequence; only its rows are compared.
        algorithm: Options with which another trainer computed advantages and loss; None if unknown. Clew's own steps
            record theirs.

    Raises:
        ConfigError: A stage needs the model.
        RecordError: The step has nothing with the ID `only`, or a stage cannot be computed from its record.
    """
    for stage in stages:
        if stage not in WITHOUT_MODEL:
            raise ConfigError(
                f"the stage {stage!r} cannot be computed from recorded inputs alone. These can: "
                f"{', '.join(WITHOUT_MODEL)}. Leave out --stage to train the step again, with model and checkpoint."
            )
    batch, summary = run.steps.read_data(step), run.steps.read(step)
    recorded, rows = run.steps.read_stages(step, batch), select_rows(run, step, batch, only)
    kept = [row.id for row in rows]
    found: list[Difference | None] = []
    if "data" in stages:
        then = {name: digest for name, digest in recorded.digests.items() if only is None or name in kept}
        whole = summary["digests"].get("data") if only is None else None
        altered = differences.in_batch(step, then, rows, whole, rewards_add_up=run.steps.by_clew)
        if altered is not None:  # the other stages would differ, or fail, because of it
            return [altered]
    if run.steps.by_clew:
        algorithm = configured(run.steps.json_path(step), summary)[1]
    else:
        summary = summary | {"plan": summary.get("plan") or [[list(range(len(batch)))]]}
        _check_other_trainer(step, stages, algorithm)
    if "rewards" in stages:
        found.append(differences.in_rewards(step, rows))
    for stage in ("advantages", "loss"):
        if stage in stages and algorithm is not None:
            _check_recorded(run, step, batch, recorded, stage, algorithm, summary["plan"])
            # A float64 critic's values are rounded in the record, so advantages computed from those may differ a bit.
            of_clew = TOLERANCES["recomputed"] if stage == "loss" or needs_critic(algorithm) else EXACT
            tolerance = of_clew if run.steps.by_clew else TOLERANCES["another trainer"]
            again = COMPUTED[stage](batch, recorded, summary["plan"], algorithm)
            then, now = ([side[name] for name in kept] for side in (recorded.arrays[stage], again))
            differs = differences.in_stage(step, stage, kept, then, now, tolerance)
            if differs is not None and run.steps.by_clew:
                differs = suspect_user_code(differs, batch, recorded, summary, algorithm, checked=False)
            found.append(differs)
    return [each for each in found if each is not None]


def read_batch_with_warning(run: RunDirectory, step: int) -> list[Sequence]:
    """Return the batch of a step. If it is not what was trained on, print the first difference to stderr."""
    batch = run.steps.read_data(step)
    if run.steps.json_path(step).exists():  # a failed step may have the stages of only some ranks
        warn_if_altered(run, batch, run.steps.read_stages(step), run.steps.read(step))
    return batch


def chain_holds(run: RunDirectory, steps: range, whose: str = "") -> bool:
    """Print the breaks in the chain of commits, and what cannot be checked. Return True if there is no break.

    Args:
        steps: The steps whose data and stages are also compared with their digests.
        whose: Prefix of each printed line that names the run, if two runs are checked.
    """
    found = chain.breaks(run, steps)
    for line in chain.breaks_in_words(found, whose):
        print(line)
    if not_checked := chain.not_checked(run, steps):
        print(f"{whose}{not_checked}")
    return not found


def suggestions(found: Difference, runs: Mapping[str, RunDirectory]) -> Iterator[str]:
    """Yield lines that suggest the cause of a difference: its own hint, and what is unusual about its step in each run.

    Args:
        runs: The compared runs, by the prefix that names each in its line.
    """
    if found.suggests:
        yield f"this suggests: {found.suggests}"
    for whose, run in runs.items():
        if odd := _stands_out(run, found.step):
            yield f"this suggests: {whose}{odd}"


def _stands_out(run: RunDirectory, step: int) -> str:
    """Return a clause about the first setting that only this step has, while its neighbours agree; "" without one."""
    around = [each for each in (step - 1, step, step + 1) if run.steps.json_path(each).exists()]
    if len(around) < 3:
        return ""
    said = (run.steps.read(each) for each in around)
    before, here, after = (flat({key: each.get(key) for key in ("config", "environment", "code")}) for each in said)
    for name in {**before, **here}:
        if before.get(name) == after.get(name) != here.get(name):
            return f"{name} is {here.get(name)} at step {step}, and {before.get(name)} just before and after it"
    return ""


def warn_if_altered(run: RunDirectory, batch: list[Sequence], stages: Stages, summary: dict[str, Any]) -> None:
    """Print the first difference to stderr if a batch is not what was trained on."""
    whole = summary["digests"]["data"]
    found = differences.in_batch(summary["step"], stages.digests, batch, whole, rewards_add_up=run.steps.by_clew)
    if found is not None:
        print(DifferenceFound(run, found), file=sys.stderr)


def select_rows(run: RunDirectory, step: int, batch: list[Sequence], only: str | None) -> list[Sequence]:
    """Return the rows of a group, an episode or a sequence; all if `only` is None. Raises RecordError if none fits."""
    found = [row for row in batch if only is None or only in (row.id, row.episode_id, row.group_id)]
    if not found:
        groups = sorted({row.group_id for row in batch})
        raise RecordError(f"step {step} of {run.path} has no {only}. It consumed {few(groups)}.")
    return found


def _check_other_trainer(step: int, stages: SequenceABC[str], algorithm: Algorithm | None) -> None:
    """Raise RecordError for the first stage that cannot be computed again because another trainer recorded it."""
    for stage in stages:
        if stage == "rewards":
            raise RecordError(
                f"the rewards of step {step} cannot be computed again: another trainer recorded them, and may have "
                f"weighted or clipped their parts. Use --stage data,advantages,loss."
            )
        if stage != "data" and algorithm is None:
            raise RecordError(
                f"the {stage} of step {step} cannot be computed again: another trainer recorded it, and how it was "
                f"computed is not on record. Say it in Clew's words: `--stage {stage} algorithm.preset=grpo`, or any "
                f"fields of algorithm."
            )


def _check_recorded(
    run: RunDirectory,
    step: int,
    batch: list[Sequence],
    recorded: Stages,
    stage: str,
    algorithm: Algorithm,
    plan: list[list[list[int]]],
) -> None:
    """Raise RecordError if the plan is damaged, or a stage or something that it is computed from is not on record."""
    if sorted(row for minibatch in plan for rows in minibatch for row in rows) != list(range(len(batch))):
        raise RecordError(
            f"{run.steps.json_path(step)}: its plan does not have each of the step's {len(batch)} sequences exactly "
            f"once, so it was altered."
        )
    needed = ["advantages", "proximal_logprobs", "logprobs"] if stage == "loss" else []
    if algorithm.kl_coef > 0 and (algorithm.kl_in == "loss") == (stage == "loss"):
        needed.append("reference_logprobs")
    if stage == "loss" and algorithm.entropy_coef > 0:
        needed.append("entropies")
    if stage == "advantages" and needs_critic(algorithm):
        needed.append("values")
        if algorithm.bootstrap_truncated:
            needed.append("bootstrap_values")
    for name in [*needed, stage]:
        if name not in recorded.arrays:
            why = "it was altered" if run.steps.by_clew else f"the {stage} cannot be computed again without it"
            raise RecordError(f"{run.steps.stage_path(step, 0)} has no stage {name!r}: {why}.")
        check_aligned(run, step, batch, recorded, [name])


def check_aligned(run: RunDirectory, step: int, batch: list[Sequence], recorded: Stages, names: Iterable[str]) -> None:
    """Raise RecordError if one of these stages does not have one number per token."""
    for name in names:
        for row in batch:
            count = len(recorded.arrays[name][row.id])
            if count != len(row.input_ids):
                raise RecordError(
                    f"{run.steps.stage_path(step, 0).parent}: {name} of {row.id} has {count} numbers, the sequence "
                    f"{len(row.input_ids)} tokens: one of the two was altered."
                )
