"""Peak memory of training and inference in turns on one device (launch.colocate), and of both at once.

The same step (launch.mode=inline) in two processes: 64 sequences of 128 tokens, by a model whose keys and values weigh
about as much as a micro-batch's activations.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.ratios import show
from clew.config import load
from clew.loop.trainer_process import learn_inline
from tests.models import VOCAB, tiny_tokenizer

YAML = """\
experiment: bench
root: {folder}/runs
model: {{path: {folder}/model, device: cpu}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: 8, n_samples: 8}}
sampling: {{max_new_tokens: 112, min_new_tokens: 112}}
training: {{steps: 1, micro_batch_tokens: 1024}}
launch: {{mode: inline}}
"""


def prepare(folder: Path) -> None:
    """Write a Qwen2 of 2 M parameters with 8 KiB of cache per token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(str(folder / "model"))
    tiny_tokenizer(folder / "model", chat=False)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i:014d} ="}) for i in range(64)))
    (folder / "run.yaml").write_text(YAML.format(folder=folder))


def resident_mib() -> float:
    """Return the peak resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(folder: Path, colocate: str) -> dict[str, float]:
    """Run the step in this process; return its peak above that of the imports, and the seconds to release memory."""
    before, timings = resident_mib(), {}
    config = load(folder / "run.yaml", [f"trial=colocate-{colocate}", f"launch.colocate={colocate}"])
    learn_inline(config, lambda step, summary: timings.update(summary["timings"]))
    return {"mib": resident_mib() - before, "imports": before, "release": timings.get("release", 0.0)}


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("FOLDER", "COLOCATE"), help="Print one run as JSON.")
    one = parser.parse_args().run
    if one:
        print(json.dumps(run(Path(one[0]), one[1])))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for colocate in ("true", "false"):
            ended = subprocess.run(
                [sys.executable, "-m", "bench.colocate", "--run", folder, colocate],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            found[colocate] = json.loads(ended.stdout.splitlines()[-1])
    turns, both = found["true"], found["false"]
    detail = (
        f"{both['mib']:.0f} / {turns['mib']:.0f} MiB, plus {turns['imports']:.0f} for imports; "
        f"released within {1000 * turns['release']:.0f} ms"
    )
    show("peak memory, both at once / taking turns", both["mib"] / turns["mib"], detail=detail)


if __name__ == "__main__":
    main()
