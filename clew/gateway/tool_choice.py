"""Tools and reasoning effort, as several dialects ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clew.gateway.dialect import Refusal
from clew.gateway.fields import Fields


class Function(Fields):
    """A tool, as it is described to the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    """True asks for arguments that match the schema. Many frameworks set it. It is not enforced: a warning says so."""

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


def notes_on_strict(functions: Sequence[Function]) -> list[str]:
    """Return a warning if the client sets strict for tools."""
    names = ", ".join(function.name for function in functions if function.strict)
    if not names:
        return []
    return [f"the client sets strict for {names}: the engine cannot hold arguments to a schema, so check them"]


def refuse_choice(choice: str, names: Sequence[str]) -> None:
    """Raise Refusal for a tool_choice (auto, none, required, a tool's name) that tools of these names cannot meet."""
    if choice in ("auto", "none", *names) or (choice == "required" and names):
        return
    why = f"it names {choice!r}, which is not among the tools. Name one of: {', '.join(names)}."
    if not names:
        why = "it requires a tool call, but the request has no tools. Send tools, or leave tool_choice out."
    raise Refusal(400, f"Cannot honour tool_choice: {why}", param="tool_choice")


def allowed_functions(
    functions: Sequence[Function], names: Sequence[str], mode: str
) -> tuple[list[Function], str, str]:
    """Apply the tool_choice `allowed_tools`: only the allowed tools are described to the model.

    Returns:
        The allowed tools, the tool_choice in place of `allowed_tools`, and a warning.

    Raises:
        Refusal: A name is not among the tools.
    """
    for name in names:
        refuse_choice(name, [function.name for function in functions])
    allowed = [function for function in functions if function.name in names]
    if len(allowed) == len(functions):
        note = "the client sends tool_choice allowed_tools with all tools: it has no effect and is ignored"
    else:
        note = "the client sends tool_choice allowed_tools: the model is told only of the allowed tools"
    if mode == "required" and len(allowed) == 1:  # the gateway can then begin the call with its name
        return allowed, allowed[0].name, note
    return allowed, mode, note


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of the chat template for a reasoning effort."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
