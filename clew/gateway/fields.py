"""Reads a request's body: checks the values of its fields, and handles unknown fields.

An unknown field is accepted with a warning, because client libraries add fields all the time. A field that would
change the answer, and that cannot be honoured, is refused by name: see `REFUSED`.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from clew.gateway.dialect import Refusal

LARGEST = 2**31 - 1
"""Largest integer that a client may send, such as max_tokens or top_k."""

MAX_NOTES = 100
"""Maximum number of warnings about one request."""

NOT_SERVED = {
    "input_audio": "the gateway takes text and images only",
    "file": "the gateway takes text and images only",
}
"""Reason why a `type` is not served; for other types, the error lists the ones that are."""

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
CHANGES_ANSWER = "the gateway cannot answer in that form. Leave it out"
OTHER_ENDPOINT = "it is a setting of another endpoint, not of this one. Leave it out"
NOT_A_FIELD = "it is an argument of the openai package, not a field. Put its contents into the request itself"

NEVER: Any = object()
"""Marks a field of `REFUSED` that is refused with every value: no value equals it."""

REFUSED: dict[str, tuple[Any, str]] = {
    "frequency_penalty": (0, PENALTY + IN_CLIENTS),
    "presence_penalty": (0, PENALTY + IN_CLIENTS),
    "repetition_penalty": (1, PENALTY),
    "logit_bias": ({}, CHANGES_TOKENS),
    "typical_p": (1, CHANGES_TOKENS),
    "top_a": (0, CHANGES_TOKENS),
    "use_beam_search": (False, CHANGES_TOKENS),
    "ignore_eos": (False, CHANGES_TOKENS),
    "stop_token_ids": ([], "the gateway takes strings. Use stop"),
    "bad_words": ([], CHANGES_TOKENS),
    "functions": ([], "tools replaced it. Use tools"),
    "add_generation_prompt": (True, CHANGES_PROMPT),
    "continue_final_message": (False, CHANGES_PROMPT),
    "documents": ([], CHANGES_PROMPT),
    "include_stop_str_in_output": (False, CHANGES_ANSWER),
    "return_tokens_as_token_ids": (False, CHANGES_ANSWER),
    "return_hidden_states": (False, CHANGES_ANSWER),
    "include_reasoning": (True, CHANGES_ANSWER),
    "separate_reasoning": (True, CHANGES_ANSWER),
    "extra_body": ({}, NOT_A_FIELD),
    "extra_headers": ({}, NOT_A_FIELD),
    "echo": (False, CHANGES_ANSWER),
}
"""Fields that cannot be honoured, each with the only value that is accepted and the reason for refusing others."""

for _why, _names in {
    CHANGES_ANSWER: ("audio", "background", "prompt_logprobs"),
    CHANGES_PROMPT: (
        "chat_template", "container", "conversation", "mcp_servers", "prompt", "truncate_prompt_tokens",
        "web_search_options",
    ),
    CHANGES_TOKENS: (
        "allowed_token_ids", "custom_logit_processor", "dry_multiplier", "ebnf", "grammar", "guided_choice",
        "guided_grammar", "guided_json", "guided_regex", "json_schema", "logits_processors", "lora_path",
        "no_repeat_ngram_size", "regex", "structural_tag", "structured_outputs", "xtc_probability",
    ),
}.items():  # fmt: skip
    REFUSED |= dict.fromkeys(_names, (NEVER, _why))

# Fields that are ignored without a warning; most concern a provider's own accounting and speed.
BODY_HINTS = {
    "cache_control", "client_metadata", "inference_geo", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "speed", "store", "user", "user_profile_id",
    "verbosity", "workspace_id",
}  # fmt: skip
PART_HINTS = {
    "cache_control", "caller", "detail", "eager_input_streaming", "format", "input_examples",
    "prompt_cache_breakpoint", "provider_specific_fields",
}  # fmt: skip


class Fields(BaseModel):
    """A JSON object. A null counts as a field that is not there; an unknown field is ignored, with a warning."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        known, notes = _field_names(cls), info.context
        given = set_values(**value)
        for name in given:
            if name not in known and given.get("role") != "assistant":  # clients send replies back with extra fields
                note = cls._note_on(name, given)
                assert notes is not None
                if len(notes) < MAX_NOTES:
                    notes.append(note)
        return given

    @classmethod
    def _note_on(cls, name: str, given: dict[str, Any]) -> str:
        """Return the warning about an unknown field. `Body` refuses some such fields instead."""
        role = given.get("role")
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__.strip("_")).lower()  # CalledFunction: called function
        owner = f"{role} messages" if role else given.get("type") or kind
        return f"the client adds {name!r:.80} to {owner!s:.80}: the model does not see it"


