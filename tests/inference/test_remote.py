"""`clew serve` before a server process of another kind: how it is started, and what is said when it is not."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from clew.config import Config
from clew.config_fields import Inference, Model
from clew.errors import ConfigError, EngineError
from clew.inference import remote, serve, sglang, vllm, weight_group
from clew.inference.app import Application
from clew.inference.backend import Launch
from clew.inference.client import FROZEN_S, HTTPEngine
from clew.inference.detect_server import FoundEngine
from clew.inference.local import load_engine
from clew.inference.protocol import Completion, EngineUnreachable, FaultyAnswer, GenerateRequest, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine, start_remote
from clew.inference.remote_tokens import tells_until_stop
from clew.inference.retries import generate_through_aborts
from clew.inference.server_process import ServerProcess
from clew.inference.sglang import NEEDED, SESSION, SGLangEngine
from clew.inference.vllm import VLLMEngine
from clew.models.tensor_digest import hex_digests
from clew.processes import free_port
from clew.record.run import RunDirectory, Server
from clew.record.weights import BROADCAST_FILE, DIGESTS_KEY, WeightRef
from clew.waits import Reporter, current_waits
from tests.inference.test_faulty_servers import serving
from tests.inference.test_sglang_client import broadcast
from tests.models import seeing_model, tiny_model, tiny_tokenizer


def config(**inference: Any) -> Config:
    return Config.model_validate(
        {
            "experiment": "e",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "inference": {"backend": "vllm", **inference},
        }
    )


def test_options_go_to_the_servers_command_line(tmp_path: Path) -> None:
    args = {"enforce-eager": True, "max_model_len": 512, "swap-space": None, "enable-lora": False}
    launch = VLLMEngine.launch(config(args=args, python="/opt/python", max_running=7), 1234, tmp_path / "engine")
    words = launch.command
    assert words[:3] == ["/opt/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--max-model-len") + 1] == "512" and "--enforce-eager" in words
    assert words[words.index("--max-num-seqs") + 1] == "7" and words[words.index("--port") + 1] == "1234"
    assert "--swap-space" not in words and "--enable-lora" not in words
    found = Path(launch.environment["PYTHONPATH"]) / "clew" / "inference" / "vllm_worker.py"
    assert found.is_file(), "vLLM's workers import Clew's extension, and nothing that is installed beside it"
    assert list(Path(launch.environment["PYTHONPATH"]).iterdir()) == [found.parents[1]]


@pytest.mark.parametrize("name", ["port", "--logprobs-mode", "worker_extension_cls"])
def test_options_that_clew_sets_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"inference.args.*Clew sets this option"):
        VLLMEngine.launch(config(args={name: "x"}), 1, tmp_path)


def test_adapters_in_float32_are_refused_for_vllm_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config()
    lora = given.model_copy(update={"training": given.training.model_copy(update={"lora_rank": 4})})
    monkeypatch.setattr(vllm, "gpus", list)
    assert "--enable-lora" in VLLMEngine.launch(lora, 1, tmp_path).command
    monkeypatch.setattr(vllm, "gpus", lambda: ["0"])
    with pytest.raises(ConfigError, match=r"only in bfloat16.*enable-lora to false"):
        VLLMEngine.launch(lora, 1, tmp_path)
    assert "--enable-lora" not in VLLMEngine.launch(given, 1, tmp_path).command


def started(tmp_path: Path, program: str) -> ServerProcess:
    return ServerProcess(Launch(command=[sys.executable, "-c", program], environment={}), tmp_path / "log")


def until_ended(process: ServerProcess) -> str:
    until(process.ended, "the server does not end")
    return process.ended() or ""


def test_the_cause_of_a_servers_end_is_the_error_that_the_others_follow_from(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ValueError: of a server before this one\n")
    process = started(
        tmp_path,
        "print('(EngineCore pid=7) ERROR ValueError: the cache is too small')\n"
        "raise RuntimeError('Engine core initialization failed. See root cause above.')",
    )
    ended = until_ended(process)
    assert ended.startswith("ended with code 1: ValueError: the cache is too small (its log: ")


def test_an_error_without_a_message_is_the_cause_and_a_warning_that_quotes_an_error_is_not(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        "print('(APIServer pid=7) WARNING 11-29 [utils.py:255] This can cause `OSError: [Errno 24] Too many`')\n"
        "print('(Worker pid=8) ERROR 11-29 [executor.py:9]     assert sum(section) == rotary_dim // 2')\n"
        "print('(Worker pid=8) ERROR 11-29 [executor.py:9] AssertionError')\n"
        "print('    raise KeyError')\n"
        "raise RuntimeError('Engine core initialization failed. See root cause above.')",
    )
    assert until_ended(process).startswith("ended with code 1: AssertionError (its log: ")


@pytest.mark.parametrize("field", ["", "dtype"])
def test_the_cause_is_told_with_the_line_on_which_pydantic_says_what_is_wrong(tmp_path: Path, field: str) -> None:
    process = started(
        tmp_path,
        "print('(APIServer pid=7) pydantic_core.ValidationError: 1 validation error for ModelConfig')\n"
        + (f"print('(APIServer pid=7) {field}')\n" if field else "")
        + "print('(APIServer pid=7)   Value error, max_model_len (99) is above 64 [type=value_error, input=…]')\n"
        "print('(APIServer pid=7)     For further information visit a page')\n"
        "raise SystemExit(1)",
    )
    said = (
        f"1 validation error for ModelConfig: {field}{': ' if field else ''}Value error, max_model_len (99) is above 64"
    )
    assert f"pydantic_core.ValidationError: {said} (its log" in until_ended(process)


def test_a_server_that_says_nothing(tmp_path: Path) -> None:
    assert "ended with code 3: it wrote nothing" in until_ended(started(tmp_path, "raise SystemExit(3)"))


STARTS_CHILD = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)
"""Program of a server that leaves SIGTERM alone, and writes the pid of a process that it starts to its log."""


def child_in(log: Path) -> int:
    until(lambda: log.exists() and log.read_text().strip(), "the server starts no child")
    return int(log.read_text())


def until(condition: Callable[[], Any], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    process = started(tmp_path, STARTS_CHILD)
    child = child_in(process.log)
    os.kill(process.pid, signal.SIGKILL)
    process.end()
    until(lambda: gone(child), "the child of a dead server lives on")


def test_what_a_server_has_started_ends_with_the_killed_process_of_clew(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from clew.inference.backend import Launch\n"
        "from clew.inference.server_process import ServerProcess\n"
        "launch = Launch(command=[sys.executable, '-c', sys.argv[1]], environment={})\n"
        "ServerProcess(launch, Path(sys.argv[2]))\n"
        "sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, STARTS_CHILD, str(tmp_path / "log")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as parent:
        child = child_in(tmp_path / "log")
        parent.kill()
    until(lambda: gone(child), "the child of a server lives on without Clew")


def test_a_server_that_is_killed_is_said_to_be_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert until_ended(process).startswith("was killed by signal 9: it wrote nothing")


def test_no_such_python(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"/no/python does not exist. inference.python names"):
        ServerProcess(Launch(command=["/no/python"], environment={}), tmp_path / "log")


def serve_command(folder: Path, python: str) -> list[str]:
    """Return the command of a real `clew serve` of a tiny model with vLLM, as far as this Python has it."""
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    sections = {
        "experiment": "e",
        "root": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "inference": {"backend": "vllm", "python": python},
    }
    (folder / "c.yaml").write_text(json.dumps(sections))
    return [sys.executable, "-P", "-m", "clew", "serve", str(folder / "c.yaml")]


def test_a_server_that_cannot_start_ends_clew_serve_with_the_cause(tmp_path: Path) -> None:
    ended = subprocess.run(serve_command(tmp_path, sys.executable), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "vLLM did not start: it ended with code 1:" in ended.stderr
    assert "No module named" in ended.stderr or "ModuleNotFoundError" in ended.stderr
    assert "vllm.log" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_starts_ends_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && exit 1\nsleep 600 & echo $! > {tmp_path}/child; wait\n")
    python.chmod(0o755)
    with subprocess.Popen(serve_command(tmp_path, str(python)), stderr=subprocess.PIPE, text=True) as serving:
        try:
            child = child_in(tmp_path / "child")
            serving.send_signal(number)
            assert serving.wait(30) == 0 and "Traceback" not in serving.communicate()[1]
        finally:
            serving.kill()
    until(lambda: gone(child), "what the server has started lives on")


class Answers(BaseHTTPRequestHandler):
    """A server that answers every request with one status."""

    status, body = 404, b"not here"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(status: int, body: Any) -> Iterator[str]:
    """Yield the address of a server that always answers so."""
    handler = type("Handler", (Answers,), {"status": status, "body": json.dumps(body).encode()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize(("status", "body"), [(404, "not here"), (200, {}), (200, {"paths": {"/shop": {}}})])
def test_an_address_that_is_no_inference_server_is_refused_with_what_to_do(
    tmp_path: Path, backend: Any, status: int, body: Any
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config(args={}).model_copy(
        update={
            "model": Model(path=str(tmp_path / "model")),
            "inference": Inference(backend=backend),
            "root": str(tmp_path / "runs"),
        }
    )
    run = RunDirectory(named.run_path)

    async def attach(address: str) -> None:
        engine = start_remote(named, run, attach=address)
        try:
            with run.report("server") as reporter:
                await engine.start(reporter)
        finally:
            await engine.close()

    with answering(status, body) as address, pytest.raises(EngineError) as raised:
        asyncio.run(attach(address))
    said = str(raised.value)
    assert address in said and ("Give the host:port" in said or "it has no /" in said or "does not offer /" in said)


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
def test_a_server_that_wants_its_key_is_told_from_one_of_another_kind(kind: Any) -> None:
    async def prepare(address: str) -> None:
        client = kind.client(config(args={}), address)
        try:
            await client.prepare()
        finally:
            await client.close()

    with answering(401, {"error": "Unauthorized"}) as address, pytest.raises(EngineError) as raised:
        asyncio.run(prepare(address))
    said = str(raised.value)
    assert f"{address} refused /openapi.json (401)" in said and "give that key in CLEW_LLM_SERVER_TOKEN" in said


def test_an_sglang_that_takes_part_in_no_broadcast_is_refused_before_the_first(tmp_path: Path) -> None:
    named = config(args={})
    named = named.model_copy(update={"weights": named.weights.model_copy(update={"via": "collective"})})

    async def prepare(address: str) -> None:
        client = SGLangEngine.client(named, address)
        try:
            await client.prepare()
        finally:
            await client.close()

    paths = {path: {} for path in (*NEEDED, *SESSION[1:])}
    with answering(200, {"paths": paths}) as address, pytest.raises(EngineError) as raised:
        asyncio.run(prepare(address))
    assert f"does not offer {SESSION[0]}," in str(raised.value) and "Set weights.via to disk" in str(raised.value)


def test_a_vllm_that_this_python_finds_by_its_path_is_found_by_the_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/modules/vllm")
    here = VLLMEngine.launch(config(python=None), 1234, tmp_path / "engine")
    other = VLLMEngine.launch(config(python="/opt/python"), 1234, tmp_path / "engine")
    assert here.environment["PYTHONPATH"] == f"{tmp_path / 'engine'}:/opt/modules/vllm"
    assert other.environment["PYTHONPATH"] == str(tmp_path / "engine")


@pytest.mark.parametrize("known", [True, False])
def test_an_option_that_the_installed_vllm_lacks_is_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    (package / "cli_args.py").write_text("enable_scale_out: bool = False" if known else "tokens_only: bool = False")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    launch = VLLMEngine.launch(config(python=sys.executable), 1234, tmp_path / "engine")
    assert ("--enable-scale-out" in launch.command) == known


@pytest.mark.parametrize("engine", [HTTPEngine, SGLangEngine, VLLMEngine])
def test_other_counts_of_tokens_than_of_logprobs_are_refused(engine: Any) -> None:
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 3, "output_token_logprobs": [[-1.0, 7, None]]}
    choice = {"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}

    async def ask(address: str) -> None:
        client = engine(address, "model", 256) if engine is VLLMEngine else engine(address)
        try:
            await client.generate(GenerateRequest([1, 2], SamplingParams(max_new_tokens=3)))
        finally:
            await client.close()

    answer = {"output_ids": [7, 8, 9], "meta_info": meta, "choices": [choice]}
    with answering(200, answer) as address, pytest.raises(EngineError, match=r"3 tokens(, | and )1 logprobs"):
        asyncio.run(ask(address))


def test_an_address_where_nothing_answers_is_questioned_although_the_first_look_takes_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model")), "root": str(tmp_path / "runs")})
    run = RunDirectory(named.run_path)

    async def attach(address: str) -> None:
        engine = start_remote(named, run, attach=address)
        try:
            with run.report("server") as reporter, pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.start(reporter), 5)
        finally:
            await engine.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        asyncio.run(attach(address))
    said = f"nothing serves at {address} yet (no answer in 2 s): waiting. Is this the host:port of vLLM"
    assert [said in message for message in caplog.messages].count(True) == 1


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexec sleep 60\n"])
def test_a_python_that_lists_no_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    monkeypatch.setattr(sglang, "OPTIONS_S", 0.2)
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    named = config(backend="sglang", args={"tp-size": 2}, python=str(python))
    with pytest.raises(ConfigError, match=rf"SGLang with {python} \(inference.python\): .*(No such|did not list)"):
        SGLangEngine.launch(named, 1, tmp_path)


async def score(client: Any) -> None:
    await client.score([7, 8])


async def prepare(client: Any) -> None:
    await client.prepare()


async def checksums(client: Any) -> None:
    await client._checksums()


async def logprobs(client: Any) -> None:
    await client._reports_before_temperature()


async def verify(client: Any) -> None:
    await client.verify(WeightRef(version=5, path="/nowhere", digest=""))


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        *((VLLMEngine, ask) for ask in (score, prepare, verify)),
        *((SGLangEngine, ask) for ask in (score, prepare, checksums, logprobs)),
    ],
)
def test_an_answer_of_another_shape_is_no_traceback(kind: Any, ask: Any) -> None:
    routes = {path: {} for path in (*NEEDED, *vllm.NEEDED)}

    async def run(address: str) -> None:
        client = kind.client(config(), address)
        try:
            await ask(client)
        finally:
            await client.close()

    with answering(200, {"paths": routes, "data": []}) as address, pytest.raises(FaultyAnswer, match="cannot be read"):
        asyncio.run(run(address))


def test_a_broadcast_of_which_the_digests_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broadcast.json").write_text("{")
    ref = WeightRef(version=5, path=str(tmp_path), digest="")
    for client in (SGLangEngine("127.0.0.1:1"), VLLMEngine("127.0.0.1:1", "model", 256)):
        with pytest.raises(EngineError, match=r"Cannot load version 5 into (SGLang|vLLM) at .*broadcast\.json"):
            asyncio.run(client.load(ref))


def test_a_tensor_without_elements() -> None:
    assert vllm.differences({"a": "0"}, [{"a": ["0", 0, 0, []]}]) == [
        "a: 0 of 0 elements are held where the engine computes from"
    ]


def start_vllm(folder: Path, *arguments: str, port: int = 1, stop: bool = False) -> None:
    """Start a Python program in place of vLLM, and wait until it serves. `stop` suspends its process at once."""
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    named = config().model_copy(update={"model": Model(path=str(folder / "model"))})
    launch = Launch(command=[sys.executable, "-c", *arguments], environment={})

    async def start() -> None:
        client: Any = VLLMEngine.client(named, f"127.0.0.1:{port}")
        frozen_s = 1.0 if stop else FROZEN_S
        engine = RemoteEngine(named, RemoteCore(named), client, launch, folder / "log", frozen_s=frozen_s)
        try:
            if stop:
                assert isinstance(engine.process, ServerProcess)
                os.kill(engine.process.pid, signal.SIGSTOP)
            with RunDirectory(folder / "runs").report("server") as reporter:
                await asyncio.wait_for(engine.start(reporter), 60)
        finally:
            await engine.close()

    asyncio.run(start())


def test_a_server_that_dies_at_start_is_reported_within_two_seconds(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'dead')!r}, 'w').close(); raise RuntimeError('no memory for the cache')"
    with pytest.raises(EngineError, match=r"vLLM did not start: it ended with code 1: RuntimeError: no memory for the"):
        start_vllm(tmp_path, program)
    assert time.time() - (tmp_path / "dead").stat().st_mtime < 2


DIES_OF_ITS_FIRST_REQUEST = """
import http.server, os, sys, threading
def die():
    sys.stderr.write("ValueError: Head dimension 64 is not supported\\n")
    sys.stderr.flush()
    os._exit(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/health"
        self.send_response(200 if ready else 500)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        if not ready:
            threading.Timer(0.5, die).start()
    do_POST = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_dies_of_its_first_request_is_reported_with_the_cause_in_its_log(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(EngineError, match=r"vLLM did not start: it ended with code 1: ValueError: Head dimension 64"):
        start_vllm(tmp_path, DIES_OF_ITS_FIRST_REQUEST, str(port), port=port)


def test_a_server_that_is_stopped_while_it_starts_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM did not start: its process .* is stopped \(SIGSTOP\)"):
        start_vllm(tmp_path, "import time; time.sleep(600)", stop=True)


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
def test_a_server_that_answers_503_without_a_word_is_still_starting(tmp_path: Path, kind: Any) -> None:
    """SGLang does so until its own first request has been answered, and cannot take others before."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})

    async def silence(address: str) -> str:
        engine = RemoteEngine(named, RemoteCore(named), kind.client(named, address), None, tmp_path / "log")
        try:
            return await engine._silence()
        finally:
            await engine.close()

    with answering(503, "") as address:
        assert "503" in asyncio.run(silence(address))


@pytest.mark.parametrize(
    ("params", "text", "reason", "matched"),
    [
        ({}, "7<eos>", "stop", 1),
        ({}, "78", "abort", None),
        ({}, "", "abort", None),
        ({"stop_token_ids": ()}, "7<eos>", "abort", None),
        ({"min_new_tokens": 2}, "7<eos>", "abort", None),
        ({"stop": ("ab",)}, "7ab", "stop", "ab"),
        ({"stop": ("ab",)}, "7abc", "abort", None),
    ],
)
def test_an_aborted_completion_whose_last_token_ends_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: Any, text: str, reason: str, matched: Any
) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    async def abort(self: Any, request: GenerateRequest) -> Completion:
        return Completion(output_ids=ids, logprobs=[-1.0] * len(ids), versions=[], finish_reason="abort")

    async def generate() -> Completion:
        engine = RemoteEngine(named, RemoteCore(named), SGLangEngine("127.0.0.1:1"), None, tmp_path / "log")
        try:
            return await engine.generate(GenerateRequest([9], SamplingParams(max_new_tokens=9, **params)))
        finally:
            await engine.close()

    monkeypatch.setattr(SGLangEngine, "generate", abort)
    completion = asyncio.run(generate())
    assert (completion.finish_reason, completion.matched, completion.output_ids) == (reason, matched, ids)


async def load_into(client: VLLMEngine, ref: WeightRef) -> None:
    try:
        await client.load(ref)
        await client.verify(ref)
    finally:
        await client.close()


@pytest.fixture
def version(tmp_path: Path) -> WeightRef:
    """Weights with the trainer's digests."""
    tensors = {"lm_head.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    digests = hex_digests(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={DIGESTS_KEY: json.dumps(digests)})
    return WeightRef(version=5, path=str(tmp_path), digest="")


def test_an_update_that_answers_200_and_did_nothing(version: WeightRef) -> None:
    with answering(200, {"results": [{}]}) as address, pytest.raises(EngineError) as raised:
        asyncio.run(load_into(VLLMEngine(address, "model", 256), version))
    assert f"vLLM at {address} did not load version 5" in str(raised.value)
    assert "2 tensors differ: lm_head.weight: not loaded; norm.weight: not loaded" in str(raised.value)


@pytest.mark.parametrize(("held", "broken"), [(5, None), (5, "its probe differs"), (4, None)])
def test_a_broadcast_version_may_be_asked_for_again_once_it_is_held(
    tmp_path: Path, version: WeightRef, held: int, broken: str | None
) -> None:
    (Path(version.path) / BROADCAST_FILE).write_text("{}")
    named, _ = served_model(tmp_path)
    engine = RemoteEngine(named, RemoteCore(named), VLLMEngine("127.0.0.1:1"))
    engine._loaded = replace(version, version=held)
    engine.core.version, engine.core.broken = held, broken
    if held == version.version and broken is None:
        assert asyncio.run(engine.load_weights(version)) == {}
    else:
        with pytest.raises(EngineError, match=r"version 5 was broadcast .* this server did not get it"):
            asyncio.run(engine.load_weights(version))


def test_a_folder_that_lacks_its_file_is_not_sent(version: WeightRef) -> None:
    (Path(version.path) / "model.safetensors").unlink()
    said = r"Cannot load version 5 into vLLM at 127.*: there is no safetensors file. It was not sent"
    with answering(200, {"results": [{}]}) as address, pytest.raises(EngineError, match=said):
        asyncio.run(load_into(VLLMEngine(address, "model", 256), version))


def test_keys_and_values_of_the_old_weights_that_were_not_forgotten(version: WeightRef) -> None:
    with answering(200, {"success": False}) as address, pytest.raises(EngineError, match="did not forget the keys"):
        asyncio.run(load_into(VLLMEngine(address, "model", 256), version))


@pytest.mark.parametrize("generates", [True, False])
def test_no_request_uses_keys_and_values_of_other_weights_than_it_is_meant_for(
    version: WeightRef, generates: bool
) -> None:
    """A server that says that it forgot them, and did not: vLLM scores the probe without them, so it was right."""
    salts: list[str | None] = []
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}

    async def answer(request: web.Request) -> web.Response:
        if request.path in ("/v1/completions", vllm.GENERATE):
            salts.append((await request.json()).get("cache_salt"))
        return web.json_response({"success": True, "choices": [choice]})

    async def scenario(address: str) -> None:
        client = VLLMEngine(address, "model", 256)
        client._generates = generates
        asked = GenerateRequest([7, 8], SamplingParams(max_new_tokens=1))
        try:
            await client.generate(asked)
            for number in (5, 6):
                await client.load(replace(version, version=number, digest="ab"))
                await client.generate(asked)
        finally:
            await client.close()

    with serving(answer) as address:
        asyncio.run(scenario(address))
    assert salts == [None, "5-ab", "6-ab"]


@pytest.mark.parametrize("lease", [0.1, 60.0])
def test_a_pause_that_ends_in_mid_update_lets_no_request_through(
    tmp_path: Path, version: WeightRef, lease: float
) -> None:
    """They would be completed by the new weights, and labelled with the old ones."""
    named, held = served_model(tmp_path)
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
    loading = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if b"clew_load" in await request.read():
            loading.set()
            await asyncio.sleep(0.5)
        return web.json_response({"results": [held], "choices": [choice]})

    async def scenario(address: str) -> Completion:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        try:
            await engine.pause(lease)
            updating = asyncio.ensure_future(engine.load_weights(version))
            await asyncio.to_thread(loading.wait, 60)
            if lease > 1:
                await engine.resume()
            else:
                await asyncio.sleep(2 * lease)
            completion = await engine.generate(GenerateRequest([9], SamplingParams(max_new_tokens=1)))
            await updating
            assert not engine.paused
            return completion
        finally:
            await engine.close()

    with serving(answer) as address:
        assert asyncio.run(scenario(address)).versions == [5]


def served_model(folder: Path) -> tuple[Config, dict[str, list[Any]]]:
    """Return the configuration of a small model, and what vLLM's worker says of a server that holds its weights."""
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    held = {name: [digest, 1, 1, []] for name, digest in hex_digests(load_file(folder / "model.safetensors")).items()}
    return config().model_copy(update={"model": Model(path=str(folder / "model"))}), held


def test_a_token_that_stands_for_images_is_drawn_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image belongs to it: the trainer ended, as the row had more such tokens than its images need."""
    monkeypatch.setattr("clew.inference.remote.find_spec", lambda name: None)
    seeing_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    core = RemoteCore(named)
    assert core.vision is not None and "Install torchvision beside Clew." in caplog.text
    image = core.vision.image_id
    asked: list[dict[str, Any]] = []
    drawn, reasons = iter([[7, image], [image], [8, 9]]), iter(["stop", "stop", "length"])

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        ids = next(drawn)
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0 * token for token in ids]}}
        return web.json_response({"choices": [{**choice, "finish_reason": next(reasons)}]})

    async def scenario(address: str) -> Completion:
        engine = RemoteEngine(named, core, VLLMEngine.client(named, address, core.vision))
        try:
            return await engine.generate(GenerateRequest([5], SamplingParams(max_new_tokens=3)))
        finally:
            await engine.close()

    with serving(answer) as address:
        completion = asyncio.run(scenario(address))
    assert (completion.output_ids, completion.logprobs) == ([7, 8, 9], [-7.0, -8.0, -9.0])
    assert (completion.versions, completion.finish_reason) == ([0, 0, 0], "length")
    assert [(body["prompt"], body["max_tokens"]) for body in asked] == [([5], 3), ([5, 7], 2), ([5, 7], 2)]
    assert len({body["seed"] for body in asked}) == 3 and all(image in body["stop_token_ids"] for body in asked)


def test_a_stop_string_that_begins_before_an_update_ends_the_completion(tmp_path: Path) -> None:
    """The server has the beginning as part of its prompt, where it does not look for stop strings."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    core = RemoteCore(named)
    one, two, three = (core.tokenizer.convert_tokens_to_ids(each) for each in "123")

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["prompt"] == [three, one] and body["skip_special_tokens"] is False
        choice = {"token_ids": [two, three, one], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}
        return web.json_response({"choices": [{**choice, "finish_reason": "length"}]})

    async def scenario(address: str) -> Completion:
        engine = RemoteEngine(named, core, VLLMEngine.client(named, address))
        told: list[int] = []
        params = SamplingParams(max_new_tokens=3, stop=("12",), continues=1)
        asked = GenerateRequest([three, one], params, on_token=lambda token, _: told.append(token))
        tell = tells_until_stop(asked, core)
        assert tell is not None
        for token in (two, three, one):
            tell(token, -1.0)
        assert told == [two]
        try:
            return await engine.generate(GenerateRequest([three, one], params))
        finally:
            await engine.close()

    with serving(answer) as address:
        completion = asyncio.run(scenario(address))
    assert (completion.output_ids, completion.logprobs, completion.versions) == ([two], [-1.0], [0])
    assert (completion.finish_reason, completion.matched) == ("stop", "12")


def test_a_question_that_is_not_answered_yet_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine answers between two steps, which may take seconds."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    monkeypatch.setattr("clew.inference.remote.HEALTH_S", 0.05)
    asked = 0

    async def scenario() -> list[bool | None]:
        stepped = asyncio.Event()

        async def alive() -> None:
            nonlocal asked
            asked += 1
            await stepped.wait()

        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine("127.0.0.1:1"))
        monkeypatch.setattr(engine._backend, "alive", alive)
        try:
            before = [await engine._lives(), await engine._lives()]
            stepped.set()
            return [*before, await engine._lives()]
        finally:
            await engine.close()

    assert asyncio.run(scenario()) == [None, None, True] and asked == 1


def test_the_requests_of_a_gateway_at_a_server_that_freezes_fail() -> None:
    asked, thawed = threading.Event(), threading.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.set()
        while not thawed.is_set():  # noqa: ASYNC110 - the test has a loop of its own
            await asyncio.sleep(0.01)
        return web.json_response({})

    async def scenario(address: str) -> None:
        found = FoundEngine(engine=HTTPEngine(address), model="m")
        request = asyncio.create_task(found.engine.generate(GenerateRequest([5], SamplingParams(max_new_tokens=3))))
        await asyncio.to_thread(asked.wait)
        watch = asyncio.create_task(found.fail_when_frozen(after_s=0.5))
        try:
            with pytest.raises(EngineUnreachable):
                await request
            thawed.set()
            assert await found.engine.answers()
        finally:
            thawed.set()
            watch.cancel()
            await found.engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 30))


