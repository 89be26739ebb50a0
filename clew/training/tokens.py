"""The tokens of a batch, laid end to end, and the micro-batches that are cut from them."""

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


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows of tokens; S of them in all. Anything aligned with tokens is an [S] array."""

    ids: list[str]
    """Names of the rows."""
    starts: np.ndarray
    """[rows + 1] int64: row r has the tokens starts[r] to starts[r + 1]."""
    input_ids_S: np.ndarray
    """int32"""
    loss_mask_S: np.ndarray
    """bool: the tokens that are trained on."""
    temperatures_S: np.ndarray
    """float32"""
    images: SequenceABC[SequenceABC[str]] | None = None
    """Of each row, the names of what it shows; None: there are none."""

    @classmethod
    def of(cls, sequences: SequenceABC[Sequence]) -> Tokens:
        """The tokens of recorded sequences."""
        return cls(
            ids=[sequence.id for sequence in sequences],
            starts=np.cumsum([0, *(len(sequence.input_ids) for sequence in sequences)]),
            input_ids_S=np.concatenate([sequence.input_ids for sequence in sequences]),
            loss_mask_S=np.concatenate([sequence.loss_mask for sequence in sequences]),
            temperatures_S=np.concatenate([sequence.temperatures for sequence in sequences]),
            images=[each.images for each in sequences] if any(each.images for each in sequences) else None,
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """[rows] int64"""
        return np.diff(self.starts)

    @cached_property
    def row_of_S(self) -> np.ndarray:
        """int64: the row that each token belongs to."""
        return np.repeat(np.arange(len(self.ids)), self.lengths)

    def split(self, values_S: np.ndarray) -> list[np.ndarray]:
        """An array aligned with the tokens, row by row."""
        return np.split(values_S, self.starts[1:-1])

    def trained_in(self, rows: list[int]) -> int:
        """How many tokens of these rows are trained on."""
        return sum(int(self.loss_mask_S[self.starts[row] : self.starts[row + 1]].sum()) for row in rows)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of tokens, padded on the right to one length or packed in one row; and the N of their tokens that are
    trained on."""

    input_ids_BT: Tensor
    """int64; padding is 0"""
    packed: Packed | None
    """Where the rows are in input_ids_BT [1, P]; None: one below the other."""
    rows_N: Tensor
    """int64: the row of each trained token, from 0."""
    columns_N: Tensor
    """int64: its position in that row."""
    temperatures_N: Tensor
    """float32"""
    where_N: np.ndarray
    """int64: position in the batch's [S] arrays of each trained token."""
    seen: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model takes besides tokens, where the rows show images: see `clew.vision.Vision.inputs`."""

    @classmethod
    def of(cls, tokens: Tokens, rows: list[int], device: torch.device, *, pack: bool = False) -> MicroBatch:
        """pack: whether rows of different lengths are packed; those of one length lie one below the other anyway,
        where nothing is padding."""
        lengths = tokens.lengths[rows]
        where = np.concatenate([np.arange(tokens.starts[row], tokens.starts[row + 1]) for row in rows])
        real_BT = np.arange(lengths.max()) < lengths[:, None]
        row, column = real_BT.nonzero()
        trained = tokens.loss_mask_S[where]
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
            temperatures_N=torch.from_numpy(tokens.temperatures_S[where[trained]]).to(device),
            where_N=where[trained],
        )
