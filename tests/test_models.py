"""What a model folder may lack, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, PreTrainedTokenizerFast

from clew.config import Config
from clew.errors import ModelError
from clew.inference.local import load_engine
from clew.models import load_model, load_tokenizer
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
