"""Images, in the form that a model takes. The processor stored with the model (transformers) turns them into numbers.

::

    text     Which digit?  <image>                       one placeholder per image, as the chat template writes it
    tokens   Which digit?  P P P P P P P P P             as many as the image takes of the context: this is recorded
    inputs   pixel_values, and whatever else the model's forward pass asks for

Shared by rollout, training and inference. Images are passed on as the original files: PNG, JPEG and so on.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clew.errors import ImageError, ModelError, first_line
from clew.models.architecture import image_support
from clew.models.model_folder import config_of, expanded, quiet_transformers
from clew.models.own_code import refuse_own_code

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

REMEMBERED = 256
"""Maximum number of images whose tokens are cached."""


class ImageExpander(Protocol):
    """The part of a model's vision that rollout needs."""

    def expanded(self, text: str, images: Sequence[bytes]) -> str: ...


class Vision:
    """Image processing of one model. `load_vision` creates it."""

    def __init__(self, processor: Any, image_id: int) -> None:
        self._processor = processor
        self.placeholder: str = processor.image_token
        """Text that a chat template writes for an image."""
        self.image_id = image_id
        """Token ID that the model replaces with what it sees. An image has one or many of these tokens."""
        self._tokens_by_image: dict[bytes, tuple[int, ...]] = {}
        """Tokens of images, by the SHA-256 of the images."""
        self._lock = threading.Lock()  # the gateway makes prompts in threads

    def tokens_of(self, image: bytes) -> tuple[int, ...]:
        """Return the tokens that stand for an image. Raises ImageError if it is not an image, or is refused."""
        digest = hashlib.sha256(image).digest()
        if (tokens := self._tokens_by_image.get(digest)) is None:
            opened = _opened(image)
            try:
                made = self._processor(text=[self.placeholder], images=[[opened]], add_special_tokens=False)
            except ValueError as error:  # some processors refuse an image that is 200 times as wide as it is high
                raise ImageError(
                    f"Cannot show an image of {opened.width} x {opened.height} pixels: the model's processor refuses "
                    f"it ({first_line(error)[:-1]}). Crop or resize it."
                ) from error
            tokens = tuple(made["input_ids"][0])
            with self._lock:
                if len(self._tokens_by_image) >= REMEMBERED:
                    del self._tokens_by_image[next(iter(self._tokens_by_image))]
                self._tokens_by_image[digest] = tokens
        return tokens

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """Return a text in which each placeholder is replaced by all tokens that stand for its image, as text.

        Raises:
            ImageError: There are more or fewer placeholders than images, or an image cannot be read.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ImageError(
                f"Cannot place the images: there are {len(parts) - 1} placeholders {self.placeholder!r} for "
                f"{len(images)} images. The chat template leaves images out, or a text holds the placeholder."
            )
        decode = self._processor.tokenizer.decode
        shown = [decode(self.tokens_of(image), clean_up_tokenization_spaces=False) for image in images]
        return "".join(itertools.chain.from_iterable(zip(parts, [*shown, ""], strict=True)))

    def expanded_ids(self, ids: list[int], images: Sequence[bytes]) -> list[int]:
        """Return tokens in which each placeholder is replaced by all tokens that stand for its image.

        The tokens are returned unchanged if they do not have one placeholder for each image, or if their images are
        already expanded. `check` finds out whether they are right.
        """
        if not images or ids.count(self.placeholder_id) != len(images):
            return ids
        if ids.count(self.image_id) == self._count_image_tokens(images):  # placeholder and image token may be the same
            return ids
        shown = iter(images)
        return [
            token for one in ids for token in (self.tokens_of(next(shown)) if one == self.placeholder_id else (one,))
        ]

    def collapsed_ids(self, ids: list[int], images: Sequence[bytes]) -> list[int]:
        """Return tokens with one placeholder for each image, for engines that expand images themselves.

        Some processors write text around an image, as Gemma 3's writes two newlines before and after it. In a prompt,
        such newlines may share a token with others beside them, so they are removed as text, not as tokens.

        Raises:
            ImageError: The tokens that stand for an image do not occur in one piece.
        """
        collapsed: list[int] = []
        rest = ids
        for number, image in enumerate(images, 1):
            shown = list(self.tokens_of(image))
            special = [at for at, token in enumerate(shown) if token in self._special_ids] or [0, len(shown) - 1]
            first, end = special[0], special[-1] + 1
            core = shown[first:end]
            places = range(len(rest) - len(core) + 1)
            place = next((at for at in places if rest[at : at + len(core)] == core), None)
            before = None if place is None else self._without(shown[:first], rest[:place], at_end=True)
            after = None if place is None else self._without(shown[end:], rest[place + len(core) :], at_end=False)
            if before is None or after is None:
                raise ImageError(
                    f"Cannot show image {number} of {len(images)}: input_ids does not hold its {len(shown)} tokens in "
                    f"one piece."
                )
            collapsed += [*before, self.placeholder_id]
            rest = after
        return collapsed + rest

    def one_token_each(self, ids: list[int], images: Sequence[bytes]) -> list[int]:
        """Return tokens with only the first image token of each image, which SGLang expands itself."""
        counts = [self.tokens_of(image).count(self.image_id) for image in images]
        firsts, seen = set(itertools.accumulate(counts, initial=0)), 0
        kept: list[int] = []
        for token in ids:
            if token != self.image_id or seen in firsts:
                kept.append(token)
            seen += token == self.image_id
        return kept

    def _without(self, removed: list[int], ids: list[int], *, at_end: bool) -> list[int] | None:
        """Return `ids` without the text of the tokens `removed` at their end or beginning; None if it is not there."""
        tokenizer = self._processor.tokenizer
        count = len(removed)
        if not count or (ids[-count:] if at_end else ids[:count]) == removed:
            return ids[: len(ids) - count] if at_end else ids[count:]
        text, shared, count = tokenizer.decode(removed), "", 0
        while len(shared) < len(text) and count < len(ids):
            count += 1
            shared = tokenizer.decode(ids[-count:] if at_end else ids[:count])
        if not (shared.endswith(text) if at_end else shared.startswith(text)):
            return None
        left = shared.removesuffix(text) if at_end else shared.removeprefix(text)
        kept = tokenizer.encode(left, add_special_tokens=False)
        return [*ids[: len(ids) - count], *kept] if at_end else [*kept, *ids[count:]]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Special tokens, which are never part of a token for text."""
        added = self._processor.tokenizer.added_tokens_decoder
        return frozenset({self.image_id, *(token for token, each in added.items() if each.special)})

    @cached_property
    def placeholder_id(self) -> int:
        return self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)

    def _count_image_tokens(self, images: Sequence[bytes]) -> int:
        return sum(self.tokens_of(image).count(self.image_id) for image in images)

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        """Raise ImageError if the tokens do not have as many image tokens as these images need."""
        found, expected = ids.count(self.image_id), self._count_image_tokens(images)
        if found != expected:
            raise ImageError(
                f"Cannot match the images with input_ids: it has image token {self.image_id} {found} times, but the "
                f"{len(images)} images need it {expected} times. Write one placeholder for each image."
            )

    def inputs(self, input_ids_BT: Tensor, images: Sequence[Sequence[bytes]], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what a forward pass takes besides the tokens; {} if no row has images.

        Args:
            images: Contents of the image files of each row.
        """
        import torch

        if not any(images):
            return {}
        pixels = self._processor.image_processor(
            images=[[_opened(image) for image in row] for row in images if row], return_tensors="pt"
        )
        unused = self._processor.unused_input_names
        given = {name: torch.as_tensor(values) for name, values in pixels.items() if name not in unused}
        if (name := self._kinds_name) is not None:
            given[name] = torch.tensor(self._processor.create_mm_token_type_ids(input_ids_BT.tolist()))
        device = input_ids_BT.device
        return {
            name: values.to(device, dtype if values.is_floating_point() else values.dtype)
            for name, values in given.items()
        }

    @cached_property
    def _kinds_name(self) -> str | None:
        """Name of the model's input for the kind of each token, text or image; None if it has no such input."""
        made = self._processor(text=["clew"])
        return next((name for name in made if name.endswith("token_type_ids")), None)

    def save(self, folder: Path) -> None:
        """Write the processor, with its tokenizer and chat template, so that transformers can read it."""
        self._processor.save_pretrained(folder)


def load_vision(path: str) -> Vision | None:
    """Load the image processing of the model in a folder or on the hub; None if the model takes no images.

    Raises:
        ModelError: The processor of a model that takes images cannot be loaded.
    """
    from transformers import AutoProcessor

    kind = image_support(path)
    if kind == "no":
        return None
    try:
        folder = expanded(path)
        refuse_own_code(folder)
        with quiet_transformers():
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            config = config_of(path)
        image_id: Any = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
        parts = (image_id, getattr(processor, "image_token", None), getattr(processor, "image_processor", None))
        if None in parts:
            raise ValueError(f"{type(processor).__name__} has no image processor, or there is no image token.")
    except (OSError, ValueError, ImportError, AttributeError) as error:
        if kind == "perhaps":
            return None
        raise ModelError(
            f"Cannot load the image processor of {path}, whose model takes images: {first_line(error)} Save the "
            f"model's processor there with save_pretrained; some processors need torchvision."
        ) from error
    return Vision(processor, image_id)


def _opened(image: bytes) -> Image:
    """Return an image from the content of its file, as transformers and vLLM do.

    It is rotated as its EXIF orientation says. Transparent parts become white.

    Raises:
        ImageError: It cannot be read.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        opened = PIL.Image.open(io.BytesIO(image))
        with suppress(Exception):  # as in vLLM: an orientation that cannot be read counts as none
            opened = PIL.ImageOps.exif_transpose(opened)
        if opened.has_transparency_data:
            white = PIL.Image.new("RGBA", opened.size, "white")
            opened = PIL.Image.alpha_composite(white, opened.convert("RGBA"))
        return opened.convert("RGB")
    except PIL.UnidentifiedImageError:
        raise ImageError(f"{len(image)} bytes cannot be read as an image: this is no known format.") from None
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ImageError(f"{len(image)} bytes cannot be read as an image: {first_line(error)}") from None
