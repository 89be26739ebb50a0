"""Keys and values of the running rows, all ending at the same column. They are forgotten when a row ends.

::

    column     0 . . . first . . . . . . . column . . . width
    row 0              P P P P P g g g g g  *                     P: prompt, g: generated
    row 1                    P P P P P g g  *                     *: chosen, not yet fed to the model
    row 2                      P P P P P P  *   (has just joined)

Rows end together. So a decoding step writes one slice, every row's window is a slice, and a sliding window is a shorter
slice. The mask is one tensor that changes only when rows come or go. Rows 0 .. n - 1 are contiguous: when one ends, the
last moves into its place. When `column` reaches the width, everything moves left, over the columns that no row needs
any more. If those are few, the storage is widened instead. The keys already hold the positions (rotary or learned), so
columns mean nothing to the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from clew.inference.attention import aligned

_SPARE_COLUMNS, _WORTH_MOVING = 64, 32
"""Columns reserved beyond the longest row: the least number of steps between two moves to the left. Least number of
columns that a move has to free."""


def columns_for(length: int) -> int:
    """Return the number of columns to reserve if the longest row may reach `length` tokens."""
    return (length + _SPARE_COLUMNS + 63) // 64 * 64


class PrefillCache(Cache):
    """Keys and values that one forward over whole prompts computes, for `RowCache.join`."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.keys), "layers are computed in order"
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def bytes_per_token(self) -> int:
        return sum(tensor[0, :, 0].numel() * tensor.element_size() for tensor in self.keys + self.values)


