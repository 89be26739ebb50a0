"""Demonstrations and preferences for `clew sft`: the user's data as tokens, and the rows of each step's batch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew import data
from clew.config import Config
from clew.errors import DataError
from clew.record.rows import Sequence
from clew.training.conversations import REFUSES, encode_conversation
from clew.training.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """Tokens of a prompt, its completion and the end token, or those of a conversation."""

    input_ids: np.ndarray
    """[T] int32: token IDs."""
    loss_mask: np.ndarray
    """[T] bool: tokens that are trained on. The first is not, because nothing predicts it."""


class Demonstrations:
    """The demonstrations that a run will use, tokenized and ready to be batched."""

    def __init__(self, config: Config, tokenizer: Any, *, context: int | None, held_out: bool = False) -> None:
        """Read and tokenize the demonstrations. Raises DataError if a row cannot be used.

        Args:
            context: Maximum number of tokens of a sequence; None: no limit.
            held_out: Read all rows of eval.path, not those of data.path that the run will use.
        """
        names = config.data
        if held_out:
            names = names.model_copy(update={"path": config.eval.path, "limit": None})
            config = config.model_copy(update={"data": names})  # so that errors name this file
        completions = [names.completion] if config.training.objective == "sft" else [names.completion, names.rejected]
        rows = data.load_demonstrations(config, names.path, limit=names.limit)
        self._config = config
        self._n_rows = len(rows)
        used = min(len(rows), config.training.steps * config.training.batch_size)
        in_use = sorted({data.order(len(rows), index, config.seed) for index in range(len(rows) if held_out else used)})
        self._rows = {row: rows[row] for row in in_use}
        self._encoded = _encode(self._rows, completions, config, tokenizer)
        """Demonstrations of each row in use: one, or the chosen and the rejected of a pair."""
        for row, demonstration in ((row, each) for row, several in self._encoded.items() for each in several):
            if len(demonstration.input_ids) < 2:
                raise DataError(f"{names.path}: row {row + 1} is empty: there is no token to predict. Remove the row.")
            if context is not None and len(demonstration.input_ids) > context:
                raise DataError(
                    f"{names.path}: row {row + 1} has {len(demonstration.input_ids)} tokens, "
                    f"{demonstration.loss_mask.sum()} of them to train on. This is more than the model's context of "
                    f"{context}. Shorten or remove the row."
                )
        if config.training.objective == "reward_model":
            self._encoded = {
                row: [_last_token_alone(each, tokenizer.pad_token_id) for each in several]
                for row, several in self._encoded.items()
            }
            for row, several in self._encoded.items():
                if any(each.loss_mask[0] for each in several):
                    why = "one token before the end, and a reward model needs two"
                    raise DataError(f"{names.path}: row {row + 1} has {why}. Remove the row.")

    def batch(self, step: int) -> list[Sequence]:
        """Return the batch of a step (counted from 0). In each pair, the chosen completion precedes the rejected one.

        The batch depends only on the step's number, the seed and the data. For a reward model, only the last token that
        is not padding is in the mask, because transformers reads the score there.
        """
        size = self._config.training.batch_size
        indices = range(step * size, (step + 1) * size)
        return self._sequences({index: data.order(self._n_rows, index, self._config.seed) for index in indices})

    def all_rows(self) -> Tokens:
        """Return all rows in use, in the order of the data."""
        return Tokens.of(self._sequences({row: row for row in self._encoded}))

    def _sequences(self, rows: dict[int, int]) -> list[Sequence]:
        """Return the sequences of some rows of the data. `rows` maps the number of a group to its row of the data."""
        return [
            _sequence(f"g{number:06d}", place, demonstration, self._rows[row])
            for number, row in rows.items()
            for place, demonstration in enumerate(self._encoded[row])
        ]


def _sequence(group: str, place: int, demonstration: Demonstration, row: dict) -> Sequence:
    """Return a demonstration as the record holds it. `place` is 1 for the rejected completion of a pair, else 0."""
    zeros = np.zeros(len(demonstration.input_ids), np.float32)
    nobody = np.full(len(demonstration.input_ids), -1, np.int32)  # no policy generated it, so it has no version
    return Sequence(
        id=f"{group}.e{place}.s0",
        group_id=group,
        episode_id=f"{group}.e{place}",
        input_ids=demonstration.input_ids,
        loss_mask=demonstration.loss_mask,
        logprobs=zeros,
        versions=nobody,
        turn_ids=nobody,
        temperatures=zeros + 1,
        reward=math.nan,
        finish_reason="stop",
        data=row,
    )


def _last_token_alone(demonstration: Demonstration, padding: int) -> Demonstration:
    """Return a demonstration of which only the last token that is not padding is trained on."""
    real_T = demonstration.input_ids != padding
    last = int(real_T.nonzero()[0].max(initial=0))
    return replace(demonstration, loss_mask=np.arange(len(real_T)) == last)


Rows = dict[int, dict[str, Any]]
"""Rows of the data by their number, from 0."""


def _encode(rows: Rows, columns: list[str], config: Config, tokenizer: Any) -> dict[int, list[Demonstration]]:
    """Return the demonstrations of each row: its conversation, or its prompt with each of its completions."""
    encoded: dict[int, list[Demonstration]] = {}
    for number, row in rows.items():
        if (column := data.conversation_column(row, config)) is not None:
            encoded[number] = [_conversation(row, column, f"{config.data.path}: row {number + 1}", config, tokenizer)]
    prompted = {number: row for number, row in rows.items() if number not in encoded}
    if prompted:
        prompts = _tokenize_prompts(prompted, config, tokenizer)
        by_column = [_completions(prompted, prompts, column, config, tokenizer) for column in columns]
        encoded |= dict(zip(prompted, map(list, zip(*by_column, strict=True)), strict=True))
    return {number: encoded[number] for number in rows}


def _conversation(row: dict, column: str, where: str, config: Config, tokenizer: Any) -> Demonstration:
    """Return the demonstration of a row's conversation. Its tools are in the column `tools`, if it has one."""
    if tokenizer.chat_template is None:
        raise DataError(_no_template(f"{where}: {column!r}", config))
    tools = row.get("tools") or None
    if isinstance(tools, str):  # Parquet cannot hold JSON schemas of different forms
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{where}: 'tools' is not JSON ({error}). Expected a list of tools.") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {type(tools).__name__}; expected a list of tools.")
    input_ids, loss_mask = encode_conversation(row[column], tools, tokenizer, f"{where}: {column!r}")
    loss_mask[0] = False
    return Demonstration(input_ids=input_ids, loss_mask=loss_mask)


