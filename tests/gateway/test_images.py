"""Images in each dialect: their tokens, whose turn extends whose, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clew.errors import ImageError
from clew.gateway import anthropic_messages, openai_chat, openai_responses
from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.app import _with_earlier
from clew.gateway.dialect import Refusal, Reply
from clew.gateway.sequences import assemble
from clew.models import vision as vision_module
from clew.models.loading import load_tokenizer
from clew.models.vision import Vision, load_vision
from clew.record.media import media_name
from tests.gateway.spoken import Spoken, session_on
from tests.models import SEEING_TEMPLATE, picture, seeing_model

RED, BLUE = picture("red"), picture("blue")


def data(image: bytes) -> str:
    return base64.b64encode(image).decode()


def chat_part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(image)}", "detail": "low"}}


def responses_part(image: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data(image)}", "detail": "auto"}


def messages_part(image: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(image)}}


def chat(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


class Seeing:
    """A session of a model that takes images, and says "ok"."""

    def __init__(self, folder: Path, template: str = SEEING_TEMPLATE) -> None:
        self.tokenizer: Any = load_tokenizer(str(folder))
        self.tokenizer.chat_template = template
        vision = load_vision(str(folder))
        assert vision is not None
        self.vision: Vision = vision
        self.engine = Spoken(self.tokenizer, lambda prompt: "ok")
        inner = session_on(self.engine)
        inner.resources = replace(inner.resources, vision=vision)
        self.session = AgentSession(inner, Limits())

    async def ask(self, dialect: Any, body: dict[str, Any]) -> Reply:
        ask = _with_earlier(self.session, dialect.parse({"model": "any", **body}))
        request = await self.session.submit(ask, json.dumps(body).encode(), retry=False)
        return (await request.answered())[0]

    def refused(self, dialect: Any, body: dict[str, Any]) -> str:
        with pytest.raises(Refusal) as refused:
            asyncio.run(self.ask(dialect, body))
        assert refused.value.status == 400
        return f"{refused.value.param}: {refused.value}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    seeing_model(folder)
    return folder


ONE: list[tuple[Any, Callable[[bytes], dict[str, Any]]]] = [
    (openai_chat, lambda image: chat({"type": "text", "text": "See"}, chat_part(image), {"type": "text", "text": "?"})),
    (
        openai_responses,
        lambda image: {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "See"},
                        responses_part(image),
                        {"type": "input_text", "text": "?"},
                    ],
                }
            ]
        },
    ),
    (
        anthropic_messages,
        lambda image: {
            "max_tokens": 9,
            **chat({"type": "text", "text": "See"}, messages_part(image), {"type": "text", "text": "?"}),
        },
    ),
]


@pytest.mark.parametrize(("dialect", "body"), ONE)
def test_an_image_stands_where_it_was_shown_in_each_dialect(folder: Path, dialect: Any, body: Any) -> None:
    seeing = Seeing(folder)
    reply = asyncio.run(seeing.ask(dialect, body(RED)))
    expected = seeing.vision.expanded("<|user|>See<image>?<|assistant|>", [RED])
    assert seeing.tokenizer.decode(reply.interaction.input_ids, skip_special_tokens=False) == expected
    assert expected.count("<image>") == 4 and seeing.engine.images == [[RED]]
    assert [each["image"] for each in reply.interaction.prompt[0]["content"] if each["type"] == "image"] == [  # type: ignore
        reply.interaction.images[0]
    ]


def test_a_turn_that_goes_on_extends_the_tokens_and_shows_all_images(folder: Path) -> None:
    seeing = Seeing(folder)
    first = chat(chat_part(RED), {"type": "text", "text": "this"})

    async def talk() -> list[Reply]:
        one = await seeing.ask(openai_chat, first)
        said = {"role": "assistant", "content": "ok"}
        more = [*first["messages"], said, {"role": "user", "content": [chat_part(BLUE)]}]
        two = await seeing.ask(openai_chat, {"messages": more})
        other = [*chat(chat_part(BLUE), {"type": "text", "text": "this"})["messages"], *more[1:]]
        return [one, two, await seeing.ask(openai_chat, {"messages": other})]

    one, two, other = asyncio.run(talk())
    assert two.interaction.input_ids[: len(one.interaction.all_ids)] == one.interaction.all_ids
    assert seeing.engine.images == [[RED], [RED, BLUE], [BLUE, BLUE]]
    assert two.interaction.input_ids == other.interaction.input_ids  # only images differ
    assert [len(chain) for chain in assemble(seeing.session.engine.interactions)] == [2, 1]
    assert "follows" not in other.interaction.details and two.interaction.details["follows"] == one.id


def test_previous_response_id_shows_the_earlier_images_too(folder: Path) -> None:
    seeing = Seeing(folder)

    async def talk() -> Reply:
        one = await seeing.ask(openai_responses, ONE[1][1](RED))
        content = [{"type": "function_call_output", "call_id": "c", "output": [responses_part(BLUE)]}]
        return await seeing.ask(openai_responses, {"input": content, "previous_response_id": one.id})

    two = asyncio.run(talk())
    assert seeing.engine.images == [[RED], [RED, BLUE]] and "follows" in two.interaction.details


def test_a_tools_result_may_be_an_image(folder: Path) -> None:
    seeing = Seeing(folder)
    result = {"type": "tool_result", "tool_use_id": "c", "content": [messages_part(BLUE)]}
    messages = [
        *chat({"type": "text", "text": "Take a picture"})["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "camera", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    asyncio.run(seeing.ask(anthropic_messages, {"max_tokens": 9, "messages": messages}))
    assert seeing.engine.images == [[BLUE]]


def test_tokens_are_counted_with_those_of_the_image(folder: Path) -> None:
    seeing = Seeing(folder)
    counted = [
        asyncio.run(seeing.session.count_tokens(anthropic_messages.parse_count({"model": "m", **chat(*parts)})))
        for parts in (
            [{"type": "text", "text": "See"}],
            [{"type": "text", "text": "See"}, messages_part(RED), messages_part(RED)],
        )
    ]
    assert counted[1] - counted[0] == 2 * len(seeing.vision.tokens_of(RED))


PARTS = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}<|assistant|>"
)
"""Chat template like LLaVA's, which goes through the content part by part."""


