"""Images in a client's messages: they arrive base64-encoded, and the messages keep only their names."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from clew.gateway.dialect import Message
from clew.record.media import media_name


def _decoded(data: Any) -> Any:
    if not isinstance(data, str):
        return data  # pydantic says that the type is wrong
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError(f"{data[:40]!r} is not base64") from None


def _of_data_url(url: Any) -> Any:
    if not isinstance(url, str):
        return url
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError(f"{url[:40]!r} is not a data URL (data:image/png;base64,...); the gateway downloads nothing")
    return _decoded(data)


Base64 = Annotated[bytes, BeforeValidator(_decoded, json_schema_input_type=str)]
DataURL = Annotated[bytes, BeforeValidator(_of_data_url, json_schema_input_type=str)]

Content = str | list[dict[str, Any]]
"""Content of a message: its text, or, with images, a list of its parts in order, as chat templates take them."""


def content_of(parts: Sequence[str | bytes], images: dict[str, bytes]) -> Content:
    """Return texts and images, in order, as the content of a message, and add the images to `images` by their names."""
    if not any(isinstance(part, bytes) for part in parts):
        return "".join(map(str, parts))
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            images[name := media_name(part)] = part
            content.append({"type": "image", "image": name})
    return content


def image_names(messages: Sequence[Message]) -> list[str]:
    """Return the names of the images in these messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part["type"] == "image"]
