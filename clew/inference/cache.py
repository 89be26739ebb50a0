"""Keys and values of the running rows, all ending at the same column.

::

    column     0 . . . lo . . . . . . . . . column . . . width
    row 0              P P P P P g g g g g  *                     P: prompt, g: generated
    row 1                    P P P P P g g  *                     *: chosen, not yet fed to the model
    row 2                      P P P P P P  *   (has just joined)

Since rows end together, a decoding step writes one slice, every row's window is a slice, a sliding window is a shorter
slice, and the mask is one tensor that changes only when rows come or go. Rows 0 .. n - 1 are contiguous: when one ends,
the last moves into its place. When `column` reaches the width, everything moves left, over the columns that no row
needs any more; if those are few, the storage is widened instead. Positions (rotary or learned) are in the keys already,
so columns mean nothing to the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from clew.inference.attention import aligned

_SLACK = 64
"""Columns reserved beyond the longest row: the number of steps between two moves to the left."""


def columns_for(length: int) -> int:
    """Return the number of columns to reserve if the longest row may reach `length` tokens."""
    return (length + _SLACK + 63) // 64 * 64


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
    """Keys and values [rows, heads, columns, dim] of each layer, and beside them the rows' tokens and logprobs."""

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
        self.starts: list[int] = []
        """Column of each row's first token."""
        self.ahead: list[int] = []
        """Number added to each row's later positions, which otherwise count its columns: not 0 after some images."""
        self.column = 0
        """Column of the next token's key."""
        self.first = 0
        """Leftmost column in use: `lo` in the picture above."""
        self.mask: Tensor | None = None
        """Mask [rows, 1, 1, columns] of zeros and the lowest number of the dtype; None if all rows start together.

        Its columns begin with `first`: see `ALIGNED`.
        """
        self.starts_R1 = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.origins_R1 = self.starts_R1
        """Column from which each row counts its positions."""

    @property
    def rows(self) -> int:
        return len(self.starts)

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
        return keys[:n, :, self.first : end], values[:n, :, self.first : end]

    def step_mask(self) -> Tensor | None:
        """Return the mask of a decoding step, aligned with what `update` returns."""
        return None if self.mask is None else self.mask[..., : self.column + 1 - self.first]

    # Rows come and go -----------------------------------------------------------------------------------------------

    def join(
        self, filled: PrefillCache, sources: list[int], prompts: list[list[int]], longest: int, ahead: int = 0
    ) -> None:
        """Append a row for each prompt, with keys and values from a prefill, whose rows end at its last column.

        Args:
            sources: Row of `filled` for each prompt.
            longest: Maximum length that any row, old or new, may reach.
            ahead: See the attribute.
        """
        self._make_room(self.rows + len(prompts), longest, max(map(len, prompts)), filled)
        n, end = self.rows, self.column
        start = end - filled.keys[0].shape[2]
        skipped = max(0, -start)  # columns of padding for which there is no room
        index = torch.tensor(sources, device=self.tokens.device)
        for own, other in zip(self.keys + self.values, filled.keys + filled.values, strict=True):
            own[n : n + len(prompts), :, start + skipped : end] = other[:, :, skipped:].index_select(0, index)
        self.ahead += [ahead] * len(prompts)
        self.starts += [end - len(prompt) for prompt in prompts]
        self._refresh()

    def remove(self, leaving: list[int]) -> None:
        """Drop rows, and move the last rows into their places. `moves` tells the caller which, for its own lists."""
        sources, targets = moves(self.rows, leaving)
        if targets:
            source, target = (torch.tensor(side, device=self.tokens.device) for side in (sources, targets))
            window = slice(self.first, self.column + 1)
            for own in self.keys + self.values:
                own[target, :, window] = own[source, :, window]
            for own in (self.tokens, self.logprobs):
                own[target] = own[source]
            for source_row, target_row in zip(sources, targets, strict=True):
                self.starts[target_row] = self.starts[source_row]
                self.ahead[target_row] = self.ahead[source_row]
        left = self.rows - len(leaving)
        del self.starts[left:], self.ahead[left:]
        if not self.starts:
            self.column = 0
        self._refresh()

    def advance(self, longest: int) -> None:
        """Go to the next column after the chosen token was fed; make room for rows of up to `longest` tokens."""
        self.column += 1
        if self.column >= self.tokens.shape[1]:
            # Moving to the left is only worth its copy if it frees enough columns. Otherwise the storage is widened.
            shift = self.first if self.first >= 32 else 0
            capacity, width = self.tokens.shape
            if not shift:
                width = columns_for(min(longest, 2 * width))
            if capacity * width * self.bytes_per_token > self.budget:
                capacity = self.rows
            self._lay_out(capacity, width, -shift)
            self._refresh()

    # Layout ---------------------------------------------------------------------------------------------------------

    def _make_room(self, rows: int, longest: int, prompt: int, filled: PrefillCache) -> None:
        """Make sure that `rows` rows have storage, and that a prompt fits to the left of `column`."""
        if not self.keys:
            device = self.tokens.device
            for kind, other in ((self.keys, filled.keys), (self.values, filled.values)):
                kind += [torch.zeros(0, x.shape[1], 0, x.shape[3], dtype=x.dtype, device=device) for x in other]
        capacity, width = self.tokens.shape
        left = max(prompt, self.column - self.first)  # columns needed to the left of `column`
        column = max(self.column, left)
        if rows <= capacity and column == self.column < width:
            return
        width = max(width, columns_for(left))
        if column >= width:
            column = left
        if rows > capacity:
            affordable = self.budget // max(1, width * self.bytes_per_token)
            capacity = max(rows, min(2 * rows, affordable))
        # Spare room saves moves. If the budget has none, take only what is needed: `fits` has checked that there is
        # enough.
        if capacity * width * self.bytes_per_token > self.budget:
            capacity, width, column = rows, min(width, columns_for(longest)), left
        self._lay_out(capacity, width, column - self.column)

    def _lay_out(self, capacity: int, width: int, shift: int) -> None:
        """Move all rows `shift` columns to the right (to the left if negative), in storage of this size."""
        stays = self.tokens.shape == (capacity, width)
        # the column that is next may lie beyond the old width
        begin, end = self.first, min(self.column + 1, self.tokens.shape[1])

        def shifted(own: Tensor, columns: int) -> Tensor:
            shape = (capacity, *own.shape[1:columns], width, *own.shape[columns + 1 :])
            target = own if stays else own.new_zeros(shape)
            if self.rows:
                kept = own[: self.rows].narrow(columns, begin, end - begin)
                target[: self.rows].narrow(columns, begin + shift, end - begin).copy_(kept.clone() if stays else kept)
            return target

        for kind in (self.keys, self.values):
            for layer, own in enumerate(kind):
                kind[layer] = shifted(own, 2)
        self.tokens, self.logprobs = shifted(self.tokens, 1), shifted(self.logprobs, 1)
        self.starts = [start + shift for start in self.starts]
        self.column += shift
        self.first = min(self.starts, default=self.column)

    def _refresh(self) -> None:
        """Bring `first` and `mask` up to date with `starts`."""
        self.first = min(self.starts, default=self.column)
        self.starts_R1 = torch.tensor(self.starts, dtype=torch.int64, device=self.tokens.device).unsqueeze(1)
        self.origins_R1 = self.starts_R1
        if any(self.ahead):
            self.origins_R1 = self.starts_R1 - torch.tensor(self.ahead, device=self.tokens.device).unsqueeze(1)
        if not self.starts or max(self.starts) == self.first:
            self.mask = None
            return
        dtype, device, width = self.keys[0].dtype, self.tokens.device, self.tokens.shape[1]
        columns = torch.arange(self.first, self.first + aligned(width - self.first), device=device)
        hidden = columns < self.starts_R1[:, :, None, None]
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        self.mask.masked_fill_(hidden, torch.finfo(dtype).min)


def moves(rows: int, leaving: list[int]) -> tuple[list[int], list[int]]:
    """Return which rows move where, as (sources, targets), so that the rest stays contiguous without `leaving`."""
    gone = set(leaving)
    left = rows - len(gone)
    return [row for row in range(left, rows) if row not in gone], [row for row in range(left) if row in gone]
