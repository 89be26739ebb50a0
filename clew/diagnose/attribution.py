"""Attribution of a step to its sequences, by training the step again, or estimated from the record alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.kl import divergences
from clew.algorithms.reward_statistics import centred
from clew.console import tracked
from clew.diagnose.stages import check_aligned, read_batch_with_warning, warn_if_altered
from clew.errors import TrainingError
from clew.loop.differences import STAGES
from clew.printing import print
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.record.steps import Stages

if TYPE_CHECKING:
    from clew.training.engine import TrainEngine
    from clew.training.results import Prepared
    from clew.training.sequence_gradients import Contribution, CriticContribution


@dataclass(frozen=True, kw_only=True)
class SequenceAttribution:
    """Contribution of one sequence to a step."""

    sequence: Sequence
    measures: Mapping[str, float]
    """Known measures by name, as for `clew blame --by`: gradient, pull, loss, kl, behaviour_k3, critic."""
    shown: Mapping[str, float]
    """Numbers shown for the sequence whatever the ranking, by name."""
    tokens: Mapping[str, np.ndarray]
    """[N] values of its trained tokens by name: position, pull, behaviour, advantage, … Only known ones."""
    finite: bool
    """True if its loss and gradient are finite; if only the record was read, if all its recorded numbers are."""
    not_finite: str | None = None
    """Place where NaN or infinity first appeared when the sequence was computed alone."""


@dataclass(frozen=True, kw_only=True)
class StepAttribution:
    """Contributions of all sequences of a step."""

    sequences: list[SequenceAttribution]
    """One entry per sequence. If the step stopped at a refused update, the sequences of later updates have none."""
    count: int
    """Number of sequences in the step."""
    decode: Callable[[int], str]
    """Function that returns the text of a token."""
    only_recorded: str = ""
    """Reason why only the record was read; empty if the step was trained again."""
    why_unknown: Mapping[str, str]
    """Reason why a measure is not known, by the measure's name."""
    not_finite: str | None
    """First recorded place with NaN or infinity; None if all that was recorded is finite. `not_finite` of a sequence
    then says where NaN or infinity first appeared in the computation."""


def attribute_step(run: RunDirectory, step: int) -> StepAttribution:
    """Return the contributions of all sequences to a step, which may also be one that failed."""
    if not run.steps.by_clew:
        return _from_record(run, step, "another trainer wrote it, which leaves no checkpoint that Clew can train from")
    checkpoints = run.checkpointed()
    if not any(version <= step for version in checkpoints):
        there = ", ".join(map(str, checkpoints)) or "none"
        return _from_record(run, step, f"there is no checkpoint at or before step {step} (there: {there})")
    return _train_again(run, step)


# Trained again ---------------------------------------------------------------------------------------------------


def _train_again(run: RunDirectory, step: int) -> StepAttribution:
    from clew.loop.replay import configure_as, engine_at, replay
    from clew.training.sequence_gradients import contributions, critic_contributions

    engine, batch = engine_at(run, step), read_batch_with_warning(run, step)
    again = f"training again up to step {step - 1}"
    for done in tracked(replay(run, engine, step - 1), again, total=step - engine.version, unit="steps"):
        if done.differences:
            print(f"before step {step}: {done.differences[0]}", file=sys.stderr)
    configure_as(run, engine, run.steps.read(step) if step < run.steps.count() else None)
    with np.errstate(invalid="ignore"):  # `StepAttribution.not_finite` names what is not finite
        prepared = engine.prepare(batch)
    try:
        one_by_one = contributions(engine, prepared)
        found = list(tracked(one_by_one, "computing gradients", total=len(batch), unit="sequences"))
        critics = {each.row: each for each in critic_contributions(engine, prepared)}
    except TrainingError as error:
        raise TrainingError(
            f"{error}\n`clew blame` computes each sequence alone, as it may be in any micro-batch."
        ) from error
    return StepAttribution(
        sequences=[_of_trained(engine, prepared, batch[each.row], each, critics.get(each.row)) for each in found],
        count=len(batch),
        decode=lambda token: str(engine.policy.tokenizer.decode([token])),
        why_unknown={"kl": _NO_REFERENCE, "critic": "this step has none (algorithm.advantages=gae has one)"},
        not_finite=_data_not_finite([batch[each.row] for each in found]),
    )


