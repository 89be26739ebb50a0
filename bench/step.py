"""A synchronous step, recording and all, against a bare hand-written loop and against TRL's GRPOTrainer; and the share
of the step that is spent in clew/record/.

The same model (a Qwen2 of 0.36 M parameters, float32), prompts and samples for all: 16 prompts x 8 samples, 64 or 128
new tokens each. The contestants take turns, one step each, so that what else the machine does falls on all of them; a
ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.engine import build_model
from bench.ratios import RecordClock, show
from bench.rewards import digits
from clew.config import load

PROMPTS, SAMPLES, LENGTHS = 16, 8, (64, 128)
LR, BETAS, CLIP = 1e-5, (0.9, 0.95), 0.2
WARM_UP = 2
"""Rounds that do not count."""

YAML = """\
experiment: bench
root: {folder}/runs
model: {{path: {folder}/model}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: 16, n_samples: 8, max_lag: 0}}
sampling: {{max_new_tokens: {tokens}, min_new_tokens: {tokens}}}
training: {{steps: 1, lr: 1e-5}}
checkpoint: {{every_steps: 1000}}
launch: {{mode: inline}}
"""


def prepare(folder: Path, model: Any = None) -> None:
    """Write the model, a tokenizer with one token for each character, prompts of 16 characters and configurations."""
    from tests.models import tiny_tokenizer

    (model or build_model()).save_pretrained(str(folder / "model"))
    tiny_tokenizer(folder / "model", chat=False)
    prompts = [{"prompt": f"{index * 7919:08d}+{index:06d}="} for index in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for tokens in LENGTHS:
        (folder / f"step-{tokens}.yaml").write_text(YAML.format(folder=folder, tokens=tokens))


def prompts_of(folder: Path) -> list[str]:
    """The texts."""
    return [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]


class Bare:
    """Bare loop as one writes it by hand: no record, no names, no other process."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = tokens
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder / "model"))
        self.prompts = prompts_of(folder)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
        self.done = 0

    def __call__(self) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def step(self) -> None:
        """Sample, reward, one forward and backward, AdamW."""
        first = self.done * PROMPTS % len(self.prompts)
        texts = [text for text in self.prompts[first : first + PROMPTS] for _ in range(SAMPLES)]
        prompt_BT = torch.tensor(self.tokenizer(texts)["input_ids"])
        output_BT, behaviour_BT = self.sample(prompt_BT)
        rewards = [sum(digits(text, {}).values()) for text in self.tokenizer.batch_decode(output_BT)]
        rewards_GE = torch.tensor(rewards).view(PROMPTS, SAMPLES)
        advantages_GE = (rewards_GE - rewards_GE.mean(1, keepdim=True)) / (rewards_GE.std(1, keepdim=True) + 1e-6)
        self.learn(torch.cat((prompt_BT, output_BT), 1), behaviour_BT, advantages_GE.view(-1, 1))
        self.done += 1

    @torch.inference_mode()
    def sample(self, prompt_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached decoding of all sequences as one batch; tokens and their logprobs."""
        cache, ids = DynamicCache(config=self.model.config), prompt_BT
        tokens, chosen = [], []
        for _ in range(self.tokens):
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            logprobs = torch.log_softmax(logits, -1)
            ids = torch.multinomial(logprobs.exp(), 1)
            tokens.append(ids)
            chosen.append(logprobs.gather(1, ids))
        return torch.cat(tokens, 1), torch.cat(chosen, 1)

    def learn(self, ids_BT: torch.Tensor, behaviour_BT: torch.Tensor, advantages_B1: torch.Tensor) -> None:
        """Loss as Clew computes it: a clipped ratio, weighted by proximal over behaviour, the mean over tokens."""
        logits = self.model(ids_BT, use_cache=False, logits_to_keep=self.tokens + 1).logits[:, :-1]
        targets_BT1 = ids_BT[:, -self.tokens :, None]
        logprobs_BT = torch.log_softmax(logits, -1).gather(2, targets_BT1).squeeze(2)
        proximal_BT = logprobs_BT.detach()
        ratio_BT = torch.exp(logprobs_BT - proximal_BT)
        weight_BT = torch.exp(proximal_BT - behaviour_BT).clamp(max=2.0)
        clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
        loss = -(weight_BT * torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()


class Trl:
    """TRL's GRPOTrainer on the CPU, timed from the end of one step to the end of the next."""

    def __init__(self, folder: Path, *, gradient_checkpointing: bool, tokens: int, at_least: int | None) -> None:
        """Build the trainer.

        Args:
            gradient_checkpointing: TRL's default is True, which computes the forward pass twice.
            tokens: Maximum number of generated tokens.
            at_least: Minimum number of generated tokens, even if the model would end earlier; None: no minimum.
        """
        warnings.filterwarnings("ignore")
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        ended: list[float] = []

        class Times(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                ended.append(time.perf_counter())

        def reward(completions: list[str], **columns: Any) -> list[float | None]:
            return [sum(digits(completion, {}).values()) for completion in completions]

        self.ended = ended
        self.arguments = GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=gradient_checkpointing,
            report_to="none",
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=tokens,
            generation_kwargs={} if at_least is None else {"min_new_tokens": at_least},
            temperature=1.0,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            save_strategy="no",
            max_steps=2,
            logging_steps=1000,
            disable_tqdm=True,
            optim="adamw_torch_fused",
            seed=1,
            loss_type="dapo",
            scale_rewards="group",
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder / "model"), padding_side="left")
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=torch.float32),
            reward_funcs=reward,
            args=self.arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts_of(folder)]),
            callbacks=[Times()],
        )

    def __call__(self) -> float:
        """Seconds of a step: the second of two."""
        self.ended.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer.train()
        return self.ended[1] - self.ended[0]