def test_sglang_knows_each_request_by_an_id_that_no_other_has_or_begins_with() -> None:
    aborted: dict[str, asyncio.Event] = {}

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if request.path == "/abort_request":
            aborted[body["rid"]].set()
            return web.json_response({})
        aborted[body["rid"]] = asyncio.Event()
        await aborted[body["rid"]].wait()
        meta = {"id": body["rid"], "finish_reason": {"type": "abort"}, "output_token_logprobs": []}
        return web.json_response({"output_ids": [], "meta_info": meta})

    async def scenario(address: str) -> list[Completion]:
        engines = SGLangEngine(address), SGLangEngine(address)
        request = GenerateRequest([5], SamplingParams(max_new_tokens=3), id="job-1")
        asking = [asyncio.create_task(each.generate(request)) for each in (*engines, engines[0])]
        try:
            while len(aborted) < 3:  # noqa: ASYNC110 - the server has a loop of its own
                await asyncio.sleep(0.01)
            await engines[0].abort("job")
            assert not any(event.is_set() for event in aborted.values())
            await engines[0].abort("job-1")
            assert sum(event.is_set() for event in aborted.values()) == 2
            await engines[1].abort("job-1")
            return await asyncio.gather(*asking)
        finally:
            for engine in engines:
                await engine.close()

    with serving(answer) as address:
        completions = asyncio.run(scenario(address))
    assert [each.finish_reason for each in completions] == ["abort"] * 3
    assert len(aborted) == 3 and all(each.startswith("job-1#") for each in aborted)


