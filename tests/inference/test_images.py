"""Models that see: the cached path gives what the whole forward pass gives, whoever shares the batch."""

import io
from pathlib import Path

import PIL.Image
import pytest
import torch

from clew.errors import EngineError, ImageError, ModelError
from clew.inference.embedded import EmbeddedEngine, build_engine
from clew.inference.engine_core import Core
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.inference.reference import ReferenceEngine
from clew.models.loading import load_model, load_tokenizer
from clew.models.vision import Vision, load_vision
from tests.models import picture, seeing_model, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
RED, BLUE, WIDE = picture("red"), picture("blue"), picture("green", 64, 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    for family in ("llava", "paddleocr_vl", "gemma3"):
        seeing_model(root / family, family)
    return root


def both(folder: Path) -> tuple[Core, ReferenceEngine, Vision]:
    tokenizer, vision = load_tokenizer(str(folder)), load_vision(str(folder))
    assert vision is not None
    reference = ReferenceEngine(load_model(str(folder), "float32", CPU), tokenizer, vision)
    return build_engine(load_model(str(folder), "float32", CPU), tokenizer, vision, max_running=8), reference, vision


def requests(core: Core, vision: Vision) -> list[GenerateRequest]:
    """Text alone, one image, two of different sizes, equal prompts, equal tokens that show another image."""

    def ids(text: str, *images: bytes) -> list[int]:
        return list(core.tokenizer(vision.expanded(text, images))["input_ids"])

    see = vision.placeholder
    prompts: list[tuple[list[int], tuple[bytes, ...]]] = [
        (ids("no image"), ()),
        (ids(f"a {see} is", RED), (RED,)),
        (ids(f"a {see} is", RED), (RED,)),
        (ids(f"a {see} is", BLUE), (BLUE,)),
        (ids(f"{see} and then {see}?", WIDE, RED), (WIDE, RED)),
        (ids("none either, and longer than the others"), ()),
    ]
    params = [SamplingParams(max_new_tokens=12, min_new_tokens=6, temperature=1.0, seed=n) for n in range(6)]
    return [
        GenerateRequest(id=str(number), input_ids=prompt, params=param, images=images)
        for number, ((prompt, images), param) in enumerate(zip(prompts, params, strict=True))
    ]


def run(core: Core, asked: list[GenerateRequest]) -> dict[str, Completion]:
    for request in asked:
        core.submit(request)
    done: dict[str, Completion] = {}
    while core.has_work:
        done |= {request.id: completion for request, completion in core.step()}
    return done


@pytest.mark.parametrize("family", ["llava", "paddleocr_vl"])
def test_the_cached_path_draws_what_the_whole_forward_draws(folders: Path, family: str) -> None:
    engine, reference, vision = both(folders / family)
    assert isinstance(engine, EmbeddedEngine)
    found, expected = (run(each, requests(each, vision)) for each in (engine, reference))
    for name, completion in expected.items():
        assert found[name].output_ids == completion.output_ids
        assert found[name].logprobs == pytest.approx(completion.logprobs, abs=1e-4)
        assert vision.image_id not in completion.output_ids
    red, blue = found["1"], found["3"]
    assert red.logprobs[0] != pytest.approx(blue.logprobs[0], abs=1e-3)  # it does see


@pytest.mark.parametrize("family", ["llava", "paddleocr_vl"])
def test_pixels_come_in_the_models_own_precision(folders: Path, family: str) -> None:
    tokenizer, vision = load_tokenizer(str(folders / family)), load_vision(str(folders / family))
    assert vision is not None
    engine = build_engine(load_model(str(folders / family), "bfloat16", CPU), tokenizer, vision)
    assert isinstance(engine, EmbeddedEngine)
    prompt = list(tokenizer(vision.expanded("a <image> is", [RED]))["input_ids"])
    red, blue = (engine.logprobs(prompt, [image]) for image in (RED, BLUE))
    assert red.isfinite().all() and (red - blue).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white_as_for_the_models_own_processor(folders: Path, mode: str) -> None:
    vision = load_vision(str(folders / "llava"))
    assert vision is not None
    image, file = PIL.Image.new("RGBA", (24, 24), (200, 30, 90, 60)).convert(mode), io.BytesIO()
    image.save(file, "PNG")
    shown = PIL.Image.open(io.BytesIO(file.getvalue()))
    dark, processor = shown.convert("RGB"), vision._processor.image_processor
    own, other = (processor(each, return_tensors="pt")["pixel_values"] for each in (shown, dark))
    found = vision.inputs(torch.tensor([[5]]), [[file.getvalue()]], torch.float32)["pixel_values"]
    assert torch.allclose(found, own, atol=2e-2) and not torch.allclose(found, other, atol=2e-2)


def test_a_photograph_is_turned_as_its_exif_orientation_says(folders: Path) -> None:
    vision = load_vision(str(folders / "paddleocr_vl"))
    assert vision is not None
    image, exif = PIL.Image.new("RGB", (64, 16), "red"), PIL.Image.Exif()
    image.paste("blue", (0, 0, 32, 16))
    exif[0x0112] = 6  # to be turned by a quarter
    files: list[bytes] = []
    for each, more in ((image, {"exif": exif}), (image.transpose(PIL.Image.Transpose.ROTATE_270), {}), (image, {})):
        file = io.BytesIO()
        each.save(file, "PNG", **more)
        files.append(file.getvalue())
    turned, upright, flat = (vision.inputs(torch.tensor([[5]]), [[file]], torch.float32) for file in files)
    assert torch.equal(turned["pixel_values"], upright["pixel_values"])
    assert not torch.equal(turned["image_grid_thw"], flat["image_grid_thw"])


def test_an_image_that_the_processor_refuses_is_refused_with_its_size(folders: Path) -> None:
    vision = load_vision(str(folders / "paddleocr_vl"))
    assert vision is not None
    with pytest.raises(ImageError, match=r"an image of 2000 x 4 pixels: .* aspect ratio must be smaller than 200"):
        vision.tokens_of(picture("red", 2000, 4))


def test_a_model_that_looks_both_ways_within_an_image_is_served_by_the_reference(folders: Path) -> None:
    engine, reference, vision = both(folders / "gemma3")
    assert type(engine) is ReferenceEngine
    found, expected = (run(each, requests(each, vision)) for each in (engine, reference))
    assert {name: each.output_ids for name, each in found.items()} == {n: e.output_ids for n, e in expected.items()}


@pytest.mark.parametrize("text", ["<boi>", "one\n<boi>\ntwo", "one\n\n<boi>\n\n\ntwo", "<boi><boi>", "<boi>\n<boi>"])
def test_newlines_around_an_image_may_share_a_token_with_those_of_the_text(folders: Path, text: str) -> None:
    vision = load_vision(str(folders / "gemma3"))
    assert vision is not None
    images, tokenizer = [RED] * text.count("<boi>"), load_tokenizer(str(folders / "gemma3"))
    ids = tokenizer.encode(vision.expanded(text, images), add_special_tokens=False)
    collapsed = vision.collapsed_ids(ids, images)
    assert tokenizer.decode(collapsed) == text
    with pytest.raises(ImageError, match="does not hold its"):
        vision.collapsed_ids([token for token in ids if "\n" not in tokenizer.decode(token)], images)


def test_each_image_keeps_its_first_token_for_an_engine_that_adds_the_others(folders: Path) -> None:
    vision = load_vision(str(folders / "paddleocr_vl"))
    assert vision is not None
    wide = picture("red", 64, 16)
    shown, more = list(vision.tokens_of(wide)), list(vision.tokens_of(RED))
    assert len(shown) != len(more)
    assert vision.one_token_each([7, *shown, *more, 8], [wide, RED]) == [7, vision.image_id, vision.image_id, 8]


def test_what_cannot_be_shown_is_refused(folders: Path, tmp_path: Path) -> None:
    engine, _, vision = both(folders / "llava")
    prompt, params = [5, *vision.tokens_of(RED), 6], SamplingParams()
    engine.check(GenerateRequest(prompt, params, (RED,)))
    with pytest.raises(ImageError, match=r"has image token \d+ 4 times, but the 2 images need it 8"):
        engine.check(GenerateRequest(prompt, params, (RED, BLUE)))
    with pytest.raises(ImageError, match="3 bytes cannot be read as an image: this is no known format"):
        engine.check(GenerateRequest(prompt, params, (b"PNG",)))
    with pytest.raises(ImageError, match=r"there are 2 placeholders '<image>' for 1 images"):
        vision.expanded("<image> <image>", [RED])
    tiny_tokenizer(tmp_path)
    blind = build_engine(tiny_model(tmp_path), load_tokenizer(str(tmp_path)), load_vision(str(tmp_path)))
    with pytest.raises(EngineError, match="the model takes no images"):
        blind.check(GenerateRequest([5, 6], params, (RED,)))


def test_a_model_that_sees_needs_its_processor(folders: Path) -> None:
    (folders / "llava" / "processor_config.json").rename(folders / "kept")
    try:
        with pytest.raises(ModelError, match=r"Cannot load the image processor.*save_pretrained"):
            load_vision(str(folders / "llava"))
    finally:
        (folders / "kept").rename(folders / "llava" / "processor_config.json")
