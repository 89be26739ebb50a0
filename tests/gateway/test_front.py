"""`clew serve`, and `clew serve --engine URL` in front of it: as a server that takes token ids, and as a provider."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anthropic
import openai
import pytest

from clew.record.rows import from_table
from clew.record.run import RunDirectory
from tests.models import tiny_model, tiny_tokenizer


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[tuple[str, list[str]]]:
    """The base URL that `clew serve` prints, and its lines up to there."""
    command = [sys.executable, "-m", "clew", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables) as server:
        assert server.stdout is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("export OPENAI_BASE_URL="):
                break
        yield lines[-1].split()[1].partition("=")[2], lines
        server.send_signal(signal.SIGTERM)
        server.wait(10)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_model(folder / "model", context=128)
    tiny_tokenizer(folder / "model")
    values = {"experiment": "e", "root": str(folder / "runs"), "data": {"path": "none"}}
    (folder / "config.yaml").write_text(json.dumps({**values, "model": {"path": str(folder / "model")}}))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def behind(config: Path) -> Iterator[str]:
    """The base URL of a server that is up."""
    with serving(str(config), "trial=behind") as (url, _):
        yield url


async def talk(url: str, model: str) -> list[str]:
    """One turn in each dialect, and a second in OpenAI's; the ids of the responses."""
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-mine") as client:
        messages: list = [{"role": "user", "content": "hello"}]
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}, *messages]
        second = await client.chat.completions.create(model=model, messages=messages, max_tokens=5)
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="sk-other") as client:
        third = await client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "hello"}])
    return [first.id, second.id, third.id]


def test_a_served_model_records_the_sessions_of_any_key(config: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving(str(config), "--record", str(record)) as (url, lines):
        assert lines[0].startswith("LLM inference server launched at: CLEW_LLM_SERVER_ADDRS=")
        ids = asyncio.run(talk(url, "model"))
        assert ids == ["g000000.e0.i0", "g000000.e0.i1", "g000001.e0.i0"]

        async def wrong_model() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
                await client.completions.create(model="gpt-5", prompt="a")

        with pytest.raises(openai.NotFoundError, match="no model 'gpt-5' here; served: "):
            asyncio.run(wrong_model())
    filed = {name: from_table(table) for name, table in RunDirectory(record).inbox.scan().items()}
    assert sorted(filed) == ["g000000", "g000001"]
    (row,) = filed["g000000"]
    assert [each["id"] for each in row.interactions] == ids[:2] and row.loss_mask.sum() > 5


def test_in_front_of_a_server_that_takes_token_ids(config: Path, behind: str, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving(str(config), "--engine", behind, "--record", str(record)) as (url, lines):
        assert lines[0].startswith(f"in front of clew serve or SGLang at {behind}")
        assert asyncio.run(talk(url, "model")) == ["g000000.e0.i0", "g000000.e0.i1", "g000001.e0.i0"]
    assert RunDirectory(record).inbox.names() == {"g000000", "g000001"}


def test_in_front_of_a_provider_requests_are_passed_on_and_nothing_is_captured(config: Path, behind: str) -> None:
    # /get_model_info is what tells `clew serve` from a provider: one level deeper there is none
    provider = behind.removesuffix("/v1") + "/nowhere"
    with serving(str(config), "--engine", provider, OPENAI_API_KEY="sk-theirs") as (url, lines):
        assert lines[0].startswith("in front of the provider") and "no tokens are captured" in lines[0]

        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="sk-mine", max_retries=0) as client:
                await client.models.list()

        with pytest.raises(openai.NotFoundError):
            asyncio.run(ask())


def test_in_front_of_nothing(config: Path) -> None:
    command = [sys.executable, "-m", "clew", "serve", str(config), "--engine", "http://127.0.0.1:9/v1"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and "nothing that serves a model answers at" in failed.stderr


def test_beyond_this_machine_a_session_wants_a_key(config: Path, behind: str) -> None:
    with serving(str(config), "--engine", behind, "inference.listen=0.0.0.0:0") as (url, lines):
        key = lines[-1].split("OPENAI_API_KEY=")[1].strip()
        here = url.replace("0.0.0.0", "127.0.0.1")

        async def ask(key: str) -> str:
            async with openai.AsyncOpenAI(base_url=here, api_key=key, max_retries=0) as client:
                said = await client.completions.create(model="model", prompt="a", max_tokens=2)
                return said.id

        assert asyncio.run(ask(key)) == "g000000.e0.i0"
        with pytest.raises(openai.AuthenticationError, match="unknown API key; POST /rl/start_session"):
            asyncio.run(ask("sk-clew"))
    provider = behind.removesuffix("/v1") + "/nowhere"
    command = [sys.executable, "-m", "clew", "serve", str(config), "--engine", provider, "inference.listen=0.0.0.0:0"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "would lend your key" in refused.stderr