def test_a_server_that_names_other_weights_than_it_was_given_serves_nothing_until_it_is_started_again(
    tmp_path: Path, version: WeightRef
) -> None:
    named, held = served_model(tmp_path)
    label = "default"

    async def answer(_: web.Request) -> web.Response:
        span = {"version": label, "start": 0, "end": 1}
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        return web.json_response({"results": [held], "choices": [{**choice, "weight_versions": [span]}]})

    async def scenario(address: str) -> str:
        nonlocal label
        client = VLLMEngine.client(named, address)
        client.labels = True
        engine = RemoteEngine(named, RemoteCore(named), client)
        request = GenerateRequest([9], SamplingParams(max_new_tokens=1))
        try:
            assert not engine.holds(version) and not engine.holds(replace(version, version=0)), "it may hold any"
            assert (await engine.generate(request)).versions == [0]
            await engine.load_weights(version)
            assert engine.holds(version)
            assert not engine.holds(replace(version, digest="of a resumed trainer")), "these are other weights"
            label = "5"
            assert (await engine.generate(request)).versions == [5]
            label = "default"
            with pytest.raises(EngineUnreachable, match=r"weights that it calls 'default', and was given version 5"):
                await engine.generate(request)
            return str(engine.failure)
        finally:
            await engine.close()

    with serving(answer) as address:
        assert address in asyncio.run(scenario(address))