class Body(Fields):
    """The body of a request."""

    model: str

    @classmethod
    def _note_on(cls, name: str, given: dict[str, Any]) -> str:
        value = given[name]
        shown = f"={value}" if isinstance(value, int | float) and name in REFUSED else ""
        other = (NEVER, OTHER_ENDPOINT) if name in _fields_of_all() else (value, "")  # (value, ""): not refused
        neutral, why = REFUSED.get(name, other)
        no_bias = name == "logit_bias" and isinstance(value, dict) and not any(value.values())
        if value != neutral and not no_bias:
            words = why.replace("{name}", name).replace("{neutral}", str(neutral))
            raise Refusal(400, f"Cannot honour {name}{shown}: {words}.", param=name)
        return f"the client sends {name:.80}{shown}: it has no effect and is ignored"


class SampledBody(Body):
    """The body of a request for a reply."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool = False


def _listed(texts: Any) -> Any:
    return [texts] if isinstance(texts, str) else texts


Texts = Annotated[list[str], BeforeValidator(_listed)]
"""Type of a field that is a string or a list of strings."""


def text_as(kind: str) -> BeforeValidator:
    """Return a validator of lists of parts, which turns a plain string into one part of this type."""
    return BeforeValidator(lambda content: [{"type": kind, "text": content}] if isinstance(content, str) else content)


def set_values(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


class IgnoresUnknown(Fields):
    """An object to which clients add fields of their own, which are ignored without a warning."""

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, value: Any) -> Any:
        return set_values(**value) if isinstance(value, dict) else value


@functools.cache
def _field_names(model: type[Fields]) -> frozenset[str]:
    """Return the names of a model's fields, and of those that are ignored without a warning."""
    names = (field.alias or name for name, field in model.model_fields.items())
    return frozenset(names) | (BODY_HINTS if issubclass(model, Body) else PART_HINTS)


@functools.cache
def _fields_of_all() -> frozenset[str]:
    """Return the names of the fields that a request can have at any endpoint."""
    models, names = [Body], set[str]()
    while models:
        model = models.pop()
        models += model.__subclasses__()
        names |= model.model_fields.keys()
    return frozenset(names)


F = TypeVar("F", bound=Fields)


def read(model: type[F], body: dict[str, Any]) -> tuple[F, list[str]]:
    """Return the body as a model, and warnings about fields that have no effect.

    Raises:
        Refusal: A field is missing, is wrong, or cannot be honoured. The message names one such field.
    """
    notes: list[str] = []
    try:
        return model.model_validate(body, context=notes), list(dict.fromkeys(notes))
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # If one of several errors is at a field named `type`, the wrong type explains the others.
    first = next((one for one in errors if one["loc"][-1:] == ("type",)), errors[0])
    param, why, context = _path(body, first["loc"]), first["msg"], first.get("ctx", {})
    kind = context.get("tag") or (first["input"] if first["loc"][-1:] == ("type",) else None)
    if first["type"] == "extra_forbidden":
        message = f"Cannot honour {param}: this endpoint has no such field. Leave it out."
        raise Refusal(400, message, param=param, code="unknown_parameter")
    if isinstance(kind, str):
        served = context.get("expected_tags") or context.get("expected")
        why = NOT_SERVED.get(kind) or f"{kind!r} is not served here, only {served}"
    elif first["type"] != "missing":
        why += f", found {str(first['input'])[:200]!r}"
    raise Refusal(400, f"{param}: {why}.", param=param)


def _path(body: Any, location: tuple[int | str, ...]) -> str:
    """Return the path of an error in the body, without the names of the union members that pydantic tried.

    ("tools", 0, "function", "name") is tools.0.name: "function" is not a field there, but the type that was tried.
    """
    path: list[str] = []
    value: Any = body
    tagged: Any = None
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(value, list):
            value = dict(enumerate(value))
        children: dict[Any, Any] = value if isinstance(value, dict) else {}
        if part in children and (last or children.get("type") != part or children is tagged):
            value = children[part]
        elif not last:
            tagged = children  # `part` is a member's type here; if it comes again, it is a field of that name
            continue
        path.append(str(part))
    return ".".join(path)
