"""`clew serve` before a server process of another kind: how it is started, and what is said when it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clew.config import Config
from clew.errors import ConfigError, EngineError
from clew.inference.backend import Launch
from clew.inference.server_process import ServerProcess
from clew.inference.vllm import VLLMEngine
from tests.models import tiny_model, tiny_tokenizer


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


def started(tmp_path: Path, program: str) -> ServerProcess:
    return ServerProcess(Launch(command=[sys.executable, "-c", program], environment={}), tmp_path / "log")


def until_ended(process: ServerProcess) -> str:
    deadline = time.monotonic() + 60
    while (ended := process.ended()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ended


def test_the_cause_of_a_servers_end_is_the_error_that_the_others_follow_from(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ValueError: of a server before this one\n")
    process = started(
        tmp_path,
        "print('(EngineCore pid=7) ERROR ValueError: the cache is too small')\n"
        "raise RuntimeError('Engine core initialization failed. See root cause above.')",
    )
    ended = until_ended(process)
    assert ended.startswith("ended with code 1: ValueError: the cache is too small (its log: ")


def test_a_server_that_says_nothing(tmp_path: Path) -> None:
    assert "ended with code 3: it wrote nothing" in until_ended(started(tmp_path, "raise SystemExit(3)"))


def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)",
    )
    deadline = time.monotonic() + 60
    while not process.log.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(process.log.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.end()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "the child of a dead server lives on"
        time.sleep(0.05)


def test_no_such_python(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"/no/python does not exist. inference.python names"):
        ServerProcess(Launch(command=["/no/python"], environment={}), tmp_path / "log")


def test_a_server_that_cannot_start_ends_clew_serve_with_the_cause(tmp_path: Path) -> None:
    """A real `clew serve` with a Python that has no vLLM."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    sections = {
        "experiment": "e",
        "root": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": "none"},
        "inference": {"backend": "vllm", "python": sys.executable},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "clew", "serve", str(tmp_path / "c.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "vLLM did not start: it ended with code 1:" in ended.stderr
    assert "No module named" in ended.stderr or "ModuleNotFoundError" in ended.stderr
    assert "vllm.log" in ended.stderr
