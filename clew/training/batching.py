"""Division of a batch into mini-batches (one optimizer update each) of micro-batches (one forward pass each), and the
weight of each sequence's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from clew.config import Algorithm
from clew.record import rows as record

Plan = list[list[list[int]]]
"""Plan of a step: plan[mini-batch][micro-batch] lists rows of the batch.

With N ranks (with training.tp: N groups of ranks), rank r computes micro-batches r, r + N, ... of each mini-batch. All
ranks have the same number of them, so some may be empty. The plan is valid JSON and goes into the record.
"""

CLOSE_AFTER_TOKENS = 2048
"""Number of tokens after which a padded micro-batch is closed when the next row is much shorter."""
SHORT = 0.75
"""Share of a micro-batch's longest row below which a row counts as much shorter: padding it would cost more than
another forward pass."""


def plan_step(
    lengths: Sequence[int],
    group_ids: Sequence[str],
    *,
    minibatches: int,
    budget: int,
    packed: bool,
    ranks: int = 1,
    width: int = 1,
) -> Plan:
    """Split a batch into mini-batches of whole groups, and each mini-batch into micro-batches.

    The groups keep their order, and mini-batches have as equal numbers of groups as possible. There are fewer
    mini-batches if there are fewer groups. `lengths` and `group_ids` have one entry per row; see `deal` for the rest.
    """
    rows_of: dict[str, list[int]] = {}
    for row, group_id in enumerate(group_ids):
        rows_of.setdefault(group_id, []).append(row)
    groups = list(rows_of.values())
    count = min(minibatches, len(groups))
    bounds = [len(groups) * i // count for i in range(count + 1)]
    chosen = [[row for group in groups[first:last] for row in group] for first, last in pairwise(bounds)]
    return [deal(lengths, rows, budget=budget, packed=packed, ranks=ranks, width=width) for rows in chosen]


def deal(
    lengths: Sequence[int], rows: Sequence[int], *, budget: int, packed: bool, ranks: int = 1, width: int = 1
) -> list[list[int]]:
    """Return the micro-batches of all ranks: the first of each rank, then the second of each, ... Some may be empty.

    Args:
        packed: See `pack`.
        width: The model's hidden size; it sets the length above which attention costs more than the rest.
    """
    shares = balance(lengths, rows, ranks=ranks, width=width)
    plans = [pack(lengths, share, budget=budget, packed=packed) for share in shares]
    most = max(len(each) for each in plans)
    return [each[place] if place < len(each) else [] for place in range(most) for each in plans]


def balance(lengths: Sequence[int], rows: Sequence[int], *, ranks: int, width: int) -> list[list[int]]:
    """Return the rows of each rank, such that all ranks have about the same amount of work.

    Rows are dealt from the longest to the shortest, each to the rank with the least work so far. The cost of T tokens
    in one row is T x (12 x width + T): in a layer of the usual proportions a token takes 24 x width^2 FLOPs outside
    attention, and on average 2 x width for each token of its row in causal attention.
    """
    if ranks == 1:
        return [list(rows)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0] * ranks
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        least = costs.index(min(costs))
        shares[least].append(row)
        costs[least] += lengths[row] * (12 * width + lengths[row])
    return shares


def pack(lengths: Sequence[int], rows: Sequence[int], *, budget: int, packed: bool) -> list[list[int]]:
    """Return micro-batches of rows of similar length, the longest first, so that a lack of memory shows at once.

    A micro-batch takes at most `budget` tokens; a longer row gets one of its own.

    Args:
        packed: Only the rows' own tokens count towards the budget; otherwise padding to the longest row counts too.
    """
    micro_batches: list[list[int]] = []
    longest = taken = 0
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        full = taken + (lengths[row] if packed else longest) > budget
        wasteful = not packed and taken >= CLOSE_AFTER_TOKENS and lengths[row] < SHORT * longest
        if not micro_batches or full or wasteful:
            micro_batches.append([])
            longest, taken = lengths[row], 0
        micro_batches[-1].append(row)
        taken += lengths[row] if packed else longest
    return micro_batches


def padding_share(lengths: Sequence[int], plan: Plan, *, packed: bool) -> float:
    """Return padding as a share of all computed tokens."""
    if packed:
        return 0.0
    computed = sum(len(rows) * max(lengths[row] for row in rows) for minibatch in plan for rows in minibatch if rows)
    return 1 - sum(lengths) / computed if computed else 0.0


def loss_weights(batch: Sequence[record.Sequence], plan: Plan, algorithm: Algorithm) -> np.ndarray | None:
    """Return the factor for the losses of each row's tokens, [rows] float32; None: 1 for all.

    With these factors, the mean loss over all tokens of a mini-batch is the mean that algorithm.loss_mean asks for.
    Rows without trained tokens, and those that algorithm.overlong_filter leaves out, are not counted in a mean.
    """
    if algorithm.loss_mean == "token" and not algorithm.overlong_filter:
        return None
    trained = np.array([row.loss_mask.sum() for row in batch])
    cut_off = np.array([row.finish_reason == "length" for row in batch])
    kept = (trained > 0) & ~(cut_off & algorithm.overlong_filter)
    weights = np.zeros(len(batch), np.float32)
    for minibatch in plan:
        everyone = np.array([row for rows in minibatch for row in rows])
        those = everyone[kept[everyone]]
        if not len(those):
            continue
        lengths = {
            "token": trained[those].sum() / len(those),  # the mean length: each token counts alike
            "sequence": trained[those],
            "constant": algorithm.loss_constant,
        }[algorithm.loss_mean]
        assert lengths is not None, "Config sets algorithm.loss_constant"
        weights[those] = trained[everyone].sum() / (len(those) * lengths)
    return weights
