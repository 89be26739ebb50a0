"""Makes what training the calculator agent needs, from nothing: data, demonstrations, tokenizer with a chat template,
base model.

    python -m examples.agents.make --seed 1 --out runs/calculator/material

A problem is the product of two numbers below 100. The teacher asks the calculator 30 % of the time, and else guesses.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

ASKS = 0.3
DEMONSTRATIONS, HELD_OUT = 3000, 200

WORDS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    '{"name": "',
    "calculate",
    '", "arguments": ',
    '{"expression": "',
    '"}',
    "}",
]
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ '\\n' }}{" + '"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}{{ '\\n' }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(expression: str) -> str:
    """Return a tool call as the chat template writes it, and as the model should."""
    return f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def make_data(out: Path, seed: int) -> float:
    """Write demonstrations.jsonl (a row a turn), conversations.jsonl (a row a conversation), prompts.jsonl and
    held_out.jsonl; return the teacher's share of right answers."""
    chance = random.Random(seed)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance.shuffle(problems)
    shown: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    right = 0
    for a, b in problems[HELD_OUT : HELD_OUT + DEMONSTRATIONS]:
        ask: dict[str, Any] = {"role": "user", "content": f"{a}*{b}"}
        if chance.random() < ASKS:
            arguments = {"expression": f"{a}*{b}"}
            calls = [{"id": "0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}]
            asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
            told: dict[str, Any] = {"role": "tool", "content": str(a * b)}
            shown.append({"prompt": [ask], "completion": call(f"{a}*{b}")})
            shown.append({"prompt": [ask, asked, told], "completion": str(a * b)})
            conversations.append({"messages": [ask, asked, told, {"role": "assistant", "content": str(a * b)}]})
            right += 1
        else:
            guess = str(chance.randrange(100, 9802))
            shown.append({"prompt": [ask], "completion": guess})
            conversations.append({"messages": [ask, {"role": "assistant", "content": guess}]})

    def rows(some: list[tuple[int, int]]) -> list[dict[str, str]]:
        return [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in some]

    for name, content in (
        ("demonstrations", shown),
        ("conversations", conversations),
        ("prompts", rows(problems[HELD_OUT + DEMONSTRATIONS :])),
        ("held_out", rows(problems[:HELD_OUT])),
    ):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return right / DEMONSTRATIONS


def make_model(out: Path, seed: int) -> int:
    """Write a tokenizer and a random Qwen2; return its number of parameters."""
    tokens = [*SPECIAL, *WORDS, *"0123456789*"]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(["<tool_call>", "</tool_call>", *map(_quoted, WORDS[2:]), "."])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(out)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.06,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def _quoted(word: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}".*+?()[]|^$\\' else letter for letter in word)


def make(out: Path, seed: int) -> tuple[float, int]:
    """Make the data and the model; return the teacher's share of right answers and the number of parameters."""
    logging.disable_progress_bar()
    (out / "base").mkdir(parents=True, exist_ok=True)
    return make_data(out, seed), make_model(out / "base", seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    right, parameters = make(arguments.out, arguments.seed)
    print(f"{arguments.out}: a teacher who is right {right:.1%} of the time, a model of {parameters:,} parameters")