def _completions(
    rows: Rows, prompts: list[list[int]], column: str, config: Config, tokenizer: Any
) -> list[Demonstration]:
    """Return the prompts, each followed by its row's completion in this column and, if that lacks it, the end token."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.pad_token_id
    completions = [_text(row[column], f"{config.data.path}: row {number + 1}", column) for number, row in rows.items()]
    answers = [
        answer if answer[-1:] == [end] else [*answer, end]
        for answer in tokenizer(completions, add_special_tokens=False)["input_ids"]
    ]
    return [
        Demonstration(
            input_ids=np.array([*prompt, *answer], np.int32),
            loss_mask=np.arange(len(prompt) + len(answer)) >= max(1, len(prompt)),
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _tokenize_prompts(rows: Rows, config: Config, tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each row's prompt: text as it is, chat messages by the tokenizer's template."""
    column = config.data.prompt
    prompts = [row[column] for row in rows.values()]
    if all(isinstance(prompt, str) for prompt in prompts):
        return tokenizer(prompts)["input_ids"]
    encoded = []
    for number, prompt in zip(rows, prompts, strict=True):
        where = f"{config.data.path}: row {number + 1}: {column!r}"
        if isinstance(prompt, str):
            encoded.append(tokenizer(prompt)["input_ids"])
            continue
        if not isinstance(prompt, list):
            raise DataError(f"{where} is {type(prompt).__name__}; expected text or a list of chat messages.")
        if tokenizer.chat_template is None:
            raise DataError(_no_template(where, config))
        messages = data.without_nulls(prompt)
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except REFUSES as error:
            raise DataError(f"{where}: the chat template does not take these messages: {error}") from None
        encoded.append(ids)
    return encoded


def _no_template(where: str, config: Config) -> str:
    return (
        f"{where} is a list of chat messages, but the tokenizer in {config.model.path} has no chat template. Use text, "
        f"or a model with a template."
    )


def _text(value: Any, where: str, column: str) -> str:
    """Return the text of a completion, which is given as text or as a list with one message."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} is {type(value).__name__}; expected text, or a list with one message.")
    return value
