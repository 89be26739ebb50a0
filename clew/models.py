"""Loading of causal language models and tokenizers, with errors that say what a folder lacks.

Shared by training and inference, which never import each other.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clew.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that model.device stands for. Raises ModelError if cuda is asked for and absent."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device is cuda, but torch finds no CUDA device. Use model.device=auto or =cpu, or "
            "install a CUDA build of torch; `clew doctor` shows what is here."
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def load_model(path: str, dtype: Literal["float32", "bfloat16", "float64"], device: torch.device) -> PreTrainedModel:
    """Load a causal language model in eval mode, from a folder or the hub.

    If the architecture takes images, all of it is loaded, not only the language model.

    Raises:
        ModelError: The model cannot be loaded, or the folder lacks some of its weights, which would then be random.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if sees(path) == "no" else AutoModelForImageTextToText
    return _load(kind, path, dtype, device, "model.path")


def sees(path: str) -> Literal["no", "perhaps", "always"]:
    """Return whether the causal language model in a folder or on the hub takes images.

    Returns:
        "always"; "perhaps" if it does so only when an image processor is stored with it; or "no". It is also "no" if
        the architecture has a separate language model without images, because Clew then loads that one.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind: Any = type(config_of(path))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return "no"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "always"
    return "perhaps" if MODEL_FOR_CAUSAL_LM_MAPPING[kind] is MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind] else "no"


HEAD = "score"
"""Name that transformers' sequence classifiers give the layer that maps a hidden state to a number."""


def load_value_model(
    path: str, dtype: Literal["float32", "bfloat16", "float64"], device: torch.device, field: str
) -> PreTrainedModel:
    """Load a model with a head that gives each token one number, in eval mode.

    This is either what `AutoModelForSequenceClassification` reads (a reward model), or a causal language model with a
    new head of zeros, so that all its numbers start at 0.

    Args:
        path: Folder or hub name of the model.
        dtype: The type of the weights.
        device: The device to load it to.
        field: The configuration's field that named the path, for messages.

    Raises:
        ModelError: As for `load_model`; or the architecture has no such head.
    """
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    config: Any = config_of(path)
    if config is not None and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"transformers has no sequence classifier of {config.model_type}, the architecture in {path} ({field}), to "
            f"give each token a value. Use another architecture there; a critic needs the policy's tokenizer, not its "
            f"architecture (algorithm.critic)."
        )
    model = _load(AutoModelForSequenceClassification, path, dtype, device, field, new=f"{HEAD}.weight", num_labels=1)
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{type(model).__name__} in {path} ({field}) has no layer {HEAD!r} with one output, but {head}: it cannot "
            f"give each token a value. Use another architecture."
        )
    return model


