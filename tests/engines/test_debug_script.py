"""A common debugging script, run against `clew serve` with Clew's engine or vLLM: SGLang's native `/generate`.

It posts input_ids (from the processor), sampling_params and image_data (PNG in base64), without an API key, and
compares the completions with transformers' own.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.models import picture, seeing_model

ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {},
    "vllm": {"enforce-eager": True, "gpu-memory-utilization": 0.2},
}
START_S = 400.0
PROMPTS = [("1 + 1 is", []), ("a <image> is", ["red"]), ("<image> and <image>, which", ["red", "blue"])]


def as_hubs_name_it(file: Path) -> None:
    """Rename the tensors of llava's vision tower as in the hub's checkpoints, which vLLM reads."""
    tensors = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensors[name] for name in tensors}
    save_file(renamed, file, metadata={"format": "pt"})


class Script:
    """The model in transformers, its processor, and requests to the server."""

    def __init__(self, folder: Path, address: str) -> None:
        self.address = address
        self.processor = seeing_model(folder / "again", head=32, scale=0.15)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()

    def inputs(self, text: str, colors: list[str]) -> Any:
        images = [PIL.Image.open(io.BytesIO(picture(color))) for color in colors]
        return self.processor(text=[text], return_tensors="pt", **({"images": [images]} if images else {}))

    def transformers(self, text: str, colors: list[str]) -> list[int]:
        inputs = self.inputs(text, colors)
        with torch.inference_mode():
            ids = self.model.generate(**inputs, max_new_tokens=16, do_sample=False)[0]
        return ids[inputs["input_ids"].shape[-1] :].tolist()

    def post(self, **body: Any) -> Any:
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 16}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}/generate", data, kind)
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


def encoded(colors: list[str]) -> list[str]:
    return [base64.b64encode(picture(color)).decode() for color in colors]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.engines),
    ],
)
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    backend: str = request.param
    python = os.environ.get(f"CLEW_{backend.upper()}_PYTHON")
    if backend != "embedded" and not python:
        pytest.skip(f"CLEW_{backend.upper()}_PYTHON names no Python; see make test-engines")
    folder = tmp_path_factory.mktemp(backend)
    seeing_model(folder / "model", head=32, scale=0.15)
    as_hubs_name_it(folder / "model" / "model.safetensors")
    sections = {
        "experiment": "script",
        "root": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "inference": {
            "backend": backend,
            "python": python,
            "max_running": 8,
            "cache_gib": 0.25,
            "args": ENGINES[backend],
        },
        "launch": {"threads": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(sections))
    with (folder / "serve.log").open("w") as log:
        command = [sys.executable, "-P", "-m", "clew", "serve", str(folder / "run.yaml")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while "launched at" not in (text := (folder / "serve.log").read_text()):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        yield Script(folder, text.partition("ADDRS=")[2].split()[0])
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(("text", "colors"), PROMPTS)
def test_completions_are_those_of_transformers(script: Script, text: str, colors: list[str]) -> None:
    ids = script.inputs(text, colors)["input_ids"][0].tolist()
    expected = script.transformers(text, colors)
    shapes: list[Any] = [encoded(colors), [encoded(colors)]] if colors else [None]
    shapes += encoded(colors) if len(colors) == 1 else []
    for images in shapes:
        assert script.post(input_ids=ids, image_data=images)["output_ids"] == expected
    answer = script.post(text=text, image_data=encoded(colors) or None)
    assert answer["output_ids"] == expected
    assert answer["meta_info"]["prompt_tokens"] == len(ids), "the text's images were expanded"


def test_a_batch_has_a_list_of_images_for_each_prompt(script: Script) -> None:
    ids = [script.inputs(*each)["input_ids"][0].tolist() for each in PROMPTS]
    answers = script.post(input_ids=ids, image_data=[encoded(colors) for _, colors in PROMPTS])
    assert [each["output_ids"] for each in answers] == [script.transformers(*each) for each in PROMPTS]


def test_other_images_give_another_completion(script: Script) -> None:
    ids = script.inputs("a <image> is", ["red"])["input_ids"][0].tolist()
    seen = [script.post(input_ids=ids, image_data=encoded([color]))["output_ids"] for color in ("red", "blue")]
    assert seen[0] == script.transformers("a <image> is", ["red"])
    assert seen[1] == script.transformers("a <image> is", ["blue"])