def _of_trained(
    engine: TrainEngine, prepared: Prepared, row: Sequence, own: Contribution, critic: CriticContribution | None
) -> SequenceAttribution:
    """Return what a sequence contributed. `critic` is None if no update of a critic was computed from it."""
    where_N, proximal_S, reference_S = own.where_N, prepared.proximal_S, prepared.reference_S
    arrays = {
        **_of_data(row, engine.version),
        "pull": np.where(np.isfinite(own.weights_N), own.weights_N, np.inf),
        "proximal": own.logprobs_N if proximal_S is None else proximal_S[where_N],
        "current": own.logprobs_N,
        "advantage": prepared.advantages_S[where_N],
        "loss": own.losses_N,
        "rejected": own.rejected_N,
        "reference": None if reference_S is None else reference_S[where_N],
    }
    tokens = {name: values for name, values in arrays.items() if values is not None}
    diverging = _divergences(tokens, engine.config.algorithm.kl_estimator)
    total = max(1, int(prepared.tokens.loss_mask_S.sum()))
    measures = {"gradient": own.gradient_norm, "loss": own.loss, "pull": float(tokens["pull"].sum())}
    measures |= {name: float(values.sum()) / total for name, values in diverging.items()}
    shown = {"gradient": own.gradient_norm, "share": own.share, "loss": own.loss} | _rejected_share(tokens)
    if engine.critic is not None:
        # 0 * loss is NaN if the loss is not finite, which ranks the sequence first
        measures["critic"] = 0.0 if critic is None else critic.gradient_norm + 0 * critic.loss
    if critic is not None:
        shown |= {"critic's gradient": critic.gradient_norm, "critic's loss": critic.loss}
    return SequenceAttribution(
        sequence=row,
        measures=measures,
        shown=shown,
        tokens=tokens | diverging,
        finite=math.isfinite(own.gradient_norm + own.loss),
        not_finite=own.first_not_finite,
    )


# The record alone ------------------------------------------------------------------------------------------------


def _from_record(run: RunDirectory, step: int, why: str) -> StepAttribution:
    """Return what the sequences contributed, as far as the recorded data and stages determine it.

    The pull of a token is that of the plain policy gradient: |advantage x current / behaviour probability| x (1 -
    current probability), divided by the number of tokens that were trained in the sequence's update.
    """
    batch, stages, summary = run.steps.read_data(step), Stages(digests={}, arrays={}), {}
    if run.steps.json_path(step).exists():  # otherwise it failed, and may have stages of only some ranks
        stages, summary = run.steps.read_stages(step, batch), run.steps.read(step)
        warn_if_altered(run, batch, stages, summary)
    check_aligned(run, step, batch, stages, stages.arrays)
    estimator = summary.get("config", {}).get("algorithm", {}).get("kl_estimator", "k3")
    trained = [int(row.loss_mask.sum()) for row in batch]
    total, of_updates = max(1, sum(trained)), _trained_in_updates(trained, summary.get("plan", []))
    assumed = _rewards_over_group_mean(batch)
    sequences: list[SequenceAttribution] = []
    for row, of_update in zip(batch, of_updates, strict=True):
        known = {name: values[row.id][row.loss_mask] for name, values in stages.arrays.items()}
        data = {**_of_data(row, step), "advantage": np.full(int(row.loss_mask.sum()), assumed[row.id])}
        sequences.append(_of_recorded(row, data, known, estimator, of_update=of_update, total=total))
    if "reference_logprobs" in stages.arrays and "kl" not in stages.arrays and not run.steps.by_clew:
        why += "; its kl is estimated by k3"
    if "advantages" not in stages.arrays:
        why += "; it has no advantages, so each reward minus the mean of its group is used instead"
    trains = "it is found by training the step again"
    return StepAttribution(
        sequences=sequences,
        count=len(batch),
        decode=lambda token: "",
        only_recorded=why,
        why_unknown={
            "gradient": trains,
            "critic": trains,
            "loss": "the record has no stage 'loss'",
            "kl": _NO_REFERENCE,
            "behaviour_k3": "the record has no stage 'logprobs'",
        },
        not_finite=(
            _data_not_finite(batch)
            or _stages_not_finite(batch, stages)
            or _metrics_not_finite(summary.get("metrics", {}))
        ),
    )


def _of_recorded(
    row: Sequence,
    data: Mapping[str, np.ndarray],
    stages: Mapping[str, np.ndarray],
    estimator: str,
    *,
    of_update: int,
    total: int,
) -> SequenceAttribution:
    """Return what a sequence contributed.

    Args:
        data: Values of its trained tokens [N] that follow from its data; the advantage is used if no stage has one.
        stages: Values of its trained tokens [N] by stage.
        of_update: Number of trained tokens in the sequence's update.
        total: Number of trained tokens in the step.
    """
    tokens = {**data, **{name: stages[stage] for stage, name in _STAGES.items() if stage in stages}}
    current = tokens.get("current", tokens["behaviour"]).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.exp(current - tokens["behaviour"])
        # -expm1(logprob) is 1 - probability, accurate even where that is far below the rounding error of 1
        pull = np.abs(tokens["advantage"] * ratio) * -np.expm1(np.minimum(current, 0)) / of_update
    untaught = tokens["advantage"] == 0  # tokens without effect: 0 times an infinite ratio would be NaN
    if "rejected" in tokens:
        untaught |= tokens["rejected"] != 0
    tokens["pull"] = np.where(untaught, 0, pull)
    tokens |= _divergences(tokens, estimator)
    measures = {"pull": float(tokens["pull"].sum())}
    if "loss" in tokens:
        measures["loss"] = float(tokens["loss"].sum()) / of_update
    measures |= {name: float(tokens[name].sum()) / total for name in ("kl", "behaviour_k3") if name in tokens}
    shown = {name: measures[name] for name in ("pull", "loss") if name in measures} | _rejected_share(tokens)
    numbers = (row.reward, tokens["behaviour"], row.temperatures[row.loss_mask], *stages.values())
    finite = all(bool(np.isfinite(each).all()) for each in numbers)
    return SequenceAttribution(sequence=row, measures=measures, shown=shown, tokens=tokens, finite=finite)


