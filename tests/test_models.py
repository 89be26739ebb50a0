"""Errors about what a model folder lacks."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, PreTrainedTokenizerFast

from clew.config import Config
from clew.errors import ModelError
from clew.inference.local import load_engine
from clew.models.loading import load_model, load_tokenizer
from clew.models.model_folder import check_folder
from clew.models.vision import load_vision
from clew.training.engine import TrainEngine
from tests.models import ATTENTION_FAMILIES, VOCAB, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [*ATTENTION_FAMILIES, "gpt_neox", "qwen3_moe", "mixtral", "mamba"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_is_not_missing(tmp_path: Path, family: str, tie: bool) -> None:
    tiny_model(tmp_path, family, tie=tie)
    assert load_model(str(tmp_path), "float32", CPU).get_output_embeddings() is not None


def test_a_base_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "whole", tie=False)
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"lack 1 tensors of Qwen2ForCausalLM: lm_head\.weight\..*random"):
        load_model(str(tmp_path / "base"), "float32", CPU)


AUTO_MAPS = {
    "config.json": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
    "tokenizer_config.json": {"AutoTokenizer": ["mine.T", None]},
    "processor_config.json": {"AutoProcessor": "mine.P"},
}


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model folder with code of its own; transformers would ask on a terminal, and "y" would run it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    (tmp_path / "mine.py").write_text(f"open('{tmp_path}/was-run', 'w')")
    yield tmp_path
    assert not (tmp_path / "was-run").exists()


def change(path: Path, **fields: Any) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))


def test_a_model_that_names_code_is_loaded_by_transformers_own(with_code: Path) -> None:
    """Many published models still name the code from before transformers had their architecture."""
    for file, said in AUTO_MAPS.items():
        change(with_code / file, auto_map=said)
    assert type(load_model(str(with_code), "float32", CPU)).__name__ == "Qwen2ForCausalLM"
    assert load_tokenizer(str(with_code)).eos_token == "<eos>"
    load_vision(str(with_code))


def test_an_architecture_of_its_own_is_refused(with_code: Path) -> None:
    change(with_code / "config.json", auto_map=AUTO_MAPS["config.json"], model_type="of_its_own")
    for load in (lambda: load_model(str(with_code), "float32", CPU), lambda: load_tokenizer(str(with_code))):
        with pytest.raises(ModelError, match=r"auto_map.*'of_its_own'"):
            load()


def test_a_kernel_on_the_hub_is_refused(with_code: Path) -> None:
    change(with_code / "config.json", attn_implementation="somebody/kernel")
    for load in (lambda: load_model(str(with_code), "float32", CPU), lambda: load_tokenizer(str(with_code))):
        with pytest.raises(ModelError, match="attn_implementation"):
            load()


def test_every_loading_by_transformers_says_that_it_trusts_no_code() -> None:
    for path in (Path(__file__).parent.parent / "clew").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "load_dataset"):
                said = [ast.unparse(each) for each in node.keywords]
                assert "trust_remote_code=False" in said, f"{path}:{node.lineno}"


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    assert load_model("~/model", "float32", CPU).device == CPU
    assert load_tokenizer("~/model").eos_token == "<eos>"


def config_for(folder: Path) -> Config:
    model = {"path": str(folder), "device": "cpu"}
    return Config.model_validate({"experiment": "test", "model": model, "data": {"path": "none"}})


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, vocab=VOCAB - 2)
    for load in (load_engine, TrainEngine):
        with pytest.raises(ModelError, match=rf"2 tokens .* {VOCAB - 2}, first .*resize_token_embeddings\({VOCAB}\)"):
            load(config_for(tmp_path))


def test_a_special_token_beyond_it_is_refused_where_it_is_used(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    tokenizer.add_special_tokens({"pad_token": "<later>"})
    tokenizer.save_pretrained(str(tmp_path))
    assert load_engine(config_for(tmp_path)).core.default_stop_ids == (1,)
    tokenizer.chat_template = f"{tokenizer.chat_template}<later>"
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ModelError, match="first '<later>'"):
        load_engine(config_for(tmp_path))


def test_a_run_is_no_model_but_its_checkpoints_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"This is a run: .* such as .*/checkpoints/latest"):
        check_folder(str(tmp_path), "config.json", "model", "Save the model there with save_pretrained.")


def test_a_model_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=f"there is no folder {tmp_path}/model"):
        check_folder("~/model", "config.json", "model", "")
    tiny_model(tmp_path / "model")
    check_folder("~/model", "config.json", "model", "")


def test_a_name_that_no_hub_knows_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Use a hub that refuses connections, and one that has no model at all."""

    class NoModel(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "train.yaml").write_text(
        "experiment: none\nmodel: {path: nobody/no-such-model}\ndata: {path: prompts.jsonl}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with HTTPServer(("127.0.0.1", 0), NoModel) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        for address, why in ((port, "the hub cannot be reached"), (hub.server_port, "the hub has no such model")):
            environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": f"http://127.0.0.1:{address}"}
            command = [sys.executable, "-m", "clew", "train", "train.yaml"]
            ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
            assert ended.returncode == 2 and why in ended.stderr and "nobody/no-such-model (model.path)" in ended.stderr
            assert not (tmp_path / "runs").exists()
        hub.shutdown()