def test_an_attached_server_that_was_left_paused_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    inference = Inference(backend="sglang")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model")), "inference": inference})
    resumed = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/continue_generation":
            resumed.set()
        if request.path == "/health" and not resumed.is_set():
            await asyncio.sleep(60)
        return web.json_response({"paths": {}})

    async def attach(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), SGLangEngine(address))
        try:
            with RunDirectory(tmp_path / "run").report("server") as reporter:
                await engine.start(reporter)
        finally:
            await engine.close()

    with serving(answer) as address, pytest.raises(EngineError, match="it does not offer /generate"):
        asyncio.run(asyncio.wait_for(attach(address), 30))
    assert resumed.is_set() and f"SGLang at {address} answers but generates nothing: resuming it" in caplog.text


@pytest.mark.usefixtures("version")
def test_an_attached_server_that_hangs_as_it_is_resumed_is_waited_for_by_name(tmp_path: Path) -> None:
    named, _ = served_model(tmp_path)
    run = RunDirectory(tmp_path / "run")

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/resume":
            await asyncio.sleep(600)
        return web.json_response({})

    async def scenario(address: str) -> list[str]:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        with run.report("server") as reporter:
            starting = asyncio.ensure_future(engine.start(reporter))
            await asyncio.sleep(0.5)
            waits = [wait.what for wait in current_waits()]
            starting.cancel()
            await engine.close()
        return waits

    with serving(answer) as address:
        assert asyncio.run(scenario(address)) == [f"vLLM at {address} to generate its first tokens"]


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("silent", "words"),
    [
        ("", ""),
        ("/metrics", ""),
        ("/server_info", ""),
        ("/health", "within 3 s it did not say that it is ready"),
        ("/resume", "within 1 s it did not resume"),
        ("/openapi.json", "within 3 s it did not show what it can do, which includes a generation"),
        ("/v1/completions", "within 3 s it did not show what it can do, which includes a generation"),
    ],
)
def test_a_server_that_takes_a_connection_and_never_answers_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str, words: str
) -> None:
    monkeypatch.setattr(remote, "UPDATE_S", 3.0)
    named, _ = served_model(tmp_path)
    run = RunDirectory(tmp_path / "run")
    likeliest = {"top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.5}]}
    listed = {"paths": {path: {} for path in vllm.NEEDED}, "data": [{"id": "m", "max_model_len": 64}]}

    async def answer(request: web.Request) -> web.Response:
        if request.path == silent:
            await asyncio.sleep(600)
        return web.json_response({**listed, "choices": [{"logprobs": likeliest}], "vllm_config": {}})

    async def start(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address), frozen_s=1.0)
        try:
            with run.report("server") as reporter:
                await engine.start(reporter)
        finally:
            await engine.close()

    with serving(answer) as address:
        if not words:  # what these two tell is not needed
            asyncio.run(asyncio.wait_for(start(address), 60))
            return
        with pytest.raises(EngineError) as raised:
            asyncio.run(asyncio.wait_for(start(address), 60))
    assert f"vLLM at {address}: it takes connections, but {words}" in str(raised.value)
    assert "restart it" in str(raised.value)


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("options", ["VllmConfig(model=...)", None])
def test_a_server_that_tells_its_options_in_another_form_starts_all_the_same(
    tmp_path: Path, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    named, _ = served_model(tmp_path)
    run = RunDirectory(tmp_path / "run")

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        with run.report("server") as reporter:
            await engine._record_options(reporter)
        await engine.close()

    with answering(200, {"vllm_config": options}) as address:
        asyncio.run(scenario(address))
    assert "vLLM does not say which options it runs with" in caplog.text


@pytest.mark.parametrize("pauses", [False, True])
def test_a_server_that_this_run_has_not_paused_is_not_resumed_at_the_end(
    tmp_path: Path, version: WeightRef, pauses: bool
) -> None:
    """An update that fails leaves a server paused, with `pauses`, and another follows at its address."""
    named, _ = served_model(tmp_path)
    paths: list[str] = []
    seed = 1

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        refused = request.path == "/update_weights_from_disk"
        return web.json_response({"random_seed": seed}, status=400 if refused else 200)

    async def scenario(address: str) -> None:
        nonlocal seed
        client = SGLangEngine(address)
        engine = RemoteEngine(named, RemoteCore(named), client)
        engine._identity = await client.identity()
        if pauses:
            with pytest.raises(EngineError):
                await engine.load_weights(version)
            seed = 2
        await engine.close()

    with serving(answer) as address:
        asyncio.run(scenario(address))
    assert "/continue_generation" not in paths and ("/pause_generation" in paths) == pauses


def test_an_attached_server_that_refused_an_update_is_not_left_paused(tmp_path: Path, version: WeightRef) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        refused = request.path == "/update_weights_from_disk"
        return web.json_response({"message": "no room"}, status=400 if refused else 200)

    async def update(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), SGLangEngine(address))
        try:
            await engine.load_weights(version)
        finally:
            await engine.close()

    with serving(answer) as address, pytest.raises(EngineError, match="no room"):
        asyncio.run(update(address))
    assert paths[-1] == "/continue_generation" and "/pause_generation" in paths


