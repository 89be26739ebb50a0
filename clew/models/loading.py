"""Loading of causal language models, value models and tokenizers.

Shared by training and inference, which never import each other.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clew.errors import ModelError, first_line
from clew.models.architecture import image_support
from clew.models.model_folder import check_folder, config_of, expanded, is_named, listing, quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that model.device stands for. Raises ModelError if cuda is asked for and absent."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "Cannot use model.device=cuda: torch finds no CUDA device. Use model.device=auto or =cpu, or install a "
            "CUDA build of torch; `clew doctor` shows what this machine has."
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

    kind = AutoModelForCausalLM if image_support(path) == "no" else AutoModelForImageTextToText
    return _load(kind, path, dtype, device, "model.path")


HEAD = "score"
"""Name that transformers' sequence classifiers give the layer that maps a hidden state to a number."""


def load_value_model(
    path: str, dtype: Literal["float32", "bfloat16", "float64"], device: torch.device, field: str
) -> PreTrainedModel:
    """Load, in eval mode, a model with a head that gives each token one number.

    This is either what `AutoModelForSequenceClassification` reads (a reward model), or a causal language model with a
    new head of zeros, so that all its numbers start at 0.

    Args:
        field: The configuration field that holds the path, for messages.

    Raises:
        ModelError: As for `load_model`; or the architecture has no such head.
    """
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    config: Any = config_of(path)
    if config is not None and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"Cannot give each token a value: transformers has no sequence classifier of {config.model_type}, the "
            f"architecture in {path} ({field}). Use another architecture there; a critic needs the policy's tokenizer, "
            f"not its architecture (algorithm.critic)."
        )
    model = _load(AutoModelForSequenceClassification, path, dtype, device, field, new=f"{HEAD}.weight", num_labels=1)
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"Cannot give each token a value: {type(model).__name__} in {path} ({field}) has no layer {HEAD!r} with "
            f"one output, but {head}. Use another architecture."
        )
    return model


def _load(
    kind: Any, path: str, dtype: str, device: torch.device, field: str, *, new: str | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model of the class `kind`.

    Args:
        field: Configuration field that holds the path, for messages.
        new: Parameter that the folder may lack, and that is then all zeros; None: it must lack none.

    Raises:
        ModelError: The model cannot be loaded, or its weights lack a parameter.
    """
    import torch

    path = expanded(path)
    check_folder(path, "config.json", "model configuration", "Save the model there with save_pretrained.", field)
    if Path(path).is_dir() and not [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")]:
        raise ModelError(
            f"Cannot load a model: {path} ({field}) holds no weights (*.safetensors); found {listing(path)}. Save the "
            f"model there with save_pretrained, or point {field} elsewhere."
        )
    if dtype == "float64":
        options["experts_implementation"] = "eager"  # torch's grouped matrix product does not support float64
    model, missing = _from_pretrained(kind, path, field, new, dtype=getattr(torch, dtype), **options)
    if lacking := sorted(missing - {new}):
        raise ModelError(
            f"Cannot load {path}: its weights lack {len(lacking)} tensors of {type(model).__name__}: "
            f"{', '.join(lacking[:4])}{', …' if len(lacking) > 4 else ''}. They would be random. A folder without an "
            f"output head holds a base model: save the causal language model (AutoModelForCausalLM) there."
        )
    if new in missing:
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
            f"Cannot load the model in {path} ({field}): it does not fit into the memory of {device}. "
            f"{first_line(error)} Use a smaller one, model.dtype=bfloat16, or more devices (launch.ranks)."
        ) from error


def _from_pretrained(kind: Any, path: str, field: str, new: str | None, **options: Any) -> tuple[Any, set[str]]:
    """Return what transformers loads, and the parameters that the folder lacks. Raises ModelError."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with nullcontext() if new is None else quiet_transformers():  # it would warn that the new head is missing
            model, loading = kind.from_pretrained(path, output_loading_info=True, trust_remote_code=False, **options)
        return model, set(loading["missing_keys"])
    except SafetensorError as error:
        raise ModelError(
            f"Cannot read the weights in {path} ({error}): a file was truncated or altered. Copy or save the model "
            f"there again."
        ) from error
    except Exception as error:  # transformers raises whatever an odd config.json leads to
        if is_out_of_memory(error):
            raise ModelError(
                f"Cannot load the model in {path} ({field}): it does not fit into this machine's memory. "
                f"{first_line(error)} Use a smaller one, or model.dtype=bfloat16."
            ) from error
        what = "causal language model" if new is None else "model with a value head"
        raise ModelError(f"Cannot load a {what} from {path}: {first_line(error)}") from error


def _own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the file that they were read from."""
    # Their position in the file affects the last bits of the product of a matrix and a vector. torch aligns the memory
    # that it allocates, so every copy gives the same results.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that torch or Python could not get the memory that it asked for."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    phrases = ("can't allocate memory", "cannot allocate memory", "not enough memory")  # torch's, on the CPU
    return any(phrase in str(error).lower() for phrase in phrases)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ModelError if the tokenizer produces token ids for which the model has no embedding.

    Special tokens without an embedding are ignored unless they begin or end a text, or the chat template has them. Some
    published models have such tokens (Gemma 3 without images, a pad token that was added).
    """
    embeddings: Any = model.get_input_embeddings()
    embedded = embeddings.weight.shape[0]
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= embedded}
    beyond = {token: number for token, number in beyond.items() if is_named(path, token)}  # last, as it reads files
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    template = str(tokenizer.chat_template or "")
    idle = {token for token in tokenizer.all_special_tokens if token not in ends and token not in template}
    needed = sorted((number, token) for token, number in beyond.items() if token not in idle)
    if needed:
        number, token = needed[0]
        raise ModelError(
            f"Cannot use the tokenizer in {path}: {len(needed)} tokens are beyond the model's vocabulary of "
            f"{embedded}, first {token!r} ({number}). Use the model's own tokenizer, or call "
            f"model.resize_token_embeddings({max(beyond.values()) + 1}) and save the model again."
        )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. If it has no pad token, its end token serves as one. Raises ModelError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = expanded(path)
    check_folder(path, "tokenizer_config.json", "tokenizer", _SAVE_TOKENIZER)
    try:
        # AutoTokenizer takes the class of the architecture, which splits text its own way whatever the file says.
        cls = PreTrainedTokenizerFast if _is_all_in_its_file(path) else AutoTokenizer
        tokenizer: Any = cls.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more specific for a broken tokenizer.json
        raise ModelError(f"Cannot load a tokenizer from {path}: {error}") from error
    if tokenizer.vocab_size < 2:
        raise ModelError(
            f"Cannot use the tokenizer in {path}: it has no vocabulary besides special tokens; found {listing(path)}. "
            f"{_SAVE_TOKENIZER}"
        )
    for name in ("pad_token", "eos_token"):
        if not is_named(path, getattr(tokenizer, name)):
            setattr(tokenizer, name, None)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"Cannot use the tokenizer in {path}: it has neither a pad token nor an end token, so a response could "
                f"never end. Set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_SAVE_TOKENIZER = "Save the model's tokenizer there with save_pretrained, or point model.path elsewhere."


def _is_all_in_its_file(path: str) -> bool:
    """Return whether tokenizer.json is the whole tokenizer: the folder names a class that fits any architecture."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        return False
    named = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")
