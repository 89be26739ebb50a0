"""Fields that client libraries send by default, and that do not change what the model says.

Each is accepted with one warning. A value that would change the distribution that tokens are drawn from is refused,
because the trainer could not compute that distribution again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from clew.gateway.strict import NOT_HONOURED, Strict

PENALTY = (
    "it changes the distribution that tokens are drawn from, and the trainer cannot compute that distribution again. "
    "Training needs {neutral}. Set {name}={neutral} in the client"
)
IN_CLIENTS = (
    ": ChatOpenAI({name}=0) in browser-use (which sends frequency_penalty=0.3 by default) and in langchain, "
    "ModelSettings({name}=0) in openai-agents and pydantic-ai, completion({name}=0) in litellm; with the openai "
    "package leave it out"
)
CHANGES_TOKENS = "it changes which tokens are drawn, and the engine has no such setting. Leave it out"
CHANGES_PROMPT = "it changes the prompt, and the gateway renders the chat template in one way only. Leave it out"
CHANGES_ANSWER = "the gateway has no such answer. Leave it out"


def _only(*neutral: Any, because: str) -> AfterValidator:
    """Return a validator that refuses every value except the neutral ones."""

    def check(value: Any) -> Any:
        if value in neutral:
            return value
        raise PydanticCustomError(NOT_HONOURED, because.replace("{neutral}", f"{neutral[0]:g}" if neutral else ""))  # pyright: ignore[reportArgumentType]

    return AfterValidator(check)


def _no_bias(bias: dict[str, float]) -> dict[str, float]:
    if any(bias.values()):
        raise PydanticCustomError(NOT_HONOURED, CHANGES_TOKENS)
    return bias


Penalty = Annotated[float, _only(0.0, because=PENALTY + IN_CLIENTS)]


class Neutral(Strict):
    """Base of requests with these fields, each limited to values that change nothing."""

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, _only(1.0, because=PENALTY)] = 1.0
    logit_bias: Annotated[dict[str, float], AfterValidator(_no_bias)] = Field(
        default_factory=dict, description="The engine has none; zeros are accepted."
    )
    typical_p: Annotated[float, _only(1.0, because=CHANGES_TOKENS)] = 1.0
    top_a: Annotated[float, _only(0.0, because=CHANGES_TOKENS)] = 0.0
    length_penalty: float = Field(default=1.0, description="Of a beam search, which there is none of.")
    use_beam_search: Annotated[bool, _only(False, because=CHANGES_TOKENS)] = False
    ignore_eos: Annotated[bool, _only(False, because=CHANGES_TOKENS)] = False
    stop_token_ids: list[int] = Field(default_factory=list, max_length=0, description="Use stop.")
    bad_words: list[str] = Field(default_factory=list, max_length=0)
    functions: list[Any] = Field(default_factory=list, max_length=0, description="Use tools.")
    add_generation_prompt: Annotated[bool, _only(True, because=CHANGES_PROMPT)] = True
    continue_final_message: Annotated[bool, _only(False, because=CHANGES_PROMPT)] = False
    documents: list[Any] = Field(default_factory=list, max_length=0)
    include_stop_str_in_output: Annotated[bool, _only(False, because=CHANGES_ANSWER)] = False
    return_tokens_as_token_ids: Annotated[bool, _only(False, because=CHANGES_ANSWER)] = False
    return_hidden_states: Annotated[bool, _only(False, because=CHANGES_ANSWER)] = False
    include_reasoning: Annotated[bool, _only(True, because=CHANGES_ANSWER)] = True
    separate_reasoning: Annotated[bool, _only(True, because=CHANGES_ANSWER)] = True
    stream_reasoning: bool = True
    skip_special_tokens: bool = Field(default=True, description="Texts never have special tokens; token ids do.")
    spaces_between_special_tokens: bool = True
    prediction: Any = Field(default=None, description="Only makes a provider faster.")
    usage: Any = Field(default=None, description="As OpenRouter takes it.")
    priority: Any = None
    request_id: Any = None
    session_id: Any = None
    cache_salt: Any = None
    extra_body: dict[str, Any] = Field(default_factory=dict, max_length=0, description="Put its fields into the body.")
    extra_headers: dict[str, Any] = Field(default_factory=dict, max_length=0)


def notes_on_neutral(request: Neutral) -> list[str]:
    """Return a warning for each of the fields that the client sent."""
    sent = [name for name in Neutral.model_fields if name in request.model_fields_set]
    return [
        f"the client sends {name}{_shown(getattr(request, name))}: it has no effect and is ignored" for name in sent
    ]


def _shown(value: Any) -> str:
    return f"={value}" if isinstance(value, int | float) else ""


class Lenient(Strict):
    """A message or content part to which frameworks add keys of their own. The model does not see them."""

    model_config = ConfigDict(extra="allow")


def notes_on_extras(named: Iterable[tuple[str, BaseModel]]) -> list[str]:
    """Return a warning for each key that a client added.

    Args:
        named: Objects that may have such keys, each with its name in the warning, such as "user messages".
    """
    added = dict.fromkeys((name, key) for name, model in named for key in model.model_extra or {})
    return [f"the client adds {key!r:.80} to {name}: the model does not see it" for name, key in added]
