"""Rows with long prompts are left out before anything starts, and counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from clew.config import Config
from clew.errors import DataError
from clew.rollout.long_prompts import count_tokens, leave_out_overlong
from tests.models import tiny_tokenizer
from tests.rollout.scripted import config_for

MESSAGES = [{"role": "user", "content": "1+1="}]


def limited(tmp_path: Path, limit: int | None) -> Config:
    return config_for(tmp_path, data={"max_prompt_tokens": limit})


def test_long_prompts_are_left_out_with_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model")
    rows = [{"prompt": text} for text in ("1+1=", "1+1=" * 50, "2+2=", "3+3=" * 100)]
    short, long = count_tokens(["1+1=", "3+3=" * 100], tokenizer)
    assert short == len(tokenizer("1+1=")["input_ids"]) < long
    with caplog.at_level(logging.WARNING):
        assert leave_out_overlong(rows, "rows.jsonl", limited(tmp_path, None), tokenizer) == rows
        assert not caplog.records
        assert leave_out_overlong(rows, "rows.jsonl", limited(tmp_path, short), tokenizer, needed=2) == rows[::2]
    assert caplog.messages == [
        f"data.max_prompt_tokens={short} leaves out 2 of the 4 rows of rows.jsonl; the longest prompt has {long} tokens"
    ]
    with pytest.raises(DataError, match=rf"2 of the 4 rows of rows.jsonl .*={short} tokens, and 3 are needed"):
        leave_out_overlong(rows, "rows.jsonl", limited(tmp_path, short), tokenizer, needed=3)


def test_messages_are_counted_as_the_template_writes_them(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model", chat=True)
    rendered = str(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False))
    expected = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    tokenizer.chat_template = f"{tokenizer.chat_template}{{% if enable_thinking is false %}}1+1={{% endif %}}"
    assert count_tokens([MESSAGES], tokenizer) == [expected]
    assert count_tokens([MESSAGES], tokenizer, enable_thinking=False)[0] > expected
    rows, options = [{"prompt": MESSAGES}], {"workflow_kwargs": {"enable_thinking": False}}
    config = config_for(tmp_path, data={"max_prompt_tokens": expected}, rollout=options)
    with pytest.raises(DataError, match="0 of the 1 rows"):
        leave_out_overlong(rows, "rows.jsonl", config, tokenizer)
    wrong = [{"role": {}, "content": 1j}]
    assert count_tokens([MESSAGES, "1+1="], tokenizer, chat=True) == [expected, expected]
    assert count_tokens([MESSAGES], tokenizer) == [expected]
    assert count_tokens([wrong], tokenizer)[0] >= 0
