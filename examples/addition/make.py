"""Makes what the demo needs, from nothing: problems, demonstrations of an imperfect teacher, tokenizer, base model.

    python -m examples.addition.make --seed 1 --out runs/addition/material-1

A problem is the sum of two numbers below 100, digits least significant first: 37+85 is written 73+58= and its answer
221. The teacher forgets each carry 60 % of the time. No problem is in two of the three files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

FORGETS = 0.6
HELD_OUT = 500
DEMONSTRATIONS = 4500


def digits(number: int, width: int) -> str:
    """Least significant first, with zeros up to `width`."""
    return str(number).zfill(width)[::-1]


def teacher(a: int, b: int, chance: random.Random) -> str:
    """Adds digit by digit, and forgets a carry every so often."""
    answer, carry = "", 0
    for x, y in zip(digits(a, 2), digits(b, 2), strict=True):
        total = int(x) + int(y) + carry
        answer += str(total % 10)
        carry = 0 if chance.random() < FORGETS else total // 10
    return answer + str(carry)


def make_data(out: Path, seed: int) -> float:
    """Write demonstrations.jsonl, prompts.jsonl, held_out.jsonl, and preferences.jsonl: the right answer to what the
    teacher got wrong, and the teacher's. Return the share of right demonstrations."""
    chance = random.Random(seed)
    problems = [(a, b) for a in range(100) for b in range(100)]
    chance.shuffle(problems)
    held_out, rest = problems[:HELD_OUT], problems[HELD_OUT:]
    demonstrated, prompts = rest[:DEMONSTRATIONS], rest[DEMONSTRATIONS:]

    def row(a: int, b: int) -> dict[str, str]:
        return {"prompt": f"{digits(a, 2)}+{digits(b, 2)}=", "answer": digits(a + b, 3)}

    shown = [{**row(a, b), "completion": teacher(a, b, chance)} for a, b in demonstrated]
    wrong = [row for row in shown if row["completion"] != row["answer"]]
    for name, rows in (
        ("demonstrations", shown),
        ("preferences", [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": r["completion"]} for r in wrong]),
        ("prompts", [row(a, b) for a, b in prompts]),
        ("held_out", [row(a, b) for a, b in held_out]),
    ):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return sum(r["completion"] == r["answer"] for r in shown) / len(shown)


def make_model(out: Path, seed: int) -> int:
    """Write a tokenizer (a token a character) and a random Qwen2; return its number of parameters."""
    tokens = ["<pad>", "<eos>", *"0123456789+="]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(out)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            initializer_range=0.06,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


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
