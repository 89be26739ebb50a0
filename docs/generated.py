"""MkDocs hooks: tables of the configuration and of the commands, made from the code when the site is built."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from clew.cli.main import app
from clew.config import Config, nested_section

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in what is generated, and name the files of the checkout that a page links to."""
    markdown = markdown.replace("<!-- configuration -->", "\n".join(configuration()))
    markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: _link(link, folder), markdown)


def _link(link: re.Match[str], folder: str) -> str:
    """Return a link within docs/ as it is, and one that leads out of it as the name of the file."""
    path = posixpath.normpath(f"{folder}/{link[2]}")
    if path.startswith("docs/"):
        return link[0]
    if not (ROOT / path).exists():
        raise ValueError(f"{folder}: {link[0]} leads to {path}, which does not exist")
    name = link[1].strip("`")
    return f"`{path}`" if name in path else f"{name} (`{path}`)"


def configuration() -> Iterator[str]:
    """Yield a table for each section of the configuration: field, default, values and sentence."""
    sections = {name: field for name, field in Config.model_fields.items() if _is_section(field)}
    yield from _table("Top level", Config, {name: f for name, f in Config.model_fields.items() if name not in sections})
    for name, field in sections.items():
        section: Any = field.annotation
        yield from _table(name, section, section.model_fields)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(name: str, section: type[BaseModel], fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield f"\n## {name}\n\n{(section.__doc__ or '').strip()}\n"
    yield "| field | default | values | |\n| --- | --- | --- | --- |"
    yield from _rows("" if section is Config else f"{name}.", fields)


def _rows(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    """Yield a line for each field, and after a section that may be null those of its fields."""
    for field_name, field in fields.items():
        default = "needed" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
        sentence = " ".join((field.description or "").split()).replace("|", "\\|")
        nested = nested_section(field)
        values = _values(field) if nested is None else "null or the fields below"
        yield f"| `{prefix}{field_name}` | {default} | {values} | {sentence} |"
        if nested is not None:
            yield from _rows(f"{prefix}{field_name}.", nested.model_fields)


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def _values(field: FieldInfo) -> str:
    """Return what a field may be, in words."""
    kinds = [field.annotation] if get_origin(field.annotation) in (None, Literal) else list(get_args(field.annotation))
    if get_origin(field.annotation) in (list, dict, tuple):
        return {list: "a list", dict: "fields by name", tuple: "two numbers"}[get_origin(field.annotation)]  # type: ignore[index]
    words = {int: "whole number", float: "number", str: "text", bool: "true, false", type(None): "null"}
    said = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            said.append(", ".join(f"`{value}`" for value in get_args(kind)))
        elif get_origin(kind) in (list, dict):
            said.append("a list" if get_origin(kind) is list else "fields by name")
        else:
            said.append(words.get(kind, "text"))
    bounds = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    limits = [
        f"{bounds[type(limit).__name__]} {getattr(limit, type(limit).__name__.lower()):g}"
        for limit in field.metadata
        if type(limit).__name__ in bounds
    ]
    said[0] += f" {', '.join(limits)}" if limits else ""
    return " or ".join(said)


def commands() -> Iterator[str]:
    """Yield the help of each command, as `clew COMMAND --help` prints it on a terminal of 110 columns."""
    group = typer.main.get_command(app)
    yield from _help(group, "clew")


def _help(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=110, max_content_width=110)
    path = context.command_path
    yield f"\n## {path}\n\n```text\n{command.get_help(context).strip()}\n```"
    for each in getattr(command, "commands", {}).values():
        yield from _help(each, each.name, context)