class RowCache(Cache):
    """Keys and values [rows, heads, columns, dim] of each layer, and beside them the rows' tokens and logprobs.

    Between two calls, these things hold:

    - All these tensors have storage for the same numbers of rows (`capacity`) and columns (`width`).
    - This storage is within the budget, because `fits` is asked before each `join`. While `bytes_per_token` is 0,
      there is no limit.
    - While there are rows, there is storage for the next key: `column` < `width`.
    - `first_column`, `starts_R1`, `origins_R1` and `mask` belong to the present rows: `_refresh` ends each change.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        """Create an empty cache.

        Args:
            device: Device of the tensors.
            budget: Maximum bytes of keys and values.
        """
        super().__init__(layers=[])
        self.budget = budget
        self.bytes_per_token = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(0, 0, device=device)
        self.start_columns: list[int] = []
        """Column of each row's first token."""
        self.position_offsets: list[int] = []
        """Number added to each row's later positions, which otherwise count its columns. Not 0 after some images."""
        self.column = 0
        """Column of the next token's key."""
        self.first_column = 0
        """Leftmost column in use."""
        self.mask: Tensor | None = None
        """Mask [rows, 1, 1, columns] of zeros and the lowest number of the dtype; None if all rows start together.

        Its columns begin with `first_column`; for their number, see `clew.inference.attention.ALIGNED`.
        """
        self.starts_R1 = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.origins_R1 = self.starts_R1
        """Column from which each row counts its positions."""

    @property
    def rows(self) -> int:
        return len(self.start_columns)

    def memory(self) -> int:
        """Return the bytes of keys, values and the tensors beside them; `budget` limits only keys and values."""
        beside = [self.tokens, self.logprobs, self.starts_R1, *([] if self.mask is None else [self.mask])]
        return sum(tensor.nbytes for tensor in self.keys + self.values + beside)

    def fits(self, rows: int, length: int) -> bool:
        """Return whether `rows` rows, the longest of `length` tokens, stay within the budget."""
        return rows * columns_for(length) * self.bytes_per_token <= self.budget

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the fed token's key and value; return those of the whole rows."""
        keys, values, end = self.keys[layer_idx], self.values[layer_idx], self.column + 1
        n = self.rows
        keys[:n, :, self.column : end] = key_states
        values[:n, :, self.column : end] = value_states
        return keys[:n, :, self.first_column : end], values[:n, :, self.first_column : end]

    def step_mask(self) -> Tensor | None:
        """Return the mask of a decoding step, aligned with what `update` returns."""
        return None if self.mask is None else self.mask[..., : self.column + 1 - self.first_column]

    # Rows come and go -----------------------------------------------------------------------------------------------

    def join(
        self, filled: PrefillCache, sources: list[int], prompts: list[list[int]], longest: int, position_offset: int = 0
    ) -> None:
        """Append a row for each prompt, with keys and values from a prefill, whose rows end at its last column.

        Args:
            sources: Row of `filled` for each prompt.
            longest: Maximum length that any row, old or new, may reach.
            position_offset: The new rows' entry in `position_offsets`.
        """
        old_rows, new_rows = self.rows, self.rows + len(prompts)
        assert self.fits(new_rows, longest), "only rows that fit are admitted"
        self._make_room(new_rows, longest, max(map(len, prompts)), filled)
        start = self.column - filled.keys[0].shape[2]
        skipped = max(0, -start)  # columns of padding for which there is no room
        index = torch.tensor(sources, device=self.tokens.device)
        for own, other in zip(self.keys + self.values, filled.keys + filled.values, strict=True):
            own[old_rows:new_rows, :, start + skipped : self.column] = other[:, :, skipped:].index_select(0, index)
        self.position_offsets += [position_offset] * len(prompts)
        self.start_columns += [self.column - len(prompt) for prompt in prompts]
        self._refresh()

    def remove(self, leaving: list[int]) -> None:
        """Drop rows, and move the last rows into their places. `moves` tells the caller which, for its own lists."""
        sources, targets = moves(self.rows, leaving)
        if targets:
            source, target = (torch.tensor(side, device=self.tokens.device) for side in (sources, targets))
            window = slice(self.first_column, self.column + 1)
            for own in self.keys + self.values:
                own[target, :, window] = own[source, :, window]
            for own in (self.tokens, self.logprobs):
                own[target] = own[source]
            for source_row, target_row in zip(sources, targets, strict=True):
                self.start_columns[target_row] = self.start_columns[source_row]
                self.position_offsets[target_row] = self.position_offsets[source_row]
        left = self.rows - len(leaving)
        del self.start_columns[left:], self.position_offsets[left:]
        if not self.start_columns:
            self.column = 0
        self._refresh()

    def advance(self, longest: int) -> None:
        """Go to the next column after the chosen token was fed; make room for rows of up to `longest` tokens."""
        self.column += 1
        capacity, width = self.tokens.shape
        if self.column < width:
            return
        shift = self.first_column if self.first_column >= _WORTH_MOVING else 0
        if not shift:
            width = columns_for(min(longest, 2 * width))
        if capacity * width * self.bytes_per_token > self.budget:
            capacity = self.rows
        self._lay_out(capacity, width, -shift)
        self._refresh()

    # Layout ---------------------------------------------------------------------------------------------------------

    def _make_room(self, rows: int, longest: int, prompt: int, filled: PrefillCache) -> None:
        """Make sure that `rows` rows have storage, and that a prompt of this length fits to the left of `column`."""
        if not self.keys:  # the number of layers, heads and dimensions is known only now
            for own, other in ((self.keys, filled.keys), (self.values, filled.values)):
                own += [layer.new_zeros(0, layer.shape[1], 0, layer.shape[3]) for layer in other]
        capacity, width = self.tokens.shape
        left = max(prompt, self.column - self.first_column)  # columns needed to the left of `column`
        column = max(self.column, left)
        if rows <= capacity and column == self.column < width:
            return
        # Spare room saves moves.
        width = max(width, columns_for(left))
        if column >= width:
            column = left
        if rows > capacity:
            affordable = self.budget // max(1, width * self.bytes_per_token)
            capacity = max(rows, min(2 * rows, affordable))
        if capacity * width * self.bytes_per_token > self.budget:  # leave no spare room: what is needed does fit
            capacity, width, column = rows, min(width, columns_for(longest)), left
        self._lay_out(capacity, width, column - self.column)

    def _lay_out(self, capacity: int, width: int, shift: int) -> None:
        """Move all rows `shift` columns to the right (to the left if negative), in storage of this size."""
        in_place = self.tokens.shape == (capacity, width)
        begin = self.first_column
        count = min(self.column + 1, self.tokens.shape[1]) - begin  # in `advance`, `column` may be beyond the old width

        def moved(old: Tensor, dim: int) -> Tensor:
            new = old if in_place else old.new_zeros((capacity, *old.shape[1:dim], width, *old.shape[dim + 1 :]))
            if self.rows:
                kept = old[: self.rows].narrow(dim, begin, count)
                new[: self.rows].narrow(dim, begin + shift, count).copy_(kept.clone() if in_place else kept)
            return new

        for own in (self.keys, self.values):
            for layer, old in enumerate(own):  # one by one, so that only one layer exists twice
                own[layer] = moved(old, 2)
        self.tokens, self.logprobs = moved(self.tokens, 1), moved(self.logprobs, 1)
        self.start_columns = [start + shift for start in self.start_columns]
        self.column += shift

    def _refresh(self) -> None:
        """Compute what follows from `start_columns`, `position_offsets`, `column` and the width."""
        device, width = self.tokens.device, self.tokens.shape[1]
        self.first_column = first = min(self.start_columns, default=self.column)
        self.starts_R1 = torch.tensor(self.start_columns, dtype=torch.int64, device=device).unsqueeze(1)
        self.origins_R1 = self.starts_R1
        if any(self.position_offsets):
            self.origins_R1 = self.starts_R1 - torch.tensor(self.position_offsets, device=device).unsqueeze(1)
        self.mask = None
        if self.start_columns and max(self.start_columns) > first:
            dtype = self.keys[0].dtype
            columns = torch.arange(first, first + aligned(width - first), device=device)
            hidden = columns < self.starts_R1[:, :, None, None]
            self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self.mask.masked_fill_(hidden, torch.finfo(dtype).min)


def moves(rows: int, leaving: list[int]) -> tuple[list[int], list[int]]:
    """Return which rows move where, as (sources, targets), so that the rest stays contiguous without `leaving`."""
    gone = set(leaving)
    left = rows - len(gone)
    return [row for row in range(left, rows) if row not in gone], [row for row in range(left) if row in gone]