def test_an_sglang_of_another_number_type_is_refused_before_the_first_update() -> None:
    async def answer(request: web.Request) -> web.Response:
        listed = {"data": [{"max_model_len": 64}], "paths": {path: {} for path in NEEDED}}
        return web.json_response({**listed, "model_path": "m", "dtype": "bfloat16"})

    async def prepare(address: str) -> None:
        client = SGLangEngine.client(config(backend="sglang"), address)
        try:
            await client.prepare()
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(EngineError, match=r"bfloat16, and model\.dtype is float32\. Start"):
        asyncio.run(prepare(address))


@pytest.mark.parametrize("abort_hangs", [False, True])
def test_a_server_whose_requests_go_on_after_they_were_aborted_is_given_up(
    tmp_path: Path, version: WeightRef, monkeypatch: pytest.MonkeyPatch, abort_hangs: bool
) -> None:
    """Requests there would never end, as the server answers, and every update would wait for them again."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    monkeypatch.setattr(remote, "ABORT_S", 0.2)
    generating = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path in ("/inference/v1/generate", "/v1/completions"):
            generating.set()
            await asyncio.sleep(600)
        if request.path in ("/abort_requests", "/pause") and abort_hangs:
            await asyncio.sleep(600)
        return web.json_response({})

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        engine._watch = asyncio.create_task(engine._keep_watch())
        try:
            request = asyncio.ensure_future(engine.generate(GenerateRequest([9], SamplingParams())))
            await asyncio.to_thread(generating.wait, 60)
            with pytest.raises(EngineUnreachable, match=r"is given up: it still has 1 requests? 0.2 s after"):
                await engine.load_weights(version)
            with pytest.raises(EngineUnreachable, match=f"^vLLM at {address} is given up"):
                await asyncio.wait_for(request, 30)
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(scenario(address))


def test_a_server_that_aborts_its_requests_and_does_not_answer_that_call_is_given_up_for_that(
    tmp_path: Path, version: WeightRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in front of it may hold the answer back."""
    named, _ = served_model(tmp_path)
    monkeypatch.setattr(remote, "ABORT_S", 0.5)
    generating, aborted = threading.Event(), threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/abort_requests":
            aborted.set()
            await asyncio.sleep(600)
        if request.path == "/v1/completions":
            generating.set()
            await asyncio.to_thread(aborted.wait, 60)
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}
        return web.json_response({"choices": [choice]})

    async def scenario(address: str) -> None:
        client = VLLMEngine.client(named, address)
        client._aborts = True
        engine = RemoteEngine(named, RemoteCore(named), client)
        try:
            request = asyncio.ensure_future(engine.generate(GenerateRequest([9], SamplingParams())))
            await asyncio.to_thread(generating.wait, 60)
            with pytest.raises(EngineUnreachable, match=r"it aborted its requests, but did not answer .* 0\.5 s"):
                await engine.load_weights(version)
            assert (await request).output_ids == [7]
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))


