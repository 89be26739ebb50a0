"""Tokens of a batch, laid end to end, and the micro-batches that are cut from them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from clew.record.rows import Sequence
from clew.training.packing import Packed
from clew.training.scoring import Masks


def _mask_of(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and IDs of a sequence's sampling mask."""
    if sequence.sampling_mask_counts is None or sequence.sampling_mask_ids is None:
        return np.zeros(len(sequence.input_ids), np.int32), np.empty(0, np.int32)
    return sequence.sampling_mask_counts, sequence.sampling_mask_ids


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows of tokens, S tokens in total. Anything aligned with tokens is an [S] array."""

    ids: list[str]
    """IDs of the rows."""
    starts: np.ndarray
    """Bounds of the rows, [rows + 1] int64: row r has the tokens starts[r] to starts[r + 1] - 1."""
    input_ids_S: np.ndarray
    """Token IDs, int32."""
    loss_mask_S: np.ndarray
    """True for tokens that are trained on, bool."""
    temperatures_S: np.ndarray
    """Temperature of each token, float32."""
    mask_counts_S: np.ndarray | None = None
    """Number of token IDs in each token's sampling mask, int32; 0: no mask. None if no token has a mask."""
    mask_ids: np.ndarray | None = None
    """Token IDs in all sampling masks, one mask after the other, int32."""
    images: SequenceABC[SequenceABC[str]] | None = None
    """Names of each row's images; None if there are no images."""

    @classmethod
    def of(cls, sequences: SequenceABC[Sequence]) -> Tokens:
        """Lay out the tokens of recorded sequences."""
        masked = any(sequence.sampling_mask_ids is not None for sequence in sequences)
        counts, ids = zip(*map(_mask_of, sequences), strict=True) if masked else ((), ())
        return cls(
            ids=[sequence.id for sequence in sequences],
            starts=np.cumsum([0, *(len(sequence.input_ids) for sequence in sequences)]),
            input_ids_S=np.concatenate([sequence.input_ids for sequence in sequences]),
            loss_mask_S=np.concatenate([sequence.loss_mask for sequence in sequences]),
            temperatures_S=np.concatenate([sequence.temperatures for sequence in sequences]),
            mask_counts_S=np.concatenate(counts) if masked else None,
            mask_ids=np.concatenate(ids) if masked else None,
            images=[each.images for each in sequences] if any(each.images for each in sequences) else None,
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, [rows] int64."""
        return np.diff(self.starts)

    @cached_property
    def row_of_S(self) -> np.ndarray:
        """Row of each token, int64."""
        return np.repeat(np.arange(len(self.ids)), self.lengths)

    def masks(self, where_N: np.ndarray, device: torch.device) -> Masks | None:
        """Return the sampling masks of the tokens at these positions; None if no token of the whole batch has one."""
        if self.mask_counts_S is None or self.mask_ids is None:
            return None
        counts_N = self.mask_counts_S[where_N].astype(np.int64)
        begins_N = (np.cumsum(self.mask_counts_S, dtype=np.int64) - self.mask_counts_S)[where_N]
        # ids_M joins the slices mask_ids[begin : begin + count] of these tokens. Their indices are computed at once.
        offsets = np.arange(counts_N.sum()) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        ids_M = self.mask_ids[np.repeat(begins_N, counts_N) + offsets].astype(np.int64)
        return Masks(counts_N=torch.from_numpy(counts_N).to(device), ids_M=torch.from_numpy(ids_M).to(device))

    def split(self, values_S: np.ndarray) -> list[np.ndarray]:
        """Split an array that is aligned with the tokens into rows."""
        return np.split(values_S, self.starts[1:-1])

    def trained_in(self, rows: list[int]) -> int:
        """Return how many tokens of these rows are trained on."""
        return sum(int(self.loss_mask_S[self.starts[row] : self.starts[row + 1]].sum()) for row in rows)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of tokens, padded on the right to one length or packed in one row, and the N trained tokens among them."""

    input_ids_BT: Tensor
    """Token IDs, int64; padding is 0."""
    packed: Packed | None
    """Positions of the rows in input_ids_BT, if they are packed in one row of P tokens; None: they are padded."""
    rows_N: Tensor
    """Row of each trained token within the micro-batch, int64."""
    columns_N: Tensor
    """Position of each trained token in its row, int64."""
    temperatures_N: Tensor | None
    """Temperature of each trained token, float32; None: all are 1."""
    where_N: np.ndarray
    """Position of each trained token in the batch's [S] arrays, int64."""
    masks: Masks | None = None
    """Sampling masks of the trained tokens; None: no token of the batch has one."""
    image_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model for rows that show images: see `clew.models.vision.Vision.inputs`."""
    idle: bool = False
    """True if this rank has nothing to train on, and computes only because all ranks must gather parameters at once."""

    @classmethod
    def of(cls, tokens: Tokens, rows: list[int], device: torch.device, *, pack: bool = False) -> MicroBatch:
        """Lay out these rows for the model.

        Args:
            pack: Pack rows of different lengths. Rows of equal length need no padding, and are never packed.
        """
        lengths = tokens.lengths[rows]
        where = np.concatenate([np.arange(tokens.starts[row], tokens.starts[row + 1]) for row in rows])
        real_BT = np.arange(lengths.max()) < lengths[:, None]
        row, column = real_BT.nonzero()
        trained = tokens.loss_mask_S[where]
        temperatures = tokens.temperatures_S[where[trained]]
        packed = Packed.of(lengths.tolist(), device) if pack and not real_BT.all() else None
        if packed is None:
            input_ids_BT = np.zeros(real_BT.shape, np.int64)
            input_ids_BT[real_BT] = tokens.input_ids_S[where]
        else:
            input_ids_BT = tokens.input_ids_S[where][None].astype(np.int64)
        return cls(
            input_ids_BT=torch.from_numpy(input_ids_BT).to(device),
            packed=packed,
            rows_N=torch.from_numpy(row[trained]).to(device),
            columns_N=torch.from_numpy(column[trained]).to(device),
            temperatures_N=None if (temperatures == 1).all() else torch.from_numpy(temperatures).to(device),
            where_N=where[trained],
            masks=tokens.masks(where[trained], device),
        )