def test_a_template_that_takes_parts_alone_gets_parts(folder: Path) -> None:
    seeing = Seeing(folder, PARTS)
    body = {"messages": [{"role": "system", "content": "Look."}, *chat(chat_part(RED))["messages"]]}
    reply = asyncio.run(seeing.ask(openai_chat, body))
    text = seeing.tokenizer.decode(reply.interaction.input_ids, skip_special_tokens=False)
    assert text == "<|system|>Look.<|user|><image><image><image><image><|assistant|>"


def test_two_first_requests_side_by_side_both_get_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tests, in a thread, what the template takes. The second arrives meanwhile."""
    seeing = Seeing(folder, PARTS)
    apply = seeing.tokenizer.apply_chat_template

    def slowly(messages: Any, **options: Any) -> Any:
        if messages[0]["content"] == "clew":
            time.sleep(0.5)
        return apply(messages, **options)

    monkeypatch.setattr(seeing.tokenizer, "apply_chat_template", slowly)

    def body(word: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": word}, *chat(chat_part(RED))["messages"]]}

    async def both() -> list[Reply]:
        first = asyncio.ensure_future(seeing.ask(openai_chat, body("Look.")))
        await asyncio.sleep(0.2)
        return [await seeing.ask(openai_chat, body("See.")), await first]

    texts = [seeing.tokenizer.decode(reply.interaction.input_ids) for reply in asyncio.run(both())]
    assert "See." in texts[0] and "Look." in texts[1]


def test_threads_may_ask_for_the_tokens_of_images_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_module, "REMEMBERED", 1)
    vision = Seeing(folder).vision

    class Slow(dict[bytes, tuple[int, ...]]):
        """Dictionary that is slow enough for another thread to change it meanwhile."""

        def __iter__(self) -> Iterator[bytes]:
            iterator = super().__iter__()
            time.sleep(0.03)
            return iterator

        def __setitem__(self, key: bytes, value: tuple[int, ...]) -> None:
            time.sleep(0.05)
            super().__setitem__(key, value)

    vision._tokens_by_image = Slow()
    images = [picture(color) for color in ("red", "blue", "green", "white")]
    expected = [Seeing(folder).vision.tokens_of(image) for image in images]
    vision.tokens_of(images[0])  # from here on, each new image takes the place of another
    with ThreadPoolExecutor(len(images)) as pool:
        for _ in range(3):
            assert list(pool.map(vision.tokens_of, images)) == expected
    assert len(vision._tokens_by_image) == 1


def test_what_is_no_image_is_refused(folder: Path) -> None:
    seeing = Seeing(folder)

    def told(part: Any, dialect: Any = openai_chat) -> str:
        return seeing.refused(dialect, {"max_tokens": 9, **chat(part)})

    url = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    assert "messages.0.content.0.image_url.url: " in told(url) and "downloads nothing" in told(url)
    assert "is not base64" in told({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}})
    assert told(chat_part(b"no image")).startswith("messages: 8 bytes cannot be read as an image: ")
    placeholder = told({"type": "text", "text": "What is <image>?"})
    assert "1 placeholders '<image>' for 0 images" in placeholder
    source = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
    assert "messages.0.content.0.source.type: 'url' is not served here, only" in told(source, anthropic_messages)
    assistant = {"messages": [*chat(chat_part(RED))["messages"], {"role": "assistant", "content": [chat_part(RED)]}]}
    asyncio.run(seeing.ask(openai_chat, assistant))  # strange, and no defect


def test_a_workflow_sees_too(folder: Path) -> None:
    seeing = Seeing(folder)
    engine = seeing.session.engine
    ids = engine.see("a <image>?", [RED])
    interaction = asyncio.run(engine.generate(ids, images=[RED]))
    assert len(ids) == 3 + len(seeing.vision.tokens_of(RED)) and seeing.engine.images == [[RED]]
    assert interaction.images == (media_name(RED),)
    with pytest.raises(ImageError, match=r"there are 0 placeholders '<image>' for 1 images"):
        engine.see("a", [RED])
    engine.resources = replace(engine.resources, vision=None)
    with pytest.raises(ImageError, match="the model, or its inference engine, takes text only"):
        engine.see("a", [])