@pytest.mark.usefixtures("version")
def test_requests_that_wait_together_ask_once_which_process_answers(tmp_path: Path) -> None:
    named, _ = served_model(tmp_path)
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            asked.append(request.path)
            await asyncio.sleep(0.1)
            return web.Response(text="process_start_time_seconds 1.5e9\n")
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    async def scenario(address: str) -> None:
        client = VLLMEngine.client(named, address)
        engine = RemoteEngine(named, RemoteCore(named), client)
        try:
            engine._identity, engine._was_away = await client.identity(), True
            one = GenerateRequest([9], SamplingParams(max_new_tokens=1))
            await asyncio.gather(*(engine.generate(replace(one, id=str(n))) for n in range(16)))
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(scenario(address))
    assert len(asked) == 2  # when it was attached to, and once for all


@pytest.mark.parametrize("receives", [False, True], ids=["received in part", "received after the trainer gave up"])
def test_a_server_that_missed_a_broadcast_does_not_come_back_as_one_that_has_the_version_before(
    tmp_path: Path, version: WeightRef, receives: bool
) -> None:
    """The trainer announces a version only after its broadcast: until then, the one before is the newest."""
    named, held = served_model(tmp_path)
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}

    async def answer(request: web.Request) -> web.Response:
        if b"clew_receive" in await request.read() and not receives:
            return web.json_response({"error": {"message": "a member is lost"}}, status=400)
        return web.json_response({"results": [held], "choices": [choice]})

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        application = Application(engine, named.model.path, weights_below=[tmp_path])
        run = RunDirectory(tmp_path / "run")
        entry = Server(name="server", address=address, pid=1, ready=True)
        run.announce_weights(version)
        try:
            await engine.load_weights(version)
            with nullcontext() if receives else pytest.raises(EngineError, match="a member is lost"):
                await engine.receive_weights(broadcast(6))
            with run.report("server") as reporter:
                await serve._load_newest(application, run, entry, reporter)
            completion = await engine.generate(GenerateRequest([9], SamplingParams(max_new_tokens=1)))
            assert completion.versions == [5]
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))


def test_an_embedded_engine_that_missed_a_broadcast_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    monkeypatch.setattr(weight_group, "PATIENCE", datetime.timedelta(seconds=0.2))
    engine = load_engine(Config.model_validate({**config().model_dump(), "model": {"path": str(tmp_path)}}))
    ref = WeightRef(version=0, path=str(tmp_path), digest="")

    async def scenario() -> None:
        assert engine.holds(ref)
        with pytest.raises(EngineError, match="version 1 was not received"):
            await engine.receive_weights(replace(broadcast(1), port=1))  # where nobody listens
        assert not engine.holds(ref), "it would serve version 0 until the trainer publishes again"
        await engine.load_weights(ref)
        assert engine.holds(ref) and not engine.holds(replace(ref, digest="of a resumed trainer"))
        await engine.close()

    asyncio.run(scenario())


