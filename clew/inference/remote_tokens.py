"""Tokens of a vLLM or SGLang server: completions without the token of images, cut where they should have ended."""

from __future__ import annotations

from dataclasses import replace

from clew.errors import EngineError
from clew.inference.backend import Backend
from clew.inference.protocol import Completion, GenerateRequest, OnToken
from clew.inference.request_checks import ServedModel, matched_stop, stop_window
from clew.models.vision import Vision
from clew.seeds import derive_seed

DRAWS = 1000
"""Number of times that the model may draw the token that stands for images before the completion fails."""


async def drawn(backend: Backend, request: GenerateRequest, vision: Vision | None) -> Completion:
    """Return the server's completion, without the token that stands for images: another is drawn in its place.

    No image would belong to it, and the trainer would fail. A ban would change the other tokens' logprobs. At
    temperature 0 the same token would be drawn each time, so it is left there.

    Raises:
        EngineError: The model drew this token `DRAWS` times.
    """
    params, tell = request.params, request.on_token
    if vision is None or params.temperature == 0:
        return await backend.generate(request)
    image = vision.image_id
    ends = replace(params, stop_token_ids=(*(params.stop_token_ids or ()), image))
    tells = tell and (lambda token, logprob: None if token == image else tell(token, logprob))
    asked = replace(request, params=ends, on_token=tells)
    so_far = Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")
    for _ in range(DRAWS):
        part = await backend.generate(asked)
        if part.output_ids[-1:] != [image]:
            return so_far.followed_by(part)
        part = part.first(len(part.output_ids) - 1)
        so_far = so_far.followed_by(part)
        asked = asked.continued(part.output_ids)
        asked = replace(asked, params=replace(asked.params, seed=derive_seed(asked.params.seed, "image")))
    raise EngineError(f"The model drew token {image}, which stands for images, {DRAWS} times in one completion.")


def tells_until_stop(request: GenerateRequest, core: ServedModel) -> OnToken | None:
    """Return the function that takes each token of a request. It passes on no token after a stop string.

    Servers do not find a stop string that began before an update, see `cut_at_end`.
    """
    tell, told, over = request.on_token, list[int](), False
    if tell is None or not _reach(request):
        return tell

    def tell_some(token: int, logprob: float) -> None:
        nonlocal over
        if not over:
            tell(token, logprob)
            told.append(token)
            over = len(told) <= _reach(request) and matched_stop(request, told, core.tokenizer) is not None

    return tell_some


def cut_at_end(request: GenerateRequest, completion: Completion, core: ServedModel) -> Completion:
    """Return a completion up to its end, in two cases in which the server did not see that it had ended.

    - A stop string began before an update. The server got the tokens from before the update as part of the prompt, and
      looks for stop strings only in what follows.
    - SGLang reports "abort" for a request that reaches its end in the very step in which it is aborted. Without the
      mark "stop", somebody would continue it.
    """
    output_ids, params = completion.output_ids, request.params
    for count in range(1, min(len(output_ids), _reach(request)) + 1):
        if (matched := matched_stop(request, output_ids[:count], core.tokenizer)) is not None:
            return replace(completion.first(count), finish_reason="stop", matched=matched)
    if completion.finish_reason != "abort" or len(output_ids) <= params.min_new_tokens:
        return completion
    ends = output_ids[-1] in params.stop_ids(core.default_stop_ids)
    matched = output_ids[-1] if ends else matched_stop(request, output_ids, core.tokenizer)
    return completion if matched is None else replace(completion, finish_reason="stop", matched=matched)


def _reach(request: GenerateRequest) -> int:
    """Return how many tokens after an update may belong to a stop string that began before it; 0: none."""
    return stop_window(request.params.stop) if request.params.stop and request.params.continues else 0
