"""Constraints that a request puts on the reply: which ones can be honoured, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace

from clew.gateway.dialect import ModelRequest, Refusal
from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.output_parser import CALL_CLOSES, CALL_OPENS
from clew.gateway.turns import Turns


def constrain(request: ModelRequest, engine: EpisodeEngine, turns: Turns) -> tuple[ModelRequest, str]:
    """Return the request as the engine can honour it, and the first words of the reply.

    The reply must begin with these words if the request forces a tool call. Otherwise they are empty.

    Raises:
        Refusal: The engine or the chat template cannot meet a demand.
    """
    if request.logprobs:
        field = "top_logprobs" if request.text is None else "logprobs"
        message = (
            f"Cannot honour {field}={request.logprobs}: the engine returns the logprob of the sampled token only. "
            f"Set {field}=0."
        )
        raise Refusal(400, message, param=field)
    forced = request.tool_choice not in ("auto", "none")
    if forced:
        request = replace(request, response_format=None)  # a format applies to text, and a forced call leaves no text
    if request.response_format is not None and request.shown_tools:
        message = (
            f"Cannot honour {request.response_format.param} together with tools: the schema would apply to the whole "
            f'output, so the model could not call a tool. Send no tools, or set tool_choice to "none".'
        )
        raise Refusal(400, message, param=request.response_format.param)
    request = _with_known_variables(request, engine, turns)
    if not request.shown_tools or (request.parallel_tool_calls and not forced):
        return request, ""
    if CALL_OPENS not in str(engine.tokenizer.chat_template):
        param = "tool_choice" if forced else "parallel_tool_calls"
        message = (
            f"Cannot honour {param}: the model's chat template has no {CALL_OPENS}, so the gateway cannot begin or end "
            f"a tool call for the model. Leave out {param}."
        )
        raise Refusal(400, message, param=param)
    if stops_after_call(request):
        stops = request.sampling.get("stop", engine.resources.sampling.stop)
        request = replace(request, sampling={**request.sampling, "stop": (*stops, CALL_CLOSES)})
    if request.tool_choice == "required":
        return request, f'{CALL_OPENS}\n{{"name": "'
    return request, f'{CALL_OPENS}\n{{"name": {json.dumps(request.tool_choice)}, "arguments": ' if forced else ""


def stops_after_call(request: ModelRequest) -> bool:
    """Return whether the gateway ends the output after the first tool call, at CALL_CLOSES."""
    return bool(request.shown_tools) and not request.parallel_tool_calls


def _with_known_variables(request: ModelRequest, engine: EpisodeEngine, turns: Turns) -> ModelRequest:
    """Return the request without the variables that the chat template does not use, if leaving them out does no harm.

    A variable that is False, such as enable_thinking, is dropped silently: there is nothing to turn off. Thinking
    or an effort is dropped with a warning, because frameworks ask for it by default for some model names.

    Raises:
        Refusal: The request sets another variable that the template does not use.
    """
    unknown = [name for name in request.template if name not in turns.variables]
    for name in unknown:
        value = request.template[name]
        if value is False:
            continue
        if name == "reasoning_effort":
            engine.warn(f"the client asks for reasoning effort {value!r}, a setting that the model does not have")
        elif name == "enable_thinking":
            engine.warn("the client asks for thinking, a setting that the model does not have")
        else:
            message = f"Cannot honour {name}: the model's chat template has no such variable. Leave it out."
            raise Refusal(400, message, param=name)
    return replace(request, template={name: value for name, value in request.template.items() if name not in unknown})