def test_a_server_that_starts_while_the_trainer_publishes_loads_no_version_twice(
    tmp_path: Path, version: WeightRef
) -> None:
    """A server that loads more slowly than the trainer steps would otherwise load each twice, and never serve."""
    named, held = served_model(tmp_path)
    loads: list[str] = []
    newer = replace(version, version=6)

    async def answer(request: web.Request) -> web.Response:
        if b"clew_load" in (body := await request.read()):
            loads.append(body.decode())
            await asyncio.sleep(0.5)
        return web.json_response({"results": [held]})

    async def scenario(address: str) -> bool:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        application = Application(engine, named.model.path, weights_below=[tmp_path])
        run = RunDirectory(tmp_path / "run")
        entry = Server(name="server", address=address, pid=1, ready=True)
        run.announce_weights(version)
        try:
            with run.report("server") as reporter:
                starting = asyncio.ensure_future(serve._load_newest(application, run, entry, reporter))
                while not loads:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                run.announce_weights(newer)
                async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application)) as client:
                    body = {"model_path": newer.path, "weight_version": "6"}
                    answer = await client.post("http://front/update_weights_from_disk", json=body)
                assert answer.status_code == 200, answer.text
                await starting
            return engine.holds(newer)
        finally:
            await engine.close()

    with serving(answer) as address:
        assert asyncio.run(asyncio.wait_for(scenario(address), 60)) and len(loads) == 2


def test_a_server_that_hangs_in_an_update_is_not_listed_again_before_it_ends(
    tmp_path: Path, version: WeightRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would wait for it at each version, until the update is given up."""
    named, held = served_model(tmp_path)
    monkeypatch.setattr(serve, "LOOK_S", 0.01)
    ends = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if b"clew_load" in await request.read():
            await asyncio.to_thread(ends.wait, 60)
        return web.json_response({"results": [held]})

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        application = Application(engine, named.model.path, weights_below=[tmp_path])
        run = RunDirectory(tmp_path / "run")
        entry = Server(name="server", address=address, pid=os.getpid(), ready=True)
        run.announce_weights(version)
        listening = asyncio.Event()
        listening.set()

        def ready() -> bool:
            return any(server.ready for server in run.servers())

        with run.report("server") as reporter:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application), timeout=60) as client:
                body = {"model_path": version.path, "weight_version": str(version.version)}
                updating = asyncio.ensure_future(client.post("http://front/update_weights_from_disk", json=body))
                while not application.updating.locked():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                # As if the trainer had just taken it out for being late.
                keeper = asyncio.ensure_future(
                    serve._keep_listed(named, run, entry, application, reporter, listening, None)
                )
                try:
                    await asyncio.sleep(0.2)
                    assert not ready() and not keeper.done()
                    ends.set()
                    assert (await updating).status_code == 200
                    await application.ready.wait()
                    assert ready() and engine.holds(version)
                finally:
                    keeper.cancel()
                    await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))


@pytest.mark.parametrize(
    ("path", "part"),
    [("/v1/completions", "answer the probe of version 6, a generation,"), ("/resume", "resume with version 6")],
)
def test_a_server_that_begins_to_hang_is_given_up_in_the_next_update_with_the_part_that_hung(
    tmp_path: Path, version: WeightRef, path: str, part: str
) -> None:
    """Everything else is answered, so the trainer would wait 120 s for it."""
    named, held = served_model(tmp_path)
    hangs = False

    async def answer(request: web.Request) -> web.Response:
        if request.path == path and hangs:
            await asyncio.sleep(600)
        choice = {"prompt_logprobs": [None, {"8": {"logprob": -1.5}}]}
        return web.json_response({"results": [held], "choices": [choice]})

    async def scenario(address: str) -> None:
        nonlocal hangs
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address), frozen_s=2.0)
        probed = replace(version, probe_ids=[7, 8], probe_logprob=-1.5)
        try:
            await engine.load_weights(probed)
            hangs = True
            with pytest.raises(EngineUnreachable, match=rf"vLLM at .* did not {part} within 2 s; earlier"):
                await engine.load_weights(replace(probed, version=6))
            assert engine.failure is not None and address in engine.failure
            with pytest.raises(EngineError, match=part):
                await engine.generate(GenerateRequest([9], SamplingParams(max_new_tokens=1)))
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))


def test_an_attached_server_that_another_process_follows_serves_nothing_until_it_is_attached_to_again(
    tmp_path: Path, version: WeightRef
) -> None:
    """The new process has the weights that it was started with, and its answers do not say so."""
    named, held = served_model(tmp_path)
    started, away = 1.5e9, False
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}

    async def answer(request: web.Request) -> web.Response:
        if away:
            return web.Response(status=503)
        if request.path == "/metrics":
            return web.Response(text=f"# TYPE\nprocess_start_time_seconds {started}\n")
        return web.json_response({"results": [held], "choices": [choice]})

    async def scenario(address: str) -> None:
        nonlocal started, away
        client = VLLMEngine.client(named, address)
        engine = RemoteEngine(named, RemoteCore(named), client)
        engine._identity = await client.identity()
        request = GenerateRequest([9], SamplingParams(max_new_tokens=1))
        try:
            await engine.load_weights(version)
            for started_then in (1.5e9, 1.6e9):
                assert (await engine.generate(request)).versions == [5]
                away = True
                with pytest.raises(EngineUnreachable):
                    await engine.generate(request)
                away, started = False, started_then
            with pytest.raises(EngineUnreachable, match=f"{address} is another process than before, .* version 5"):
                await engine.generate(request)
            assert engine.failure is not None
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))


@pytest.mark.parametrize("backend", [VLLMEngine, SGLangEngine])
def test_the_server_is_told_where_completions_end(tmp_path: Path, backend: Any) -> None:
    """The pad token ends them if there is no end token, and neither server knows that."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    configured = tmp_path / "model" / "generation_config.json"
    configured.write_text(json.dumps(json.loads(configured.read_text()) | {"eos_token_id": None}))
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({}, status=400)

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), backend.client(named, address))
        try:
            for stop_ids in (None, (5, 6), ()):
                with pytest.raises(EngineError):
                    await engine.generate(GenerateRequest([9], SamplingParams(stop_token_ids=stop_ids)))
        finally:
            await engine.close()

    with serving(answer) as address:
        asyncio.run(scenario(address))
    assert [body.get("sampling_params", body)["stop_token_ids"] for body in asked] == [[0], [5, 6], []]


def test_the_weights_that_a_server_started_with_are_not_taken_for_the_trainers(
    tmp_path: Path, version: WeightRef
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    launch = Launch(command=[sys.executable, "-c", ""], environment={})
    engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, "127.0.0.1:1"), launch, tmp_path / "log")
    assert engine.core.version == 0 and not engine.holds(replace(version, version=0))
    asyncio.run(engine.close())


@pytest.mark.usefixtures("version")
def test_a_request_waits_for_a_server_that_is_given_up_until_it_is_started_again(tmp_path: Path) -> None:
    named, _ = served_model(tmp_path)
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}

    async def scenario(address: str) -> Completion:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        engine.failure = "vLLM was killed by signal 9"
        try:
            asking = asyncio.ensure_future(
                generate_through_aborts(engine, GenerateRequest([9], SamplingParams(max_new_tokens=1)))
            )
            await asyncio.sleep(0.1)
            assert not asking.done()
            engine.failure = None
            return await asking
        finally:
            await engine.close()

    with answering(200, {"choices": [choice]}) as address:
        assert asyncio.run(asyncio.wait_for(scenario(address), 60)).output_ids == [7]


