"""A byte-level BPE tokenizer whose merges make retokenization visible, with templates like those that models have."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The calculator says that the answer is 42. What is the answer? hello world, hello again",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "system user assistant tool think weather in Paris is sunny and the answer is right",
] * 4

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% if tools %}<|im_start|>system{{ nl }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{{ nl }}"
    "{% endif %}<tools>{% for tool in tools %}{{ nl }}{{ tool | tojson }}{% endfor %}{{ nl }}</tools>{{ nl }}"
    "Call: <tool_call>{{ nl }}{json}{{ nl }}</tool_call><|im_end|>{{ nl }}"
    "{% elif messages[0].role == 'system' %}<|im_start|>system{{ nl }}{{ messages[0].content }}<|im_end|>{{ nl }}"
    "{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}<|im_start|>user{{ nl }}{{ message.content }}<|im_end|>{{ nl }}"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant{{ nl }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ nl }}{% endif %}"
    "<tool_call>{{ nl }}{"
    '"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{{ nl }}</tool_call>'
    "{% endfor %}<|im_end|>{{ nl }}"
    "{% elif message.role == 'tool' %}<|im_start|>user{{ nl }}<tool_response>{{ nl }}{{ message.content }}{{ nl }}"
    "</tool_response><|im_end|>{{ nl }}"
    "{% elif not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ nl }}{% endif %}"
).replace("{{ nl }}", r"{{ '\n' }}")
"""Chat template as Qwen2.5's."""

THINKING = CHATML.replace(
    "{% endif %}{% for message in messages %}",
    "{% endif %}{% set ns = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}",
).replace(
    "assistant{{ '\\n' }}{{ message.content }}",
    "assistant{{ '\\n' }}{% if message.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content.lstrip() }}",
)
"""Chat template as Qwen3's: reasoning before the last user's message is left out."""


def chatml_tokenizer(folder: Path | str, template: str = CHATML) -> PreTrainedTokenizerFast:
    """Written to `folder`, and returned. <|im_end|> ends a turn."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return fast


def odd_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text as the tokenizer would never write it: a token a byte, where the tokenizer merges. Special tokens stay
    whole. To decode and tokenize this again gives other ids."""
    ids: list[int] = []
    while text:
        special = next((each for each in SPECIAL if text.startswith(each)), None)
        part = special or text[0]
        encoded = tokenizer(part, add_special_tokens=False)["input_ids"]
        assert isinstance(encoded, list)
        ids += encoded
        text = text[len(part) :]
    return ids