def _load(
    kind: Any, path: str, dtype: str, device: torch.device, field: str, *, new: str | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model of the class `kind`. new: a parameter that the folder may lack; it is then zero."""
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    path = os.path.expanduser(path)  # noqa: PTH111 - a hub name is no path
    _check_folder(path, "config.json", "model configuration", "Save the model there with save_pretrained.", field)
    if Path(path).is_dir() and not [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")]:
        raise ModelError(
            f"{path} ({field}) holds no weights (*.safetensors); found {_listing(path)}. Save the model there with "
            f"save_pretrained, or point {field} elsewhere."
        )
    if dtype == "float64":
        options["experts_implementation"] = "eager"  # torch's product of all experts at once knows no float64
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    try:
        if new is not None:
            transformers_logging.set_verbosity_error()  # it would warn of what is done on purpose
        loaded: Any = kind.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True, trust_remote_code=False, **options
        )
    except SafetensorError as error:
        raise ModelError(
            f"the weights in {path} cannot be read ({error}): a file was truncated or altered. Copy or save the model "
            f"there again."
        ) from error
    except Exception as error:  # transformers raises whatever an odd config.json leads to
        if is_out_of_memory(error):
            raise ModelError(
                f"the model in {path} ({field}) does not fit into this machine's memory: {first_line(error)} Use a "
                f"smaller one, or model.dtype=bfloat16."
            ) from error
        what = "causal language model" if new is None else "model with a value head"
        raise ModelError(f"cannot load a {what} from {path}: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, loading = loaded
    missing = sorted(set(loading["missing_keys"]) - {new})
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors of {type(model).__name__}: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}. They would be random. A folder without an output head holds a base "
            f"model: save the causal language model (AutoModelForCausalLM) there."
        )
    if new in loading["missing_keys"]:
        torch.nn.init.zeros_(model.get_parameter(new))
    try:
        model = model.to(device).eval()
        if device.type == "cpu":
            _own_memory(model)
        return model
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the model in {path} ({field}) does not fit into the memory of {device}: {first_line(error)} Use a "
            f"smaller one, model.dtype=bfloat16, or more devices (launch.ranks)."
        ) from error


def _own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the file that they were read from.

    Their position in the file affects the last bits of the product of a matrix and a vector. torch aligns the memory
    that it allocates, so every copy computes the same.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that torch or Python could not get the memory that it asked for."""
    import torch

    said = ("can't allocate memory", "cannot allocate memory", "not enough memory")  # torch's RuntimeErrors on the CPU
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(each in str(error).lower() for each in said)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, ending with a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."


def described(error: BaseException) -> str:
    """Return the type of an error, the line that raised it, and the first line of its message."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(raised.filename).name}:{raised.lineno}: {first_line(error)}"


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ModelError if the tokenizer produces token ids for which the model has no embedding.

    Special tokens beyond the embedding are ignored if no text, template or end of a sequence needs them. Some published
    models have such tokens (Gemma 3 without images, a pad token that was added).
    """
    embeddings: Any = model.get_input_embeddings()
    embedded = embeddings.weight.shape[0]
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= embedded}
    beyond = {token: number for token, number in beyond.items() if _is_named(path, token)}
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    template = str(tokenizer.chat_template or "")
    idle = {token for token in tokenizer.all_special_tokens if token not in ends and token not in template}
    needed = sorted((number, token) for token, number in beyond.items() if token not in idle)
    if needed:
        number, token = needed[0]
        raise ModelError(
            f"the tokenizer in {path} has {len(needed)} tokens beyond the model's vocabulary of {embedded}, first "
            f"{token!r} ({number}). Use the model's own tokenizer, or call "
            f"model.resize_token_embeddings({max(beyond.values()) + 1}) and save the model again."
        )


def width_of(model: PreTrainedModel) -> int:
    """Return the hidden size of a model; 1 if its configuration does not say."""
    return getattr(model.config.get_text_config(), "hidden_size", None) or 1


def context_of(path: str) -> int | None:
    """Return the context length, in tokens, of the model in a folder or on the hub; None if it is unknown."""
    config = config_of(path)
    return None if config is None else context_in(config)[0]


