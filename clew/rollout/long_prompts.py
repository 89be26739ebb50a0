"""Leaves out the rows of the data whose prompt is longer than data.max_prompt_tokens, before anything starts."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from clew.config import Config
from clew.data import without_nulls
from clew.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("clew.rollout")


def leave_out_overlong(
    rows: list[dict[str, Any]], path: str, config: Config, tokenizer: PreTrainedTokenizerBase, *, needed: int = 1
) -> list[dict[str, Any]]:
    """Return the rows whose prompt is short enough, and warn with the number of the others.

    Raises:
        DataError: Fewer than `needed` rows are left.
    """
    limit = config.data.max_prompt_tokens
    if limit is None:
        return rows
    options = config.rollout.workflow_kwargs
    chat, enable_thinking = bool(options.get("chat")), options.get("enable_thinking")
    prompts = [row[config.data.prompt] for row in rows]
    lengths = count_tokens(prompts, tokenizer, chat=chat, enable_thinking=enable_thinking)
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if len(kept) < needed:
        what, lower = ("form a batch", ", or lower rollout.batch_groups") if needed > 1 else ("go on", "")
        raise DataError(
            f"Cannot {what}: {len(kept)} of the {len(rows)} rows of {path} have a prompt of at most "
            f"data.max_prompt_tokens={limit} tokens, and {needed} are needed. Raise the limit, or use more data{lower}."
        )
    if len(kept) < len(rows):
        log.warning(
            "data.max_prompt_tokens=%d leaves out %d of the %d rows of %s; the longest prompt has %d tokens",
            limit,
            len(rows) - len(kept),
            len(rows),
            path,
            max(lengths),
        )
    return kept


def count_tokens(
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool = False,
    enable_thinking: bool | None = None,
) -> list[int]:
    """Return the number of tokens of each prompt, as the built-in workflows send it to the model.

    Chat messages go through the chat template; with `chat`, so does a text, as a user's message. An image counts as its
    placeholder, and a prompt that is neither text nor messages as its JSON. See `SingleTurn` for `enable_thinking`.
    """
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    lengths = [0] * len(prompts)
    texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
    """Place in `prompts` and text of each prompt, by whether the tokenizer adds its special tokens."""
    for place, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        if isinstance(messages, list) and messages and tokenizer.chat_template is not None:
            try:
                rendered = tokenizer.apply_chat_template(
                    without_nulls(messages), add_generation_prompt=True, tokenize=False, **options
                )
            except Exception:  # messages that the model's own template cannot take: the episode will say so
                continue
            texts[False].append((place, str(rendered)))
        else:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
            texts[True].append((place, text))
    for special, group in texts.items():
        if group:
            encoded: Any = tokenizer([text for _, text in group], add_special_tokens=special)
            for (place, _), ids in zip(group, encoded["input_ids"], strict=True):
                lengths[place] = len(ids)
    return lengths