@dataclass
class Race:
    """Results of the rounds."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of a step, by contestant, one a round."""
    record_shares: list[float] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    record_ms: str = ""

    def ratio(self, over: str, under: str) -> float:
        """Return the median over the rounds of the time of `over` divided by that of `under`."""
        return statistics.median(a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True))

    def times(self, *names: str) -> str:
        """Return the median seconds of a step of each contestant, as text."""
        return " / ".join(f"{1000 * statistics.median(self.seconds[name]):.0f} ms" for name in names)


def race(config: Path, others: dict[str, Callable[[], float]], rounds: int, warm_up: int = WARM_UP) -> Race:
    """Run Clew's loop as `clew train` with launch.mode=inline does; after each of its steps, call each of `others`.

    A step of Clew lasts from the end of the others' steps to its next commit, publication and recording included.
    """
    import clew.loop.trainer_process
    import clew.rollout.process  # RecordClock wraps only what is imported already: import all callers of clew/record/

    record, seen = RecordClock(), Race()
    began = recorded = 0.0

    def on_step(step: int, summary: dict[str, Any]) -> None:
        nonlocal began, recorded
        taken, recording = time.perf_counter() - began, record.seconds - recorded
        times = {"clew": taken, **{name: run() for name, run in others.items()}}
        if step >= warm_up:
            for name, value in times.items():
                seen.seconds[name].append(value)
            seen.record_shares.append(recording / taken)
            seen.timings.append(summary["timings"])
        began, recorded = time.perf_counter(), record.seconds

    steps = rounds + warm_up
    clew.loop.trainer_process.learn_inline(load(config, [f"training.steps={steps}"]), on_step)
    seen.record_ms = record.table(steps)
    return seen


def parts(timings: Iterable[dict[str, float]]) -> str:
    """Show where the median step's time goes, by its own timings."""
    timings = list(timings)
    medians = {name: statistics.median(each.get(name, 0.0) for each in timings) for name in timings[-1]}
    return ", ".join(f"{name} {1000 * value:.0f}" for name, value in medians.items() if value > 0.0005)


def main(rounds: int = 9, *, trl: bool = True) -> None:
    """Print the ratios."""
    for tokens in LENGTHS:
        print(f"{tokens} new tokens")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder)
            others: dict[str, Callable[[], float]] = {"bare": Bare(folder, tokens)}
            if trl:
                others["trl"] = Trl(folder, gradient_checkpointing=True, tokens=tokens, at_least=tokens)
                others["trl, lean"] = Trl(folder, gradient_checkpointing=False, tokens=tokens, at_least=tokens)
            seen = race(folder / f"step-{tokens}.yaml", others, rounds)
        show("synchronous step / bare loop", seen.ratio("clew", "bare"), "<= 1.15", seen.times("clew", "bare"))
        for name, how in (("trl", "as it comes"), ("trl, lean", "no checkpointing")):
            if name in others:
                ratio, detail = seen.ratio(name, "clew"), seen.times(name, "clew")
                show(f"TRL's step ({how}) / synchronous step", ratio, ">= 1.5", detail)
        show("time in record/ / step", statistics.median(seen.record_shares), "<= 5 %", percent=True)
        print(f"  the step, ms: {parts(seen.timings)}")
        print(f"  record/, ms a step: {seen.record_ms}", flush=True)
    large()


def large() -> None:
    """Print how much of a step recording takes for a model of 100 M parameters, for two sizes of the batch.

    One batch is small, and one is as large as in `main`. Digests of weights and gradients cost the same in both.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, build_model(hidden=768, layers=16, intermediate=2048))
        for prompts in (4, PROMPTS):
            as_above = YAML.format(folder=folder, tokens=64) + f'trial: "{prompts}"\n'
            (folder / "step.yaml").write_text(as_above.replace("batch_groups: 16", f"batch_groups: {prompts}"))
            seen = race(folder / "step.yaml", {}, rounds=1, warm_up=1)
            title = f"time in record/ / step, 100 M parameters, {prompts} x {SAMPLES}"
            show(title, seen.record_shares[0], "<= 1 %", seen.times("clew"), percent=True)
            print(f"  record/, ms a step: {seen.record_ms}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--without-trl", action="store_true")
    arguments = parser.parse_args()
    main(arguments.rounds, trl=not arguments.without_trl)