def context_in(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Return the context length, in tokens, of a model (None if it is not stated), and the field that states it.

    With longrope (arXiv 2402.13753), this is the length that its positions were first made for. Beyond it, transformers
    computes every position differently, also those of shorter rows in the same batch.
    """
    limits: list[tuple[int, str]] = []
    if (context := getattr(config.get_text_config(), "max_position_embeddings", None)) is not None:
        limits.append((int(context), "max_position_embeddings"))
    for each in _ropes(config):
        first = each.get("original_max_position_embeddings")
        if each.get("rope_type") == "longrope" and first is not None:
            limits.append((int(first), "original_max_position_embeddings of longrope"))
    return min(limits, default=(None, ""))


def positions_go_on(config: PreTrainedConfig) -> bool:
    """Return whether a model can also compute sequences that are longer than its context.

    It can if it uses rotary positions of a kind that does not change with the length.
    """
    kinds = [each.get("rope_type") for each in _ropes(config)]
    return bool(kinds) and not {"longrope", "dynamic"} & {*kinds}


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters; several if kinds of layers have their own."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]


def config_of(path: str) -> Any:
    """Return the configuration of the model in a folder or on the hub; None if it cannot be read.

    The error is left to the code that loads the model.
    """
    from transformers import AutoConfig

    if not path:  # transformers would look here
        return None
    try:
        return AutoConfig.from_pretrained(os.path.expanduser(path), trust_remote_code=False)  # noqa: PTH111 - as above
    except Exception:  # as above
        return None


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Without a pad token, it pads with its end token. Raises ModelError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = os.path.expanduser(path)  # noqa: PTH111 - as above
    _check_folder(path, "tokenizer_config.json", "tokenizer", _SAVE_TOKENIZER)
    try:
        # AutoTokenizer takes the class of the architecture, which splits text its own way whatever the file says.
        cls = PreTrainedTokenizerFast if _is_all_in_its_file(path) else AutoTokenizer
        tokenizer: Any = cls.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more specific for a broken tokenizer.json
        raise ModelError(f"cannot load a tokenizer from {path}: {error}") from error
    if tokenizer.vocab_size < 2:
        raise ModelError(
            f"the tokenizer in {path} has no vocabulary but its special tokens; found {_listing(path)}. "
            f"{_SAVE_TOKENIZER}"
        )
    for name in ("pad_token", "eos_token"):
        if not _is_named(path, getattr(tokenizer, name)):
            setattr(tokenizer, name, None)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer in {path} has neither a pad token nor an end token, so a response could "
                f"never end. Set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_SAVE_TOKENIZER = "Save the model's tokenizer there with save_pretrained, or point model.path elsewhere."


def _is_all_in_its_file(path: str) -> bool:
    """Return whether tokenizer.json is the whole tokenizer: the folder names no tokenizer class of an architecture."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        return False
    named = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _is_named(path: str, token: str | None) -> bool:
    """Return whether a folder names this token somewhere; true for a hub name.

    For some architectures, transformers adds special tokens that the folder does not name and that have no embedding.
    """
    if token is None or not Path(path).is_dir():
        return True
    written = [json.dumps(token, ensure_ascii=ascii_only) for ascii_only in (True, False)]
    return any(
        any(each in file.read_text(encoding="utf-8") for each in written) for file in Path(path).glob("*token*.json")
    )


def _check_folder(path: str, needed: str, what: str, remedy: str, field: str = "model.path") -> None:
    """Raise ModelError if a folder lacks a needed file. A hub name passes: transformers looks it up."""
    in_a_folder = "/" in path and Path(path).parent.is_dir()
    if not (path.startswith((".", "/", "~")) or path.count("/") > 1 or in_a_folder or Path(path).exists()):
        return
    if not Path(path).is_dir():
        raise ModelError(
            f"there is no folder {path}. {field} takes a folder written by save_pretrained, "
            f"or a hub name such as Qwen/Qwen3-0.6B."
        )
    if not (Path(path) / needed).exists():
        raise ModelError(
            f"{path} ({field}) holds no {needed}, so no {what} can be loaded from it; found {_listing(path)}. {remedy}"
        )
    refuse_own_code(path, field)


_CONFIGURATIONS = ("config.json", "*_config.json", "preprocessor*.json", "processor*.json")
"""Patterns of the files in which a model folder may name code."""


def refuse_own_code(path: str, field: str = "model.path") -> None:
    """Raise ModelError if a model folder can only be loaded by running code that it names.

    This is an architecture of its own (`auto_map` with a `model_type` that transformers does not have) or a kernel from
    the hub. Many published models name code although transformers has their architecture; `trust_remote_code=False`
    then selects transformers' own. A hub name passes here, for the same reason.
    """
    from transformers import CONFIG_MAPPING

    for pattern in _CONFIGURATIONS:
        for file in sorted(Path(path).glob(pattern)):
            try:
                said = json.loads(file.read_bytes())
            except (ValueError, OSError, RecursionError):
                continue  # whoever reads it for its content says what is wrong
            said = said if isinstance(said, dict) else {}
            kernels = [said.get(f"{start}attn_implementation") for start in ("", "_")]
            if said.get("auto_map") and file.name == "config.json" and said.get("model_type") not in CONFIG_MAPPING:
                what = (
                    f"names code of its own (auto_map), and transformers has no architecture {said.get('model_type')!r}"
                )
                remedy = "Use another model."
            elif any("/" in str(each) for each in kernels):
                what, remedy = "names code on the hub (attn_implementation)", "Remove that line."
            else:
                continue
            raise ModelError(
                f"Cannot load {path} ({field}): {file.name} {what}. Clew runs no code that a model folder names. "
                f"{remedy}"
            )


def _listing(path: str) -> str:
    names = sorted(entry.name for entry in Path(path).iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
