"""Requests to `/generate` and its responses, in SGLang's format.

Clew's additions to a request are in one field, `clew`, which SGLang ignores:

- ``continues``: see SamplingParams
- ``exact_stop``: stop_token_ids replace the model's end tokens instead of adding to them
- ``text``: false leaves out the text
- ``deltas``: each event of a stream has only the new tokens; otherwise, as with SGLang, all tokens so far
- ``sampling_mask``: if top_p, top_k or min_p cut tokens off, the logprobs are renormalised over the tokens that are
  left, and meta_info.clew.sampling_mask has their IDs

meta_info.clew also says which vLLM or SGLang server sampled which tokens, and has the experts that it reports.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew.errors import EngineError, ImageError, did_you_mean
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams

SAMPLING_FIELDS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "json_schema"),
    *("stop", "stop_token_ids", "sampling_seed", "n", "ignore_eos"),
)
"""Fields of sampling_params."""

TEXT_FIELDS = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
"""Fields of sampling_params that change the text and nothing else; the second one has no effect."""

NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Fields of sampling_params that clients send with the value that changes nothing; no other value is accepted."""

MAX_SEQUENCES = 4096
"""Maximum number of sequences that one call may ask for: the sum of n over its prompts."""

LARGEST = 2**64
"""Largest absolute value of a number in a request; seeds have 64 bits."""


@dataclass(frozen=True)
class RequestedSequence:
    """One sequence that a `/generate` call asks for."""

    prompt: list[int] | str
    """Tokens or text."""
    params: SamplingParams
    rid: str
    images: tuple[bytes, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def text_of(self, completion: Completion, tokenizer: Any) -> str:
        """Return a completion as SGLang's text: without what ended it (stop string or ID), unless `no_stop_trim`."""
        ids, matched = completion.output_ids, None if self.no_stop_trim else completion.matched
        if isinstance(matched, int) and ids[-1:] == [matched]:
            ids = ids[:-1]
        text = str(tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens))
        return text.partition(matched)[0] if isinstance(matched, str) and matched else text


@dataclass(frozen=True, kw_only=True)
class Call:
    """A `/generate` call."""

    sequences: list[RequestedSequence]
    single: bool
    """True if the answer is one object instead of a list."""
    stream: bool
    deltas: bool
    return_logprob: bool
    with_text: bool
    sampling_mask: bool


def parse_call(body: Any, default_stop_ids: tuple[int, ...]) -> Call:
    """Return the call that the body of a request to `/generate` describes.

    Raises:
        EngineError: The body is wrong; the message says what was found and what was expected.
    """
    if not isinstance(body, dict):
        raise EngineError(f"the body is {type(body).__name__}, expected a JSON object with input_ids or text.")
    for name in SAMPLING_FIELDS:
        if body.get(name) is not None:  # SGLang ignores it, and samples with the defaults
            raise EngineError(f"SGLang would ignore {name} outside sampling_params. Write it into sampling_params.")
    if body.get("lora_path"):
        raise EngineError(f"lora_path is {_shown(body['lora_path'])}, and Clew serves only the run's own weights.")
    clew = body.get("clew") or {}
    if not isinstance(clew, dict):
        raise EngineError(f"clew is {type(clew).__name__}, expected an object.")
    prompts, batch = _prompts(body)
    count = len(prompts)
    sampling = body.get("sampling_params")
    samplings = sampling if isinstance(sampling, list) else [sampling or {}] * count
    if len(samplings) != count:
        raise EngineError(f"sampling_params is a list of {len(samplings)}, and there are {count} prompts.")
    rids = _rids(body.get("rid"), count)
    images = _images(body.get("image_data"), count, batch)
    sequences: list[RequestedSequence] = []
    for prompt, given, rid, shown in zip(prompts, samplings, rids, images, strict=True):
        params, copies = _params(given, clew, default_stop_ids)
        skips, untrimmed = _flag(given, "skip_special_tokens", default=True), _flag(given, "no_stop_trim")
        if len(sequences) + copies > MAX_SEQUENCES:
            raise EngineError(
                f"Cannot generate more than {MAX_SEQUENCES} sequences in one call: {count} prompts, with n {copies}. "
                f"Send several calls."
            )
        for copy in range(copies):
            own = replace(params, seed=params.seed + copy)  # so that each copy draws other tokens
            sequences.append(RequestedSequence(prompt, own, rid, shown, skips, untrimmed))
    return Call(
        sequences=sequences,
        single=not batch and len(sequences) == 1,
        stream=_flag(body, "stream"),
        deltas=_flag(clew, "deltas"),
        return_logprob=_flag(body, "return_logprob"),
        with_text=_flag(clew, "text", default=True),
        sampling_mask=_flag(clew, "sampling_mask"),
    )


