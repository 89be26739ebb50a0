"""An engine without a model, so that an agent can be tested without one."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clew.inference.protocol import Completion, GenerateRequest, SchemaUnsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SEED = 0
"""Seed of the answers and their latencies."""

SPREAD = 0.5
"""Maximum additional latency, as a share of `latency_s`. It differs per answer, to find reliance on their order."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte and a chat template, for a stand-in without a particular model."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_end|>", "<|im_start|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<|im_end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], additional_special_tokens=special[1:]
    )
    fast.chat_template = TEMPLATE
    return fast


class Names:
    """Image processing of a stand-in without a particular model: the text stays as in TEMPLATE, with images' names."""

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        return text


class StandIn:
    """Answers after a set time, with recorded texts or synthetic ones.

    An answer depends only on the seed, the episode, the prompt, and how often this episode has sent it. So requests of
    one episode that run side by side may come in any order, and each still gets its own answer. Synthetic answers are
    random printable tokens, so that no two episodes get the same.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        latency_s: float = 1.0,
        token_s: float = 0.0,
        tokens: int = 64,
        texts: Sequence[str] = (),
    ) -> None:
        """Create a stand-in.

        Args:
            latency_s: Minimum seconds before the first token; SPREAD sets how much longer it may take.
            token_s: Seconds per token of a streamed answer.
            tokens: Maximum length of a synthetic answer; the minimum is half of it.
            texts: Recorded answers to choose from; if empty, answers are synthetic.
        """
        self._tokenizer = tokenizer
        self._latency_s, self._token_s = latency_s, token_s
        self._tokens = tokens
        self._texts = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]  # type: ignore
        self._asked: dict[str, Counter[str]] = {}
        self._is_word = functools.cache(self._is_word)

    async def generate(self, request: GenerateRequest) -> Completion:
        params, on_token = request.params, request.on_token
        if params.json_schema is not None:
            raise SchemaUnsupported("the stand-in cannot hold its output to a JSON schema. Take a server: --base-url.")
        output = self._answer(request.input_ids, *request.id.rsplit(".i", 1))
        cut = len(output) > params.max_new_tokens
        output = output[: params.max_new_tokens]
        logprobs = [-1.0] * len(output)
        await asyncio.sleep(self._latency_s * (1 + SPREAD * random.Random(f"{SEED}/{request.id}").random()))
        if on_token is not None:
            for token, logprob in zip(output, logprobs, strict=True):
                await asyncio.sleep(self._token_s)
                on_token(token, logprob)
        return Completion(
            output_ids=output,
            logprobs=logprobs,
            versions=[0] * len(output),
            finish_reason="length" if cut else "stop",
            matched=None if cut else output[-1],
        )

    async def version(self) -> int:
        return 0

    def _answer(self, input_ids: list[int], episode: str = "", number: str = "0") -> list[int]:
        if number == "0":
            self._asked[episode] = Counter()  # an episode that runs again gets the same answers
        asked = hashlib.sha256(f"{SEED}/{episode}/{input_ids}".encode()).hexdigest()
        before = self._asked.setdefault(episode, Counter())
        draw = random.Random(f"{asked}/{before[asked]}")
        before[asked] += 1
        end = self._tokenizer.eos_token_id
        assert isinstance(end, int)
        if self._texts:
            return [*draw.choice(self._texts), end]
        output: list[int] = []
        for _ in range(draw.randint((self._tokens + 1) // 2, self._tokens) - 1):
            token = draw.randrange(len(self._tokenizer))
            while not self._is_word(token):
                token = draw.randrange(len(self._tokenizer))
            output.append(token)
        return [*output, end]

    def _is_word(self, token: int) -> bool:
        text = str(self._tokenizer.decode([token], skip_special_tokens=True))
        return text.isascii() and text.strip().isalnum()