@pytest.mark.parametrize("announced", [False, True])
def test_a_server_that_is_started_again_generates_nothing_before_it_has_the_newest_weights(
    tmp_path: Path, version: WeightRef, announced: bool
) -> None:
    named, held = served_model(tmp_path)
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
    probed = {"top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.5}]}
    listed = {"paths": {path: {} for path in vllm.NEEDED}, "data": [{"id": "m", "max_model_len": 64}]}

    async def answer(request: web.Request) -> web.Response:
        probes = b"return_tokens_as_token_ids" in await request.read()
        given = {**choice, "logprobs": probed} if probes else choice
        return web.json_response({**listed, "results": [held], "choices": [given], "vllm_config": {}})

    async def scenario(address: str) -> Completion:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        application = Application(engine, named.model.path)
        run = RunDirectory(tmp_path / "run")
        entry = Server(name="server", address=address, pid=os.getpid(), ready=True)
        if announced:
            run.announce_weights(version)
        request = GenerateRequest([9], SamplingParams(max_new_tokens=1))
        listening = asyncio.Event()
        listening.set()
        with run.report("server") as reporter:
            await engine.restart(reporter)
            with pytest.raises(EngineUnreachable, match="has not loaded the newest weights"):
                await engine.generate(request)
            keeper = asyncio.ensure_future(
                serve._keep_listed(named, run, entry, application, reporter, listening, None)
            )
            try:
                await application.ready.wait()
                return await engine.generate(request)
            finally:
                keeper.cancel()
                await engine.close()

    with serving(answer) as address:
        completion = asyncio.run(asyncio.wait_for(scenario(address), 60))
    assert completion.versions == [version.version if announced else 0]


def test_a_server_that_dies_again_while_it_is_started_again_has_another_try(tmp_path: Path, version: WeightRef) -> None:
    named, held = served_model(tmp_path)
    named = named.model_copy(update={"launch": named.launch.model_copy(update={"restarts": 2})})
    tries: list[str] = []

    class DiesOnce(RemoteEngine):
        async def restart(self, reporter: Reporter) -> None:
            tries.append(str(self.failure))
            if len(tries) == 1:
                raise EngineError("vLLM did not start: it was killed by signal 9")
            self.failure = None

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"results": [held]})

    async def scenario(address: str) -> None:
        engine = DiesOnce(named, RemoteCore(named), VLLMEngine.client(named, address))
        engine.failure = "vLLM was killed by signal 9"
        run, listening = RunDirectory(tmp_path / "run"), asyncio.Event()
        run.announce_weights(version)
        listening.set()
        entry = Server(name="server", address=address, pid=os.getpid(), ready=True)
        application = Application(engine, named.model.path)
        with run.report("server") as reporter:
            keeping = serve._keep_listed(named, run, entry, application, reporter, listening, None)
            keeper = asyncio.ensure_future(keeping)
            await asyncio.wait({keeper, asyncio.ensure_future(application.ready.wait())}, return_when="FIRST_COMPLETED")
            assert engine.holds(version)
            keeper.cancel()
            await engine.close()

    with serving(answer) as address:
        asyncio.run(asyncio.wait_for(scenario(address), 60))
    assert tries == ["vLLM was killed by signal 9", "vLLM did not start: it was killed by signal 9"]


def test_clew_serve_lets_agents_wait_until_the_newest_weights_are_loaded() -> None:
    async def gateway(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def scenario() -> None:
        engine: Any = None
        application = Application(engine, "m", gateway)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application)) as client:
            posting = asyncio.ensure_future(client.post("http://front/v1/completions", json={}))
            assert (await client.get("http://front/v1/models")).status_code == 200
            while "the newest weights" not in [wait.what for wait in current_waits()]:
                assert not posting.done()
                await asyncio.sleep(0.01)
            application.ready.set()
            assert (await posting).status_code == 200

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_clew_serve_names_the_server_behind_it_that_is_away(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    address = f"127.0.0.1:{free_port()}"

    async def generate() -> str:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        application = Application(engine, named.model.path)
        application.ready.set()
        try:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application)) as client:
                answer = await client.post("http://front/generate", json={"input_ids": [9], "sampling_params": {}})
        finally:
            await engine.close()
        assert answer.status_code == 503
        return answer.json()["error"]["message"]

    assert f"inference server {address}: Cannot connect" in asyncio.run(generate())


@pytest.mark.parametrize("faults", [1, 2])
def test_an_answer_that_is_cut_short_in_an_update_is_asked_for_again_once(
    tmp_path: Path, version: WeightRef, faults: int
) -> None:
    named, held = served_model(tmp_path)
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
    cut = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal cut
        if b"clew_held" in await request.read() and cut < faults:
            cut += 1
            return web.Response(text='{"results": [{"a":', content_type="application/json")
        return web.json_response({"results": [held], "choices": [choice]})

    async def scenario(address: str) -> None:
        engine = RemoteEngine(named, RemoteCore(named), VLLMEngine.client(named, address))
        try:
            await engine.load_weights(version)
            assert engine.core.version == version.version
        finally:
            await engine.close()

    with serving(answer) as address:
        if faults == 1:
            asyncio.run(scenario(address))
        else:
            with pytest.raises(FaultyAnswer, match="cannot be read"):
                asyncio.run(scenario(address))


FROZEN_WORKER = """
import http.server, time
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        if "/collective_rpc" in self.path:
            open("hangs", "w").close()
            time.sleep(600)
        self.do_GET()
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Answers).serve_forever()
"""


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_an_update_ends_when_the_server_answers_but_its_workers_are_frozen_or_it_is_killed(
    tmp_path: Path, version: WeightRef, monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    named = config().model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    port = free_port()
    program = f"import os; os.chdir({str(tmp_path)!r}); " + FROZEN_WORKER.strip().replace("PORT", str(port))
    launch = Launch(command=[sys.executable, "-c", program], environment={})
    monkeypatch.setattr(remote, "UPDATE_S", 60.0 if number else 1.0)

    async def update() -> RemoteEngine:
        client: Any = VLLMEngine.client(named, f"127.0.0.1:{port}")
        engine = RemoteEngine(named, RemoteCore(named), client, launch, tmp_path / "log")
        try:
            while await engine._silence():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            updating = asyncio.ensure_future(engine.load_weights(version))
            while number and not (tmp_path / "hangs").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if number:
                assert isinstance(engine.process, ServerProcess)
                os.kill(engine.process.pid, number)
            await asyncio.wait_for(updating, 30)
        finally:
            assert number or engine.process.ended() is not None
            await engine.close()
        return engine

    words = "inference server 127" if number else "is given up: it did not load version 5 within 1 s"
    with pytest.raises(EngineUnreachable, match=words) as raised:
        asyncio.run(update())
    assert f"127.0.0.1:{port}" in str(raised.value)
