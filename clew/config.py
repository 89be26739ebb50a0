"""The typed configuration: one YAML file plus `key=value` overrides. Importing this imports no torch.

OmegaConf merges and resolves `${...}`; pydantic checks types and ranges. A field that is unknown or contradicts another
stops at once, with the file and line (or the override) and the nearest valid name.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clew.algorithms import ADVANTAGES, LOSSES, PRESETS, WITHIN_GROUP, Preset, preset_options
from clew.errors import ConfigError, RecordError
from clew.printing import visible
from clew.processes import cores
from clew.reading import check_yaml, read_text

DPO_BETA = 0.1
"""Default of algorithm.kl_coef for training.objective=dpo: the paper's beta."""

SERVERS_VARIABLE = "CLEW_LLM_SERVER_ADDRS"
TOKEN_VARIABLE = "CLEW_LLM_SERVER_TOKEN"


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """The policy, and the device that it computes on."""

    path: str = Field(description="Folder (as save_pretrained writes it) or hub name of a causal language model.")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="Type of the weights, here and in inference."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; auto: cuda if there is one."
    )


class Data(Section):
    """The prompts."""

    path: str = Field(description="JSON-lines or Parquet file, or the hub name of a data set.")
    split: str = Field(default="train", description="Split of a hub data set; files have none.")
    prompt: str = Field(default="prompt", description="Column with the prompt: text, or a list of chat messages.")
    completion: str = Field(
        default="completion", description="Column with the demonstration, or the preferred of two completions."
    )
    rejected: str = Field(
        default="rejected", description="Column with the completion that was not preferred, for dpo and reward_model."
    )
    limit: int | None = Field(default=None, ge=1, description="Use only this many rows, from the first on; null: all.")
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Rollout leaves out rows with a longer prompt, in tokens, and says how many; null: no limit.",
    )


class Rollout(Section):
    """Settings for making and admitting episodes."""

    workflow: str = Field(
        default="clew.rollout.workflows.SingleTurn", description="Dotted path of the workflow's class."
    )
    agent: str | None = Field(
        default=None, description="In the place of a workflow: dotted path of an agent's class, with `async def run`."
    )
    workflow_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the constructor of workflow or agent."
    )
    max_turns: int | None = Field(default=None, ge=1, description="Requests that an agent may make; null: any number.")
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="Generated tokens after which an agent's requests are refused; null: no limit."
    )
    sequences: Literal["concat", "individual"] = Field(
        default="concat", description="concat: turns that extend one another are one sequence; individual: one a turn."
    )
    reward: str | None = Field(
        default=None, description="Dotted path of the reward function, (completion, data) -> number(s)."
    )
    reward_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds after which a reward call is killed: an error."
    )
    reward_workers: int = Field(default=1, ge=1, description="Processes that compute plain (not async) rewards.")
    n_samples: int = Field(default=8, ge=1, description="Episodes in a group (of the same prompt).")
    batch_groups: int = Field(default=16, ge=1, description="Groups in a batch: what one step consumes.")
    max_lag: int = Field(default=0, ge=0, description="Versions a token may be older than the trainer; 0: synchronous.")
    late: Literal["wait", "train"] = Field(
        default="wait", description="A group that would grow too old: the batch waits for it, or trains on it later."
    )
    drop_equal_rewards: bool = Field(default=False, description="Reject and refill groups whose rewards are all equal.")
    max_failed_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of failed episodes beyond which the run stops. It stops within about a batch where all "
        "fail, and later the nearer the share is to this, so that chance does not stop a healthy run.",
    )
    episode_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds after which an episode is cancelled: an error."
    )


class Reward(Section):
    """Settings for changing rewards before they are trained on."""

    turn_discount: float = Field(
        default=1.0, gt=0, le=1, description="A turn's return: its reward plus this, times the turns' after it."
    )


class Sampling(Section):
    """Settings for drawing tokens."""

    max_new_tokens: int = Field(default=256, ge=1, description="Tokens a response may have.")
    min_new_tokens: int = Field(default=0, ge=0, description="Tokens before which a response cannot end.")
    temperature: float = Field(default=1.0, ge=0, description="Divides the logits; 0 takes the likeliest token.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw from the fewest likeliest tokens of this probability."
    )
    top_k: int = Field(default=0, ge=0, description="Draw from the likeliest k tokens; 0: from all.")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="Draw from tokens this share as likely as the likeliest.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    stop_token_ids: list[int] | None = Field(
        default=None, description="Token ids that end a response; null: the tokenizer's end and pad tokens."
    )

    @model_validator(mode="after")
    def _lengths_agree(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens ({self.min_new_tokens}) is above sampling.max_new_tokens "
                f"({self.max_new_tokens})"
            )
        return self


class Inference(Section):
    """The inference engine and its server."""

    listen: str = Field(default="127.0.0.1:0", description="host:port of `clew serve`; port 0 takes a free one.")
    max_running: int = Field(default=128, ge=1, description="Sequences generated side by side; more wait in a queue.")
    cache_gib: float = Field(default=1.0, gt=0, description="GiB of memory for keys and values; more requests wait.")
    weights: str | None = Field(
        default=None,
        description="Folder for weights on their way to inference, such as /dev/shm/NAME; null: the run's.",
    )


class Training(Section):
    """The optimizer (AdamW) and the shape of a step."""

    steps: int = Field(default=100, ge=1, description="Steps of the whole run.")
    batch_size: int = Field(
        default=32, ge=1, description="Demonstrations in a step of `clew sft`; RL consumes groups instead."
    )
    objective: Literal["sft", "dpo", "reward_model"] = Field(
        default="sft",
        description="What `clew sft` minimizes: cross-entropy, or of preferences DPO's loss (arXiv 2305.18290) or "
        "Bradley and Terry's (arXiv 2203.02155, equation 1).",
    )
    lora_rank: int | None = Field(
        default=None, ge=1, description="Train low-rank adapters of all linear layers (arXiv 2106.09685); null: all."
    )
    lora_alpha: float | None = Field(
        default=None, gt=0, description="Adapters count lora_alpha / lora_rank; null: twice the rank, a factor of 2."
    )
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="What the learning rate does after the warm-up; linear and cosine end at 0."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer updates over which the learning rate rises from 0."
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="AdamW's decoupled decay of matrices (not of norms and biases)."
    )
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the two moments."
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm.")
    on_bad_gradient: Literal["stop", "skip"] = Field(
        default="stop", description="An update with NaN, infinity or a spike: stop the run, or leave the update out."
    )
    spike_factor: float | None = Field(
        default=None,
        gt=1,
        description="Gradient norms above this multiple of the median of the last 8 to 32 updates count as spikes; "
        "null: off.",
    )
    micro_batch_tokens: int = Field(
        default=4096,
        ge=1,
        description="Tokens that a rank computes at a time; padding counts where an architecture cannot pack rows.",
    )
    tp: int = Field(
        default=1,
        ge=1,
        description="Ranks that compute the same tokens, each with its share of every block (tensor parallelism, arXiv "
        "1909.08053).",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute each block again in the backward pass, which saves memory and costs time."
    )
    deterministic: bool = Field(
        default=False, description="On CUDA, kernels that give the same bits each time; the CPU's always do."
    )


class Algorithm(Section):
    """The objective of training: by default GRPO with the decoupled objective of AReaL (arXiv 2505.24298).

    docs/algorithms.md has the formulas.
    """

    preset: Preset | str | None = Field(
        default=None,
        description="Sets the options of a paper's algorithm that are not set here, or of yours: the dotted path of a "
        "module with any of OPTIONS, advantages and loss; null: none.",
    )
    minibatches: int = Field(
        default=1, ge=1, description="Optimizer updates in a step, each on its share of the groups."
    )
    advantages: str = Field(
        default="group",
        description="group (GRPO), batch (REINFORCE++, arXiv 2501.03262), mean (Dr. GRPO, arXiv 2503.20783), "
        "leave_one_out (RLOO, arXiv 2402.14740), gae (PPO: of each token, with a critic), none, or a function's dotted "
        "path, (sequences) -> for each a number, or one a token.",
    )
    gamma: float = Field(
        default=1.0, gt=0, le=1, description="gae: discount of a reward for each token before it (arXiv 1506.02438)."
    )
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="gae: 1 believes the rewards alone, 0 the critic's next value (arXiv 1506.02438, equation 16).",
    )
    critic: str | None = Field(
        default=None,
        description="gae: folder or hub name of the model that the critic begins with, such as a reward model (arXiv "
        "2203.02155); null: model.path.",
    )
    critic_lr: float | None = Field(
        default=None, gt=0, description="gae: the critic's peak learning rate; null: training.lr."
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="gae: a step gains nothing by moving a value further than this (PPO's code, arXiv 2005.12729); "
        "null: any.",
    )
    overlong_penalty: int | None = Field(
        default=None,
        ge=1,
        description="Last tokens before a response's limit, over which up to 1 is taken off the reward "
        "(DAPO, arXiv 2503.14476, equation 13); null: no penalty.",
    )
    overlong_filter: bool = Field(
        default=False, description="Sequences that were cut off at a limit have no part in the loss (arXiv 2503.14476)."
    )
    loss: str = Field(
        default="clip",
        description="clip (PPO, arXiv 1707.06347), cispo (MiniMax-M1, arXiv 2506.13585), or the dotted path of a "
        "function of named tensors.",
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="Current over proximal probability: of each token, or the geometric mean over its sequence "
        "(GSPO, arXiv 2507.18071).",
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Upper bound of the ratio where the advantage is negative (arXiv 1912.09729); null: no bound.",
    )
    importance: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="token_truncate",
        description="Proximal over behaviour probability, of a token or a whole sequence: truncated to importance_cap, "
        "or 0 outside [1/cap, cap] (IcePop, MIS).",
    )
    importance_cap: float = Field(
        default=2.0, gt=0, description="Proximal over behaviour probability, truncated to this."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL divergence to the run's first model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="How the divergence is estimated (Schulman, joschu.net/blog/kl-approx.html)."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Added to each token's loss, or its sum over a sequence subtracted from the reward."
    )
    entropy_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the entropy that is subtracted from each token's loss (arXiv 1707.06347, equation 9).",
    )
    loss_mean: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="Over all tokens of a mini-batch (DAPO); within sequences, then over them (GRPO); or the sum over "
        "a sequence by loss_constant, then over sequences (Dr. GRPO).",
    )
    loss_constant: int | None = Field(
        default=None, ge=1, description="Tokens that loss_mean=constant divides by; null: sampling.max_new_tokens."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Algorithm:
        for field, built_in in (("preset", PRESETS), ("advantages", ADVANTAGES), ("loss", LOSSES)):
            value = getattr(self, field)
            if value is not None and value not in built_in and "." not in value:
                raise ValueError(
                    f"algorithm.{field} is {value!r}; expected {', '.join(built_in)} or a dotted path such as "
                    f"my_module.{value or 'name'}. Did you mean {_nearest(value, list(built_in))!r}?"
                )
        for field in ("critic", "critic_lr"):
            if self.advantages != "gae" and getattr(self, field) is not None:
                raise ValueError(
                    f"algorithm.{field} is of the critic, and algorithm.advantages={self.advantages} has none. Unset "
                    f"it, or use algorithm.advantages=gae"
                )
        if self.loss == "cispo" and self.dual_clip is not None:
            raise ValueError("algorithm.dual_clip bounds the clipped objective, and algorithm.loss is cispo. Unset it")
        if self.importance.endswith("mask") and self.importance_cap <= 1:
            raise ValueError(
                f"algorithm.importance_cap ({self.importance_cap:g}) with algorithm.importance={self.importance} would "
                f"mask every token: the weights that are kept lie between 1/cap and cap. Use more than 1"
            )
        return self


class Eval(Section):
    """Evaluation on held-out prompts. All episodes of one evaluation use the same version of the weights."""

    path: str | None = Field(default=None, description="Like data.path; null: no evaluation.")
    every_steps: int = Field(default=10, ge=1, description="Evaluate versions 0, N, 2N, ... and the last.")
    n_samples: int = Field(default=1, ge=1, description="Episodes a prompt, for pass@1 to pass@n.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0: greedy.")


class Checkpoint(Section):
    """Checkpoints, from which a killed run restarts."""

    every_steps: int = Field(
        default=20, ge=1, description="Steps between checkpoints; those after the last are replayed."
    )
    keep: int = Field(default=2, ge=1, description="Checkpoints kept besides the first.")


class Record(Section):
    """The run directory."""

    keep_steps: int | None = Field(
        default=None, ge=1, description="Keep the data of this many steps, the newest; null: of all."
    )


class Debug(Section):
    """Training on recorded batches without rollout, and portable copies of batches."""

    dump_rollout_data: bool = Field(default=False, description="Copy the batch of each step to debug.path.")
    replay_rollout_data: bool = Field(
        default=False, description="Train on the batches in debug.path; no rollout, no inference."
    )
    path: str | None = Field(
        default=None, description="Folder of dumped batches; to replay from, also a run directory."
    )
    format: Literal["parquet", "pt"] = Field(
        default="parquet", description="Of dumped batches: the record's own, or padded tensors for torch.load."
    )
    first_step: int = Field(
        default=0,
        ge=0,
        description="To replay from this step on, with what the run directory debug.path had learnt by then.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Debug:
        if self.dump_rollout_data and self.replay_rollout_data:
            raise ValueError(
                "debug.dump_rollout_data and debug.replay_rollout_data are both set: a run either makes its batches "
                "or replays others. Unset one"
            )
        if (self.dump_rollout_data or self.replay_rollout_data) and self.path is None:
            raise ValueError("debug.path is missing: the folder to write batches to, or to read them from")
        if self.path is not None and not (self.dump_rollout_data or self.replay_rollout_data):
            raise ValueError(
                "debug.path is set, but neither debug.dump_rollout_data=true (write batches there) nor "
                "debug.replay_rollout_data=true (train on those there). Set one, or leave debug.path out"
            )
        if self.format != "parquet" and not self.dump_rollout_data:
            raise ValueError(
                f"debug.format={self.format} is of debug.dump_rollout_data=true: set it, or leave both out. What is "
                f"replayed says itself which it is"
            )
        if self.first_step and not self.replay_rollout_data:
            raise ValueError("debug.first_step is of debug.replay_rollout_data=true: set it, or leave both out")
        return self


class Launch(Section):
    """The processes of a run, and how they share the machine."""

    mode: Literal["local", "inline"] = Field(
        default="local",
        description="local: a process each; inline: one process, user code on its main thread, no time limits.",
    )
    ranks: int = Field(
        default=1, ge=1, description="Processes that train together, each with a slice of the model (FSDP2)."
    )
    colocate: bool = Field(
        default=False,
        description="Training and inference take turns on one device: while a step is trained, inference runs nothing "
        "and gives its cache's memory back.",
    )
    restarts: int = Field(default=3, ge=0, description="Times that a dead server or rollout process is started again.")
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of torch in each process; null: one a core, half of that side by side, shared by ranks.",
    )

    @model_validator(mode="after")
    def _ranks_are_processes(self) -> Launch:
        if self.mode == "inline" and self.ranks > 1:
            raise ValueError(
                f"launch.ranks is {self.ranks} and launch.mode is inline, which is one process. Use launch.mode=local, "
                f"or launch.ranks=1"
            )
        return self


class Config(Section):
    """Settings of a run. A command ignores the sections that it does not need."""

    experiment: str = Field(pattern=r"^[\w-][\w.-]*$", description="Names the run directory, ROOT/EXPERIMENT/TRIAL.")
    trial: str = Field(default="0", pattern=r"^[\w-][\w.-]*$", description="Second part of the run directory's name.")
    root: str = Field(default="runs", description="Folder that holds the run directories.")
    seed: int = Field(default=1, ge=0, description="All seeds derive from this one and the IDs of things.")
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    inference: Inference = Inference()
    training: Training = Training()
    algorithm: Algorithm = Algorithm()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    record: Record = Record()
    debug: Debug = Debug()
    launch: Launch = Launch()

    @model_validator(mode="before")
    @classmethod
    def _resolve_algorithm(cls, values: Any) -> Any:
        """Fill in what the user left open: the preset's fields, the constant of the loss, and the KL weight of DPO."""
        algorithm = _section(values, "algorithm")
        # A run's config.yaml has all fields. It is read without the user's page, which may be another by now, or gone.
        if algorithm.get("preset") in PRESETS or Algorithm.model_fields.keys() - algorithm.keys():
            for name, value in _chosen(values).items():
                section, field = name.split(".")
                values = {**values, section: {field: value, **_section(values, section)}}
        algorithm = _section(values, "algorithm")
        if algorithm.get("loss_mean") == "constant" and algorithm.get("loss_constant") is None:
            values = {**values, "algorithm": {**algorithm, "loss_constant": _limit(values)}}
        if _section(values, "training").get("objective") == "dpo" and "kl_coef" not in algorithm:
            values = {**values, "algorithm": {**algorithm, "kl_coef": DPO_BETA}}
        return values

    @model_validator(mode="after")
    def _fields_agree(self) -> Config:
        rollout = self.rollout
        penalty, limit = self.algorithm.overlong_penalty, self.sampling.max_new_tokens
        if penalty is not None and penalty > limit:
            raise ValueError(
                f"algorithm.overlong_penalty ({penalty}) is above sampling.max_new_tokens ({limit}): every response "
                f"would be taken for overlong"
            )
        if rollout.agent is not None and rollout.workflow != Rollout.model_fields["workflow"].default:
            raise ValueError(
                f"rollout.agent ({rollout.agent}) and rollout.workflow ({rollout.workflow}) are both set: an episode "
                f"is one or the other. Unset one"
            )
        if rollout.n_samples < 2 and self.algorithm.advantages in WITHIN_GROUP:
            raise ValueError(
                f"rollout.n_samples is 1, and algorithm.advantages={self.algorithm.advantages} compares the episodes "
                f"of a group: a single one has nothing to be compared with. Use at least 2, or algorithm.advantages="
                f"batch, gae or none"
            )
        if rollout.n_samples < 2 and rollout.drop_equal_rewards:
            raise ValueError(
                "rollout.drop_equal_rewards rejects groups whose rewards are all equal, and with rollout.n_samples=1 "
                "every group's are. Use at least 2, or unset it"
            )
        if self.algorithm.advantages == "gae" and self.reward.turn_discount != 1:
            raise ValueError(
                f"reward.turn_discount ({self.reward.turn_discount:g}) discounts whole turns, and algorithm.advantages="
                f"gae discounts tokens. Use algorithm.gamma"
            )
        if self.training.objective == "dpo" and self.algorithm.kl_coef == 0:
            raise ValueError(
                "algorithm.kl_coef is 0, and is training.objective=dpo's beta: nothing would be learned. Use more than "
                "0, or unset it for 0.1"
            )
        if self.training.objective == "reward_model" and self.training.lora_rank is not None:
            raise ValueError(
                "training.lora_rank freezes all but the adapters of a language model, and training.objective="
                "reward_model has a new head to train. Unset it"
            )
        if self.launch.ranks % self.training.tp:
            raise ValueError(
                f"training.tp is {self.training.tp}, which does not divide launch.ranks ({self.launch.ranks}): the "
                f"ranks work in groups of that many. Use a multiple of it for launch.ranks, or training.tp="
                f"{math.gcd(self.training.tp, self.launch.ranks)}"
            )
        if self.training.tp > 1 and self.training.lora_rank is not None:
            raise ValueError(
                "training.lora_rank adds adapters to whole layers, and training.tp splits layers. Use training.tp=1: "
                "FSDP2 spreads the frozen model over launch.ranks all the same"
            )
        if self.training.lora_alpha is not None and self.training.lora_rank is None:
            raise ValueError("training.lora_alpha scales adapters, and there are none without training.lora_rank")
        for name in ("max_turns", "max_episode_tokens"):
            if rollout.agent is None and getattr(rollout, name) is not None:
                raise ValueError(f"rollout.{name} limits an agent's requests, and rollout.agent is not set. Unset it")
        if self.algorithm.minibatches > self.rollout.batch_groups:
            raise ValueError(
                f"algorithm.minibatches ({self.algorithm.minibatches}) is above rollout.batch_groups "
                f"({self.rollout.batch_groups}): a mini-batch needs at least one group"
            )
        return self

    @property
    def run_path(self) -> Path:
        """Return the run directory, ROOT/EXPERIMENT/TRIAL."""
        return Path(self.root) / self.experiment / self.trial

    @property
    def threads(self) -> int:
        """Return the number of torch's threads in each process.

        This is launch.threads, if it is set. Otherwise it is one per core if trainer and server take turns, and half as
        many if they compute side by side (launch.mode=local with rollout.max_lag above 0, without launch.colocate).
        """
        if self.launch.threads is not None:
            return self.launch.threads
        side_by_side = self.launch.mode == "local" and self.rollout.max_lag > 0 and not self.launch.colocate
        return max(1, cores() // 2) if side_by_side else cores()

    @property
    def rank_threads(self) -> int:
        """Return the number of torch's threads in each trainer rank: launch.threads, or else its share of `threads`."""
        return self.launch.threads or max(1, self.threads // self.launch.ranks)


def load(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read `path`, apply `key=value` overrides, resolve `${...}` and check the result. Raises ConfigError."""
    path = Path(path)
    try:
        text = read_text(path, "name a YAML file, or restore this one from a copy")
    except RecordError as error:
        raise ConfigError(str(error)) from None
    return parse(text, path, overrides)


def parse(text: str, path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Return the configuration in a YAML text, as `load` does for a file. path: where the text is from, for errors."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = _merged(text)
        if any(override.startswith("algorithm.preset=") for override in overrides):
            _forget_preset(merged)
        for override in overrides:
            if "=" not in override:
                raise ConfigError(f"override {override!r}: expected key=value, for example training.steps=100.")
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([override]))
        values = OmegaConf.to_container(merged, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:500]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections such as model: and data:, found {type(values).__name__}.")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, path, text, overrides) for problem in error.errors())) from None


def _merged(text: str) -> Any:
    """Return OmegaConf's view of a YAML text. Raises ValueError if its parser fails on valid YAML."""
    from omegaconf import OmegaConf

    check_yaml(text)
    try:
        return OmegaConf.create(text)
    except (AttributeError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"expected sections with plain values ({type(error).__name__}: {error})") from None


def _section(values: Any, name: str) -> dict[str, Any]:
    """Return a section before it is checked; empty if it is missing or not a mapping."""
    section = values.get(name) if isinstance(values, Mapping) else None
    return dict(section) if isinstance(section, Mapping) else {}


def _limit(values: Any) -> int:
    """Return sampling.max_new_tokens; its default if the value is missing or will be refused."""
    limit = _section(values, "sampling").get("max_new_tokens")
    return limit if isinstance(limit, int) else Sampling.model_fields["max_new_tokens"].default


def _chosen(values: Any) -> dict[str, Any]:
    """Return the options that the chosen preset sets, by their dotted names; empty without a preset.

    Raises:
        ConfigError: The preset is a user's page that cannot be loaded, or sets a field that does not exist.
    """
    preset = _section(values, "algorithm").get("preset")
    if not isinstance(preset, str) or (preset not in PRESETS and "." not in preset):
        return {}
    options = preset_options(preset, max_new_tokens=_limit(values))
    if strange := [name for name in options if name not in field_names()]:
        raise ConfigError(
            f"algorithm.preset={preset} sets {strange[0]}, and there is no such field; did you mean "
            f"{_nearest(strange[0], field_names())!r}?"
        )
    return options


def _forget_preset(values: Any) -> None:
    """Remove the fields that only repeat what the file's own preset, or the default, sets.

    This is done before another preset is chosen on the command line, so that it takes effect: a run's config.yaml, for
    example, spells out all fields.
    """
    said = _chosen(values)
    for name in {*said, *(field for preset in PRESETS for field in preset_options(preset))}:
        section, field = name.split(".")
        kind: Any = Config.model_fields[section].annotation
        default = kind.model_fields[field].get_default(call_default_factory=True)
        if _section(values, section).get(field, ...) == said.get(name, default):
            del values[section][field]


def preset_of(config: Config) -> str:
    """Return the options that the preset sets as text for people; empty without a preset."""
    chosen = _chosen(config.model_dump())
    return ", ".join(
        f"{name}={value if isinstance(value, str) else str(value).lower()}" for name, value in chosen.items()
    )


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML; `load` reads it back."""
    import yaml

    content = config.model_dump(mode="json")
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text if visible(text) == text else yaml.safe_dump(content, sort_keys=False)  # which spells out all but ASCII


def server_addresses() -> list[str]:
    """Return the host:port of each inference server in CLEW_LLM_SERVER_ADDRS, which separates them by commas.

    If it is empty, the servers of the run directory are used.
    """
    return [address.strip() for address in os.environ.get(SERVERS_VARIABLE, "").split(",") if address.strip()]


def server_token() -> str:
    """Return the token of the servers in CLEW_LLM_SERVER_ADDRS: the value of CLEW_LLM_SERVER_TOKEN, or an empty string.

    A server that is started with this variable set uses it, too.
    """
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def provider() -> tuple[str, str]:
    """Return the values of OPENAI_BASE_URL and OPENAI_API_KEY, each empty if it is not set."""
    return os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")


def field_names(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += field_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def _explain(problem: Any, path: Path, text: str, overrides: list[str] | tuple[str, ...]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    where = _where(name, path, text, overrides)
    if problem["type"] == "extra_forbidden":
        sections = [section for section in Config.model_fields if section not in field_names()]
        nearest = _nearest(name, field_names() + sections)
        return f"{where}: there is no field {name!r}; did you mean {nearest!r}?"
    if problem["type"] == "missing":
        return f"{where}: the field {name!r} is missing; it has no default."
    message = problem["msg"].removeprefix("Value error, ")
    if name and not message.startswith(f"{name}."):
        message = f"{name}: {message}"
    if name and not isinstance(problem["input"], (dict, BaseModel)):
        message += f", found {problem['input']!r}"
    return f"{where}: {message}{'' if message.endswith('?') else '.'}"


def _nearest(name: str, names: list[str]) -> str:
    """Return the valid name that is most like `name`. The last part counts most: `rollout.lr` means `training.lr`."""
    last = name.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        return max(
            difflib.SequenceMatcher(None, name, candidate).ratio(),
            0.95 * difflib.SequenceMatcher(None, last, candidate.rsplit(".", 1)[-1]).ratio(),
        )

    return max(names, key=likeness)


def _where(name: str, path: Path, text: str, overrides: list[str] | tuple[str, ...]) -> str:
    for override in reversed(overrides):
        key = override.split("=", 1)[0]
        if key == name or name.startswith(key + ".") or (name and key.startswith(name + ".")):
            return f"override {override}"
    line = _line_of(name, text)
    return f"{path}:{line}" if line else str(path)


def _line_of(name: str, text: str) -> int | None:
    """Return the line (from 1) of the deepest part of the dotted `name` that the YAML has; None if it has none."""
    import yaml

    node, line = yaml.compose(text), None
    for part in name.split("."):
        if not isinstance(node, yaml.MappingNode):
            break
        for key, value in node.value:
            if key.value == part:
                node, line = value, key.start_mark.line + 1
                break
        else:
            break
    return line
