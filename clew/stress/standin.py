"""An engine without a model, so that an agent can be tested without one."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from clew.gateway.output_parser import CALL_CLOSES, CALL_OPENS, THINK_CLOSES, THINK_OPENS
from clew.inference.protocol import Completion, GenerateRequest, SchemaUnsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SEED = 0

SPREAD = 0.5
"""Maximum additional latency, as a share of `latency_s`. It differs per answer, to find agents that rely on order."""

BREAKS = (" ", " ", " ", ", ", "\n", "\n\n", "\n- ", "  ", " \n", ".\n", ": ")
"""Texts between two words. Agents that trim, reflow or cut what the model said change one of them."""

LONG, RARELY = 16, 0.125
"""Factor by which some answers are longer than the others, and the share of these answers."""

CALLS = 0.6
"""Share of the answers that call a tool, if the request offers any."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + '\\n' }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}{% if message.reasoning_content %}"
    "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)

offered_tools: ContextVar[Sequence[dict[str, Any]]] = ContextVar("offered_tools", default=())
"""Tools of the request that is being answered, as chat templates take them."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte and a chat template, for a stand-in without a particular model.

    The tags of reasoning and of tool calls are one token each.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_end|>", "<|im_start|>"]
    marks = [THINK_OPENS, THINK_CLOSES, CALL_OPENS, CALL_CLOSES]
    tokens = [*special, *marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<|im_end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], additional_special_tokens=special[1:]
    )
    fast.chat_template = TEMPLATE
    return fast


class NamedImages:
    """Image processing of a stand-in without a particular model: names stand for images, as TEMPLATE shows them."""

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        return text


class StandIn:
    """Answers after a set time, with recorded texts or synthetic ones.

    An answer depends only on the seed, the episode, the request, and how often it has sent the prompt. So requests of
    one episode that run side by side may come in any order, and each still gets its own answer. Synthetic answers are
    random words, so that no two episodes get the same, in the form of real ones: with line breaks and spaces at the
    end, sometimes long, after reasoning if the chat template knows it, and with calls of the tools that are offered.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        latency_s: float = 1.0,
        tokens: int = 64,
        texts: Sequence[str] = (),
    ) -> None:
        """Create a stand-in.

        Args:
            latency_s: Minimum seconds before the first token; SPREAD sets how much longer it may take.
            tokens: Maximum number of tokens of most synthetic answers, not counting reasoning and calls. The minimum is
                half of it; a few answers are longer (see LONG).
            texts: Recorded answers to choose from; if empty, answers are synthetic.
        """
        self._tokenizer = tokenizer
        self._latency_s, self._tokens = latency_s, tokens
        self._texts = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]  # type: ignore
        self._breaks = list(filter(None, map(self._encoded, BREAKS)))
        reasons = THINK_CLOSES in str(tokenizer.chat_template)
        self._thinks = self._encoded(f"{THINK_OPENS}\n") if reasons else []
        self._thought = self._encoded(f"\n{THINK_CLOSES}\n\n")
        self._asked: dict[str, Counter[str]] = {}
        self._is_word = functools.cache(self._is_word)  # each stand-in has a cache of its own

    async def generate(self, request: GenerateRequest) -> Completion:
        params, on_token = request.params, request.on_token
        if params.json_schema is not None:
            raise SchemaUnsupported("the stand-in cannot hold its output to a JSON schema. Take a server: --base-url.")
        output = self._answer(request.input_ids, params.max_new_tokens, *request.id.rsplit(".i", 1))
        cut = len(output) > params.max_new_tokens
        output = output[: params.max_new_tokens]
        logprobs = [-1.0] * len(output)
        await asyncio.sleep(self._latency_s * (1 + SPREAD * random.Random(f"{SEED}/{request.id}").random()))
        if on_token is not None:
            for token, logprob in zip(output, logprobs, strict=True):
                await asyncio.sleep(0)
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

    def _answer(self, input_ids: list[int], limit: int, episode: str = "", number: str = "0") -> list[int]:
        if number == "0":
            self._asked[episode] = Counter()  # an episode that runs again gets the same answers
        prompt = hashlib.sha256(f"{SEED}/{episode}/{input_ids}".encode()).hexdigest()
        asked = self._asked.setdefault(episode, Counter())
        draw = random.Random(f"{prompt}/{asked[prompt]}")
        asked[prompt] += 1
        end = self._tokenizer.eos_token_id
        assert isinstance(end, int)
        if self._texts:
            return [*draw.choice(self._texts), end]
        tools = offered_tools.get()
        prompt_end = str(self._tokenizer.decode(input_ids[-256:])) if tools else ""
        calls = [self._call(tool["function"], draw) for tool in tools]
        for call in calls:  # the prompt of a forced call ends with its beginning
            for length in range(len(call) - 1, len(CALL_OPENS), -1):
                if prompt_end.endswith(call[:length]):
                    return [*self._encoded(call[length:]), end]
        length = draw.randint((self._tokens + 1) // 2, self._tokens) - 1
        if draw.random() < RARELY:
            length = max(length, min(LONG * length, 3 * limit // 4))
        words = self._words(draw, length)
        if self._thinks and length + (thinks := length // 4 + 1) + len(self._thinks + self._thought) < limit:
            words = [*self._thinks, *self._words(draw, thinks), *self._thought, *words]
        if calls and draw.random() < CALLS:
            call = self._encoded("\n" + draw.choice(calls))
            words += call if len(words) + len(call) < limit else []
        return [*words, end]

    def _words(self, draw: random.Random, length: int) -> list[int]:
        """Return random words of this length in tokens, with other white space between them and at the end."""
        output: list[int] = []
        while len(output) < length:
            if self._breaks and draw.random() < 0.2:
                output += draw.choice(self._breaks)
                continue
            token = draw.randrange(len(self._tokenizer))
            while not self._is_word(token):
                token = draw.randrange(len(self._tokenizer))
            output.append(token)
        return output[:length]

    def _call(self, function: dict[str, Any], draw: random.Random) -> str:
        """Return a call of a tool with random arguments, in Qwen's form."""
        arguments = self._value({"type": "object", **function.get("parameters", {})}, draw)
        call = json.dumps({"name": function["name"], "arguments": arguments})
        return f"{CALL_OPENS}\n{call}\n{CALL_CLOSES}"

    def _value(self, schema: dict[str, Any], draw: random.Random) -> Any:
        """Return a value of a JSON schema; for one that is not understood, words."""
        schema = schema.get("anyOf", [schema])[0]
        kind = schema.get("type")
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if kind == "object":
            return {name: self._value(each, draw) for name, each in schema.get("properties", {}).items()}
        if kind == "array":
            return [self._value(schema.get("items", {}), draw)]
        if kind in ("integer", "number"):
            return draw.randint(1, 99)
        if kind == "boolean":
            return draw.random() < 0.5
        return str(self._tokenizer.decode(self._words(draw, 8))).strip()

    def _encoded(self, text: str) -> list[int]:
        """Return the tokens of a text; no tokens if they do not decode to the same text."""
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids) if str(self._tokenizer.decode(ids, skip_special_tokens=True)) == text else []

    def _is_word(self, token: int) -> bool:
        text = str(self._tokenizer.decode([token], skip_special_tokens=True))
        return text.isascii() and text.strip().isalnum()