def _shown(value: Any) -> str:
    """Return a value of a request as text, cut short."""
    return f"{value!r:.60}"


def _rids(given: Any, count: int) -> list[str]:
    """Return the ID of each prompt's request; "" if the client gave none. A single ID counts for all prompts."""
    if isinstance(given, str | None):
        return [given or ""] * count
    if not isinstance(given, list) or len(given) != count or not all(isinstance(rid, str | None) for rid in given):
        raise EngineError(f"rid is {_shown(given)}, expected a string, or a list of {count} strings.")
    return [rid or "" for rid in given]


def _flag(fields: dict[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool | int):
        raise EngineError(f"{name} is {_shown(value)}, expected true or false.")
    return bool(value)


def _number(fields: dict[str, Any], name: str, default: float, kind: str = "number") -> float:
    """Return a finite number, unconverted because a float cannot hold every seed; the default if missing or null."""
    value = fields.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
    if not number or (kind == "whole number" and value != int(value)):
        raise EngineError(f"{name} is {_shown(value)}, expected a {kind}.")
    return value


def _integer(fields: dict[str, Any], name: str, default: int) -> int:
    return int(_number(fields, name, default, "whole number"))


def _prompts(body: dict[str, Any]) -> tuple[list[list[int] | str], bool]:
    """Return the prompts, and whether the request has a list of them."""
    ids: Any = body.get("input_ids")
    text: Any = body.get("text")
    if (ids is None) == (text is None):
        raise EngineError("expected either input_ids (a list of token ids, or a list of such lists) or text.")
    if text is not None:
        batch = isinstance(text, list)
        texts = text if batch else [text]
        if not all(isinstance(one, str) for one in texts):
            raise EngineError("text: expected a string or a list of strings.")
        return texts, batch
    batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
            raise EngineError("input_ids: expected a list of integers, or a list of such lists.")
    return prompts, batch


def _images(given: Any, count: int, batch: bool) -> list[tuple[bytes, ...]]:
    """Return the images of each prompt.

    image_data is a file in base64 (also as a data URL), or a list of files, which may be nested. For several
    prompts (a batch) it is one image for all, or a list with an image or a list of images for each.
    """
    if not given:
        return [()] * count
    by_prompt = given if batch and isinstance(given, list) else [given] * count
    if len(by_prompt) != count:
        raise EngineError(f"image_data is a list of {len(by_prompt)}, and there are {count} prompts.")
    return [tuple(map(_image, _flat([] if files is None else files))) for files in by_prompt]


def _flat(given: Any) -> list[Any]:
    return [image for one in given for image in _flat(one)] if isinstance(given, list) else [given]


def _image(given: Any) -> bytes:
    try:
        return base64.b64decode("".join(given.rpartition("base64,")[2].split()), validate=True)
    except (AttributeError, ValueError):
        raise ImageError(
            f"image_data holds {str(given)[:40]!r}; expected files in base64, or data URLs. Images are not fetched."
        ) from None


def _params(given: Any, clew: dict[str, Any], default_stop_ids: tuple[int, ...]) -> tuple[SamplingParams, int]:
    """Return the parameters in a prompt's sampling_params, and the number of sequences to generate from it (n)."""
    if not isinstance(given, dict):
        raise EngineError(f"sampling_params is {type(given).__name__}, expected an object.")
    known = SAMPLING_FIELDS + TEXT_FIELDS
    for name, value in given.items():
        if value is not None and name not in known and (name not in NEUTRAL or value != NEUTRAL[name]):
            hint = did_you_mean(name, known)
            raise EngineError(f"sampling_params has no field {name!r}.{hint} Known: {', '.join(SAMPLING_FIELDS)}.")
    stop = given.get("stop") or ()
    extra = given.get("stop_token_ids")
    if extra is not None and not (isinstance(extra, list) and set(map(type, extra)) <= {int}):
        raise EngineError(f"sampling_params: stop_token_ids is {extra!r}, expected a list of integers.")
    if clew.get("exact_stop"):
        stop_ids = None if extra is None else tuple(extra)
    elif given.get("ignore_eos"):
        stop_ids = tuple(extra or ())
    else:
        stop_ids = None if not extra else tuple(sorted({*default_stop_ids, *extra}))
    if not isinstance(stop, str | list | tuple):  # `ServedModel.check` checks the strings in it
        raise EngineError(f"sampling_params: stop is {_shown(stop)}, expected a string or a list of strings.")
    schema = given.get("json_schema")
    if not isinstance(schema, str | None):
        raise EngineError(f"sampling_params: json_schema is {_shown(schema)}, expected JSON text.")
    continues = _integer(clew, "continues", 0)
    copies = _integer(given, "n", 1)
    if continues < 0:
        raise EngineError(f"clew: continues is {continues}, expected 0 or more.")
    if copies < 1:
        raise EngineError(f"sampling_params: n is {copies}, expected at least 1.")
    params = SamplingParams(
        max_new_tokens=_integer(given, "max_new_tokens", 128),
        min_new_tokens=_integer(given, "min_new_tokens", 0),
        temperature=float(_number(given, "temperature", 1.0)),
        top_p=float(_number(given, "top_p", 1.0)),
        top_k=max(0, _integer(given, "top_k", -1)),
        min_p=float(_number(given, "min_p", 0.0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=stop_ids,
        seed=_integer(given, "sampling_seed", random.getrandbits(63)),
        continues=continues,
        json_schema=schema,
    )
    return params, copies


def answer(rid: str, request: GenerateRequest, completion: Completion, *, text: str, logprobs: bool) -> dict[str, Any]:
    """Return one sequence's part of the response."""
    reason: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "stop":
        reason["matched"] = completion.matched
    elif completion.finish_reason == "length":
        reason["length"] = request.params.max_new_tokens
    else:
        reason["message"] = "aborted: submit input_ids plus output_ids again to go on"
    spans = version_spans(completion.versions)
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(completion.output_ids),
        "cached_tokens": 0,
        "weight_version": spans[-1]["version"] if spans else None,
        "weight_versions": spans,
    }
    if logprobs:
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(completion.logprobs, completion.output_ids, strict=True)
        ]
    more: dict[str, Any] = {"sampling_mask": completion.sampling_mask, "sampled_by": completion.sampled_by or None}
    if completion.routed_experts is not None:
        file = io.BytesIO()
        np.save(file, completion.routed_experts, allow_pickle=False)
        more["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    if any(value is not None for value in more.values()):
        meta["clew"] = more
    return {"text": text, "output_ids": completion.output_ids, "meta_info": meta}


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """Return the stretches of tokens with equal versions: [{"version": "7", "start": 0, "end": 12}, ...]."""
    spans: list[dict[str, Any]] = []
    start = 0
    for version, run in itertools.groupby(versions):
        end = start + len(list(run))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans
