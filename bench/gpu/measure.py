"""Ten GRPO steps with training and inference on one GPU, their replay, and their speed beside plain transformers.

Without CUDA, a tiny model goes the same way in float32: that shows that the script works, and no speed.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engine import build_model, fixed, with_engine, with_generate
from bench.gpu.engines import ARGS, python_of, steps_through
from bench.packing import batch_of
from clew.config import Config, load
from clew.inference.embedded import EmbeddedEngine
from clew.loop.replay import engine_at, replay
from clew.loop.trainer_process import learn_inline
from clew.models.loading import pick_device
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.engine import TrainEngine
from clew.training.published_weights import write_weights
from clew.training.ranks import ALONE
from clew.training.sharded_digest import digest_tensors
from tests.models import tiny_tokenizer

PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Products and sums a second of dense bfloat16 matrices, by what the device's name contains, as NVIDIA states them."""
ROUNDS = 3
"""Rounds of each measurement, after one that does not count; the median is shown."""
RESULT = Path("build/gpu.md")

YAML = """\
experiment: gpu
root: {folder}/runs
model: {{path: {folder}/model, dtype: {dtype}}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: {groups}, n_samples: 8, max_lag: 0}}
sampling: {{max_new_tokens: {tokens}}}
training: {{steps: {steps}, lr: 1e-6, micro_batch_tokens: {micro}, deterministic: true}}
launch: {{mode: inline, colocate: true}}
"""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Sizes of everything."""

    dtype: str
    steps: int
    groups: int
    """Groups of 8 samples in a step."""
    tokens: int
    """New tokens, at most."""
    micro: int
    """Tokens of a micro-batch."""
    rows: int
    """Sequences of the train step that is measured, and of generation."""
    median_length: int
    """Length of such a sequence; a few are ten times as long."""
    model: dict[str, int] = field(default_factory=dict)


FULL = Form(
    dtype="bfloat16",
    steps=10,
    groups=8,
    tokens=192,
    micro=16_384,
    rows=128,
    median_length=300,
    model={  # the shape of Qwen2.5-0.5B
        "hidden": 896,
        "layers": 24,
        "intermediate": 4864,
        "heads": 14,
        "vocab": 151_936,
        "context": 4096,
    },
)
SMALL = Form(
    dtype="float32",
    steps=3,
    groups=2,
    tokens=16,
    micro=512,
    rows=8,
    median_length=20,
    model={"hidden": 128, "intermediate": 256},  # heads of 32 and even sizes, which the servers want on a CPU
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Time and memory of something that was measured."""

    seconds: float
    gib: float
    """Peak of allocated device memory; 0 without CUDA."""


@dataclass
class Table:
    """Rows of the result."""

    rows: list[str] = field(default_factory=list)

    def add(self, what: str, clew: str, plain: str = "", ratio: float | None = None) -> None:
        """Add one row, and show it at once."""
        self.rows.append(f"| {what} | {clew} | {plain} | {'' if ratio is None else f'{ratio:.2f}'} |")
        print(self.rows[-1], flush=True)


def main(result: Path = RESULT) -> None:
    """Measure, and write the table."""
    logging.basicConfig(format="%(levelname)s: %(message)s")  # otherwise a run's warnings are only in its record
    cuda, began = torch.cuda.is_available(), time.perf_counter()
    form, table = FULL if cuda else SMALL, Table()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = prepare(folder, form)
        config = load(folder / "run.yaml")
        train_and_replay(config, table)
        config = config.model_copy(update={"training": config.training.model_copy(update={"deterministic": False})})
        train_steps(config, form, folder, table)
        generation(config, form, table)
        forget()
        pythons = {backend: python for backend in ARGS if (python := python_of(backend)) is not None}
        well = [steps_through(backend, python, folder, cuda, table.add) for backend, python in pythons.items()]
    about = [
        f"- {datetime.now(UTC):%Y-%m-%d}, {time.perf_counter() - began:.0f} s, command: `make gpu`",
        f"- device: {torch.cuda.get_device_name() if cuda else f'{platform.machine()} CPU, no CUDA: the small form'}",
        f"- Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"CUDA {torch.version.cuda}",
        f"- model: {parameters:,} parameters, random, {form.dtype}",
    ]
    lines = [
        *about,
        "",
        "| | Clew | plain transformers | ratio |",
        "| --- | --- | --- | --- |",
        *table.rows,
    ]
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text("\n".join(lines) + "\n")
    print("\n" + "\n".join(lines) + f"\n\nwritten to {result}")
    if not all(well):
        sys.exit("A run through a server failed: see above.")


def prepare(folder: Path, form: Form) -> int:
    """Write the model, a tokenizer with as many tokens, and prompts of different lengths; return the parameters."""
    model = build_model(**form.model)
    model.to(getattr(torch, form.dtype)).save_pretrained(str(folder / "model"))
    tiny_tokenizer(folder / "model", chat=False, size=model.config.vocab_size)
    prompts = [{"prompt": "7+" * (4 + index % 13) + f"{index}="} for index in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    sizes = {name: getattr(form, name) for name in ("dtype", "groups", "tokens", "steps", "micro")}
    (folder / "run.yaml").write_text(YAML.format(folder=folder, **sizes))
    return model.num_parameters()


def train_and_replay(config: Config, table: Table) -> None:
    """Train with inference in turns on one device; then train the recorded batches again and compare the weights."""
    timings: list[dict[str, float]] = []
    norms: list[float] = []

    def on_step(step: int, summary: dict[str, Any]) -> None:
        timings.append(summary["timings"])
        norms.append(summary["metrics"]["grad_norm"])

    seconds = timed(lambda: learn_inline(config, on_step))
    forget()
    run = RunDirectory(config.run_path)
    engine = engine_at(run, 0, None, ALONE)
    same = sum(
        done.result.digests == {name: run.steps.read(done.step)["digests"][name] for name in done.result.digests}
        for done in replay(run, engine, config.training.steps - 1, verify=False)
    )
    steps = len(timings)
    assert steps == config.training.steps and all(np.isfinite(norms)) and max(norms) > 0, f"gradient norms: {norms}"
    table.add(f"{steps} GRPO steps, `launch.colocate`, with loading", f"{seconds:.1f} s")
    table.add("replay, weights and gradients bit for bit", f"{same} of {steps} steps")
    for name in timings[-1]:
        median = statistics.median(each.get(name, 0.0) for each in timings)
        if median >= 0.0005:
            table.add(f"of a step: {name}", f"{1000 * median:.0f} ms")


def train_steps(config: Config, form: Form, folder: Path, table: Table) -> None:
    """Measure train steps on rows of long-tailed lengths, one after another: both are never in memory at once."""
    drawn = np.random.default_rng(0).lognormal(np.log(form.median_length), 0.8, form.rows)
    batch = batch_of(np.clip(drawn, 4, 10 * form.median_length).astype(int).tolist())
    lengths = [len(row.input_ids) for row in batch]
    forget()
    clew = clew_steps(config, batch, folder, table)
    forget()
    plain = plain_steps(config, batch, form.micro)
    forget()
    tokens, operations, peak = sum(lengths), operations_of(config, lengths), peak_of_device()
    rates = f"{tokens / clew.seconds:,.0f} tokens/s", f"{tokens / plain.seconds:,.0f} tokens/s"
    table.add(f"train step, {len(batch)} rows, {tokens:,} tokens", *rates, plain.seconds / clew.seconds)
    if peak:
        shares = operations / clew.seconds / peak, operations / plain.seconds / peak
        table.add("MFU of the train step", f"{shares[0]:.1%}", f"{shares[1]:.1%}")
    if clew.gib:
        table.add("peak memory", f"{clew.gib:.1f} GiB", f"{plain.gib:.1f} GiB", clew.gib / plain.gib)


def clew_steps(config: Config, batch: list[Sequence], folder: Path, table: Table) -> Measured:
    """Measure Clew's train step; then a digest of all weights, and writing them."""
    engine = TrainEngine(config)
    assert engine.policy.packs, "rows of this model are not packed"
    found = measured(lambda: engine.train_step(batch))
    digest = measured(lambda: digest_tensors(engine.trained_parameters()))
    written = measured(lambda: write_weights(engine, folder / "weights", engine.version))
    table.add("digest of all weights", f"{1000 * digest.seconds:.0f} ms")
    table.add("writing the weights for inference", f"{1000 * written.seconds:.0f} ms")
    return found


def plain_steps(config: Config, batch: list[Sequence], micro: int) -> Measured:
    """Measure `plain_step`."""
    model = loaded(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    return measured(lambda: plain_step(model, adamw, batch, micro))


def plain_step(model: Any, adamw: torch.optim.Optimizer, batch: list[Sequence], micro: int) -> None:
    """Make one update as one writes it by hand: rows padded in micro-batches, GRPO's clipped loss, AdamW."""
    rewards = torch.tensor([row.reward for row in batch]).view(-1, 8)
    advantages_B = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    trained = sum(int(row.loss_mask.sum()) for row in batch)
    order = sorted(range(len(batch)), key=lambda index: -len(batch[index].input_ids))
    while order:
        size = max(1, micro // len(batch[order[0]].input_ids))
        rows, order = order[:size], order[size:]

        def padded(arrays: list[np.ndarray]) -> torch.Tensor:
            tensors = [torch.from_numpy(array) for array in arrays]
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(model.device)

        ids_BT = padded([batch[row].input_ids for row in rows]).long()
        mask_BT = padded([batch[row].loss_mask for row in rows])[:, 1:]
        behaviour_BT = padded([batch[row].logprobs for row in rows])[:, 1:]
        real_BT = padded([np.ones(len(batch[row].input_ids), np.int64) for row in rows])
        logits = model(ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1].float()
        logprobs_BT = torch.log_softmax(logits, -1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
        proximal_BT = logprobs_BT.detach()
        ratio_BT = torch.exp(logprobs_BT - proximal_BT)
        weight_BT = torch.exp(proximal_BT - behaviour_BT).clamp(max=2.0)
        gain_B1 = advantages_B[rows].to(model.device)[:, None]
        loss_BT = -weight_BT * torch.minimum(ratio_BT * gain_B1, ratio_BT.clamp(0.8, 1.2) * gain_B1)
        ((loss_BT * mask_BT).sum() / trained).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad()


def generation(config: Config, form: Form, table: Table) -> None:
    """Measure generation of the embedded engine and of `generate`, for prompts of one length."""
    model, work = loaded(config), fixed(form.rows, form.tokens)
    engine = EmbeddedEngine(loaded(config), None, max_running=form.rows)
    clew = measured(lambda: with_engine(engine, work)).seconds
    plain = measured(lambda: with_generate(model, work, form.rows)).seconds
    tokens = form.rows * form.tokens
    rates = f"{tokens / clew:,.0f} tokens/s", f"{tokens / plain:,.0f} tokens/s"
    table.add(f"generation, {form.rows} rows of {form.tokens} tokens", *rates, plain / clew)


# Helpers -------------------------------------------------------------------------------------------------------------


def loaded(config: Config) -> Any:
    """Return the model as transformers loads it, on the device."""
    dtype, device = getattr(torch, config.model.dtype), pick_device("auto")
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    return model.to(device).eval()


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds until the device is done with `run`."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def measured(run: Callable[[], Any]) -> Measured:
    """Return the median time of `run`, and its peak of device memory."""
    run()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(run) for _ in range(ROUNDS))
    gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return Measured(seconds=seconds, gib=gib)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    """Free the memory of what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def operations_of(config: Config, lengths: list[int]) -> float:
    """Return the products and sums of forward and backward: three times 2 a weight and token, and causal attention."""
    shape = AutoConfig.from_pretrained(config.model.path)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(shape).num_parameters()
    attention = 2 * shape.num_hidden_layers * shape.hidden_size * sum(length**2 for length in lengths)
    return 3.0 * (2 * weights * sum(lengths) + attention)


def peak_of_device() -> float | None:
    """Return the device's peak in PEAKS; None if it is not there."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)