_STAGES = {
    "advantages": "advantage",
    "proximal_logprobs": "proximal",
    "logprobs": "current",
    "reference_logprobs": "reference",
    "kl": "kl",
    "rejected": "rejected",
    "loss": "loss",
}
"""Stages that are read, and their names among the numbers of a token."""
_NO_REFERENCE = "this step has no logprobs of a reference model (algorithm.kl_coef is 0, or they are not on record)"


def _of_data(row: Sequence, step: int) -> dict[str, np.ndarray]:
    return {
        "position": np.flatnonzero(row.loss_mask),
        "behaviour": row.logprobs[row.loss_mask],
        "lag": step - row.versions[row.loss_mask],
    }


def _rejected_share(tokens: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return {"rejected": share of a sequence's tokens that were rejected}, or {} if the step rejects nothing."""
    if "rejected" not in tokens:
        return {}
    return {"rejected": float((tokens["rejected"] != 0).mean()) if len(tokens["rejected"]) else 0.0}


def _divergences(tokens: Mapping[str, np.ndarray], estimator: str) -> dict[str, np.ndarray]:
    """Return for each token the values whose means are the step's metrics kl and behaviour_k3."""
    found: dict[str, np.ndarray] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        if "reference" in tokens and "kl" not in tokens:
            current = tokens.get("current", tokens["behaviour"])
            found["kl"] = divergences(current, tokens["reference"], estimator)
        proximal = tokens.get("proximal", tokens.get("current"))
        if proximal is not None:
            found["behaviour_k3"] = divergences(tokens["behaviour"], proximal, "k3")
    return found


def _trained_in_updates(trained: list[int], plan: list[list[list[int]]]) -> list[int]:
    """Return how many tokens were trained in each sequence's update, or in the step if the update is not on record."""
    found = [max(1, sum(trained))] * len(trained)
    for minibatch in plan:
        rows = [row for micro in minibatch for row in micro if row < len(trained)]
        of_update = max(1, sum(trained[row] for row in rows))
        for row in rows:
            found[row] = of_update
    return found


def _rewards_over_group_mean(batch: SequenceABC[Sequence]) -> dict[str, float]:
    """Return each sequence's reward minus the mean of its group's episodes, by sequence ID."""
    groups: dict[str, dict[str, list[Sequence]]] = {}
    for row in batch:
        groups.setdefault(row.group_id, {}).setdefault(row.episode_id, []).append(row)
    found: dict[str, float] = {}
    for episodes in groups.values():
        with np.errstate(invalid="ignore"):  # `StepAttribution.not_finite` names a reward that is not finite
            over_E = centred([[row.reward for row in of_episode] for of_episode in episodes.values()])
        ids = [row.id for of_episode in episodes.values() for row in of_episode]
        found |= zip(ids, over_E.tolist(), strict=True)
    return found


def _data_not_finite(batch: Iterable[Sequence]) -> str | None:
    """Return the first value in the data that cannot be computed with; None if all can.

    That is a reward or logprob that is NaN or infinite, or a temperature that is not above 0 and finite. All sequences
    are checked, because other sequences' advantages depend on them, too.
    """
    for row in batch:
        if not math.isfinite(row.reward):
            return f"the recorded reward of {row.id}: {row.reward}"
        of_tokens = {
            "behaviour logprob": np.isfinite(row.logprobs),
            "temperature": (row.temperatures > 0) & np.isfinite(row.temperatures),
        }
        for kind, good_T in of_tokens.items():
            bad = np.flatnonzero(row.loss_mask & ~good_T)
            if len(bad):
                return f"the recorded {kind} of token {bad[0]} of {row.id}"
    return None


def _stages_not_finite(batch: Iterable[Sequence], stages: Stages) -> str | None:
    """Return the first stage with NaN or infinity, and where it is; None if all are finite."""
    for name in [*(name for name in STAGES if name in stages.arrays), *sorted(set(stages.arrays) - set(STAGES))]:
        for row in batch:
            bad = np.flatnonzero(row.loss_mask & ~np.isfinite(stages.arrays[name][row.id]))
            if len(bad):
                return f"the recorded {name} of token {bad[0]} of {row.id} ({len(bad)} tokens)"
    return None


def _metrics_not_finite(metrics: Mapping[str, float]) -> str | None:
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    return f"the metric {bad[0]} ({metrics[bad[0]]}); all that is on record of the sequences is finite" if bad else None
