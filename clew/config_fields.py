"""The sections of the configuration, field by field; docs/reference/configuration is made from them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from clew.algorithms import ADVANTAGES, LOSSES, PRESETS, WITH_CRITIC, Preset

DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _unwrap(schema: dict[str, Any]) -> None:
    """Put the description of each field in a JSON Schema on one line."""
    for field in schema["properties"].values():
        if "description" in field:
            field["description"] = " ".join(field["description"].split())


class Section(BaseModel):
    """A frozen section of the configuration. It refuses unknown fields; the docstring of a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, json_schema_extra=_unwrap)


class Model(Section):
    """The policy, and the device that it computes on."""

    path: str
    """Folder (as save_pretrained writes it) or hub name of a causal language model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number type of the weights, in training and in inference."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: cuda if there is one, otherwise cpu."""


class Data(Section):
    """The prompts."""

    path: str
    """JSON-lines or Parquet file, or the hub name of a data set."""
    split: str = "train"
    """Split of a hub data set, here and in eval.path; ignored for files."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages. For `clew sft` a list without a completion is a whole
    conversation; by default it may also be in the column `messages`."""
    completion: str = "completion"
    """Column with the demonstration, or with the preferred of two completions."""
    rejected: str = "rejected"
    """Column with the other completion, for training.objective dpo and reward_model."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, from the first on; null: all."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a prompt in tokens; rollout leaves out longer rows and logs how many; null: no limit."""


class Rollout(Section):
    """Settings for making and admitting episodes."""

    workflow: str = "clew.rollout.workflows.SingleTurn"
    """Dotted path of the workflow's class."""
    agent: str | None = None
    """Dotted path of an agent's class (with `async def run`), used instead of a workflow."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the constructor of the workflow or agent."""
    max_turns: int | None = Field(default=None, ge=1)
    """Maximum number of requests that an agent makes in an episode; null: no limit."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Number of generated tokens after which an agent's requests are refused; null: no limit."""
    sequences: Literal["concat", "individual"] = "concat"
    """concat: turns that extend one another become one sequence; individual: each turn becomes its own."""
    reward: str | None = None
    """Dotted path of the reward function: (completion, data) -> number or named numbers, or TRL's (prompts,
    completions, **columns) -> list. An agent gives its own."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which a call of the reward function is stopped and the episode fails; no limit with
    launch.mode=inline."""
    reward_workers: int = Field(default=1, ge=1)
    """Number of processes that compute rewards; async rewards run without them."""
    n_samples: int = Field(default=8, ge=1)
    """Number of episodes in a group, all of the same prompt."""
    batch_groups: int = Field(default=16, ge=1)
    """Number of groups in a batch, which one step consumes."""
    max_lag: int = Field(default=0, ge=0)
    """Maximum number of versions that a token may be older than the trainer, also called max staleness or
    off-policyness; 0: synchronous."""
    late: Literal["wait", "train"] = "wait"
    """Treatment of a running group that would exceed max_lag: the batch waits for it, or it is trained on later."""
    drop_equal_rewards: bool = False
    """Reject groups whose rewards are all equal, and make others in their place (DAPO's dynamic sampling)."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """Share of failed episodes above which the run stops. If all fail, it stops within about a batch. The closer the
    share is to this limit, the more episodes are counted first, so that chance does not stop a healthy run."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which an episode is cancelled and fails."""


class Reward(Section):
    """Settings for changing rewards before they are trained on."""

    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn: a return is the turn's reward plus this multiple of the next return."""


class Sampling(Section):
    """Settings for drawing tokens."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in a response."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Number of tokens before which a response cannot end."""
    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0: take the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the fewest likeliest tokens with this probability in total."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many of the likeliest tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw from tokens with at least this share of the likeliest's probability."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response."""
    stop_token_ids: list[int] | None = None
    """Token IDs that end a response; null: the end tokens of tokenizer and model."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens ({self.min_new_tokens}) is above sampling.max_new_tokens "
                f"({self.max_new_tokens})"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that the configuration depends on; all others are in the engine's file."""

    cuts: frozenset[str] = frozenset()
    """Sampling options with which it reports logprobs of the truncated distribution, not the policy's."""
    masks_by: str = ""
    """Server option to report which tokens top_p, top_k and min_p kept; requests without top_k are then refused."""
    adapters_by: str = ""
    """Server option with which it adds LoRA adapters itself, on one device; on unless set to false. "": it cannot."""
    takes_checksums: bool = False
    """True if the trainer computes the engine's own checksums of the weights that it broadcasts."""


# They are not in the engines' files, which need an HTTP client: an installation that only reads records has none.
ENGINES = {
    "embedded": EngineFacts(),
    "vllm": EngineFacts(
        cuts=frozenset({"top_p", "top_k", "min_p", "min_new_tokens"}),
        masks_by="return-sampling-mask",
        adapters_by="enable-lora",
    ),
    "sglang": EngineFacts(cuts=frozenset({"min_new_tokens"}), takes_checksums=True),
}

SHARED_BY = ("tp-size", "tensor-parallel-size")
"""Servers' options for the number of devices that share the model. vLLM has only the last, SGLang both."""


class Inference(Section):
    """The inference engine and its server."""

    backend: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine that generates: Clew's own, or a vLLM or SGLang server that `clew serve` starts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the vLLM or SGLang server as on its command line, such as {max-num-batched-tokens: 4096}; true: an
    option without a value."""
    python: str | None = None
    """Python in which vLLM or SGLang is installed; null: the one that runs Clew."""
    listen: str = "127.0.0.1:0"
    """host:port of `clew serve`; port 0: any free one."""
    max_running: int = Field(default=128, ge=1)
    """Maximum number of sequences generated at the same time; further requests wait."""
    cache_gib: float = Field(default=1.0, gt=0)
    """GiB of memory for keys and values; requests wait when it is full."""
    on_update: Literal["continue", "restart", "wait"] = "continue"
    """Handling of generations in flight when new weights arrive: continue under the new weights, restart from the
    prompt, or let the update wait until they have ended."""
    weights: str | None = None
    """Folder for weights on their way to inference, such as /dev/shm/NAME; null: the run directory."""

    @property
    def options(self) -> dict[str, Any]:
        """Return `args` as the server's command line spells them: max-num-seqs for --max_num_seqs."""
        return {name.lstrip("-").replace("_", "-"): value for name, value in self.args.items()}

    @property
    def shares(self) -> Any:
        """Return the number of devices, and so of workers, that share the model in each server, as `args` gives it."""
        return next((self.options[name] for name in SHARED_BY if name in self.options), 1)


class Weights(Section):
    """Transport of new weights from the trainer to inference servers."""

    via: Literal["disk", "collective"] = "disk"
    """Weights go through a folder that both can read (inference.weights), or rank 0 of the trainer broadcasts them to
    the servers (over gloo, and over NCCL on GPUs)."""


class Training(Section):
    """The optimizer (AdamW) and the shape of a step."""

    steps: int = Field(default=100, ge=1)
    """Number of steps of the whole run."""
    batch_size: int = Field(default=32, ge=1)
    """Number of demonstrations in a step of `clew sft`; RL uses rollout.batch_groups."""
    objective: Literal["sft", "dpo", "reward_model"] = "sft"
    """Loss of `clew sft`: cross-entropy, or for preferences DPO's (arXiv 2305.18290) or Bradley and Terry's (arXiv
    2203.02155, equation 1)."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Rank of the low-rank adapters to train in all linear layers (arXiv 2106.09685); null: train all weights."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Adapters are scaled by lora_alpha / lora_rank; null: by 2."""
    lr: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall to 0 just after the last update."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer updates over which the learning rate rises to lr, in equal steps."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's decoupled weight decay, for tensors of two or more dimensions: not for norms and biases, unless a mixture
    of experts stacks the biases of its experts."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum global norm of the gradient; larger ones are scaled down to it."""
    on_bad_gradient: Literal["stop", "skip"] = "stop"
    """Reaction to an update with NaN, infinity or a spike: stop the run, or skip the update."""
    spike_factor: float | None = Field(default=None, gt=1)
    """Gradient norms above this multiple of the median of the last 8 to 32 updates count as spikes; null: off."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Number of tokens that a rank computes at a time; padding counts if the architecture cannot pack rows."""
    tp: int = Field(default=1, ge=1)
    """Number of ranks that compute the same tokens, each with its share of every block (tensor parallelism, arXiv
    1909.08053)."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass, which saves memory and costs time."""
    deterministic: bool = False
    """Use CUDA kernels that give the same bits each time; the CPU's always do."""


class Reject(Section):
    """Bounds outside which tokens, or whole sequences, add nothing to the loss."""

    by: Literal["ratio", "k3"]
    """Value to bound: proximal over behaviour probability w, or the k3 estimate of their divergence, w - log w - 1."""
    over: Literal["token", "sequence_mean", "sequence_product", "sequence_max"]
    """token: reject single tokens; sequence_mean, sequence_product, sequence_max: reject whole sequences by the mean
    (geometric for ratios), product or maximum over their trained tokens."""
    low: float | None = Field(default=None, gt=0)
    """Reject below this value; null: no lower bound."""
    high: float | None = Field(default=None, gt=0)
    """Reject above this value; null: no upper bound."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Reject:
        if self.low is None and self.high is None:
            raise ValueError(
                "algorithm.reject.low and algorithm.reject.high are both null, so nothing would be rejected. Set at "
                "least one, or algorithm.reject=null"
            )
        if self.low is not None and self.by == "k3":
            raise ValueError(
                f"algorithm.reject.low ({self.low:g}) with algorithm.reject.by=k3 would reject what agrees best: k3 is "
                f"0 where the probabilities are equal, and never negative. Unset it, and use high"
            )
        if self.by == "k3" and self.over == "sequence_product":
            raise ValueError(
                "algorithm.reject.over=sequence_product with algorithm.reject.by=k3 would multiply divergences, which "
                "says nothing. Use algorithm.reject.by=ratio, or over=sequence_mean"
            )
        if self.low is not None and self.over == "sequence_max":
            raise ValueError(
                f"algorithm.reject.low ({self.low:g}) cannot bound the largest ratio of a sequence. Use algorithm.veto "
                f"to reject sequences with a ratio below {self.low:g}, or algorithm.reject.over=token"
            )
        bounds = {name: value for name in ("low", "high") if (value := getattr(self, name)) is not None}
        if self.by == "ratio" and not bounds.get("low", 0) < 1 < bounds.get("high", 2):
            said = " and ".join(f"algorithm.reject.{name} ({value:g})" for name, value in bounds.items())
            raise ValueError(
                f"{said} would reject a ratio of 1, which every token has without lag and mismatch. Use low < 1 < high"
            )
        return self


class Algorithm(Section):
    """The objective of training: by default GRPO with the decoupled objective of AReaL (arXiv 2505.24298).

    docs/algorithms.md has the formulas.
    """

    preset: Preset | str | None = None
    """Published algorithm, or dotted path of your own module with any of OPTIONS, advantages and loss; it sets the
    options that the configuration leaves out; null: none."""
    minibatches: int = Field(default=1, ge=1)
    """Number of optimizer updates in a step, each on its share of the groups."""
    advantages: str = "group"
    """group (GRPO), group_mean_batch_std (Lite PPO, arXiv 2508.08221), batch (REINFORCE++, arXiv 2501.03262), mean (Dr.
    GRPO, arXiv 2503.20783), leave_one_out (RLOO, arXiv 2402.14740), leave_one_out_std (the same, divided by the group's
    deviation), gae (PPO: per token, with a critic), none, or the dotted path of a function: (sequences) -> for each
    sequence a number, or one per token; or, with a critic, (rewards, values, options) -> advantages and returns of each
    sequence's trained tokens."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards per token, for gae (arXiv 1506.02438)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of gae: 1 trusts only the rewards, 0 the critic's next value (arXiv 1506.02438, equation 16)."""
    critic: str | None = None
    """Folder or hub name of the model that the critic starts from, for gae, such as a reward model (arXiv 2203.02155);
    null: model.path."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic, for gae; null: training.lr."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip range of the critic's values: moving a value further than this within a step gains nothing, for gae (PPO's
    code, arXiv 2005.12729); null: no limit."""
    bootstrap_truncated: bool = False
    """Bootstrap episodes that were cut off at a limit (with a critic): add the critic's value of the last state, as
    AReaL does; false: 0."""
    overlong_penalty: int | None = Field(default=None, ge=1)
    """Number of tokens before a response's limit within which a penalty rises from 0 to 1 (DAPO, arXiv 2503.14476,
    equation 13); null: no penalty."""
    overlong_filter: bool = False
    """Leave sequences that were cut off at a limit out of the loss (arXiv 2503.14476)."""
    loss: str = "clip"
    """clip (PPO, arXiv 1707.06347), cispo (MiniMax-M1, arXiv 2506.13585), or the dotted path of a function of named
    tensors."""
    ratio: Literal["token", "sequence"] = "token"
    """Current over proximal probability: per token, or the geometric mean over the sequence (GSPO, arXiv
    2507.18071)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages (arXiv 1912.09729); null: no bound."""
    importance: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Weight of a token, or of a whole sequence: the ratio of proximal to behaviour probability, truncated to
    importance_cap, or set to 0 outside [1/cap, cap] (IcePop, MIS)."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Limit of proximal over behaviour probability; see importance."""
    reject: Reject | None = None
    """Tokens or sequences to leave out of the loss because their proximal and behaviour probabilities are too far
    apart; null: none."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Leave a whole sequence out of the loss if one of its tokens has a ratio of proximal to behaviour probability
    below this, such as 1e-4; null: off."""
    off_policy_delta: float | None = Field(default=None, gt=0)
    """Leave tokens with a negative advantage out of the loss if the mean of log(behaviour / current probability) over
    their sequence is above this (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); null: off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the run's first model (the reference model); for dpo its beta, 0.1 if unset."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (Schulman, joschu.net/blog/kl-approx.html). k1 belongs in the reward: in the loss
    its gradient is 0 on average, unless kl_times_ratio is set."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to each token's loss, or subtract it from the reward: its sum over the sequence, or with a critic
    each token's term from that token's reward."""
    kl_times_ratio: bool = False
    """Multiply the KL term of the loss by current over proximal probability (DeepSeek-V3.2, arXiv 2512.02556, section
    3.1)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus: this multiple of each token's entropy, in nats, is subtracted from its loss (arXiv
    1707.06347, equation 9)."""
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of a mini-batch (DAPO); within sequences, then over them (GRPO); or the sum over a sequence
    divided by loss_constant, then the mean over sequences (Dr. GRPO)."""
    loss_constant: int | None = Field(default=None, ge=1)
    """Number of tokens that loss_mean=constant divides by; null: sampling.max_new_tokens."""

    @model_validator(mode="after")
    def _options_agree(self) -> Algorithm:
        own_code = {"preset": (PRESETS, "module"), "advantages": (ADVANTAGES, "function"), "loss": (LOSSES, "function")}
        for field, (built_in, kind) in own_code.items():
            value = getattr(self, field)
            if value is not None and value not in built_in and "." not in value:
                raise ValueError(
                    f"algorithm.{field} is {value!r}; expected {', '.join(built_in)}, or the dotted path of your own "
                    f"{kind}, such as my_project.{value or 'name'}. Did you mean {nearest(value, built_in)!r}?"
                )
        for field in ("critic", "critic_lr", "bootstrap_truncated"):
            # A user's own advantages are checked once they are loaded: `clew.config.check_critic_fields`.
            without = self.advantages in ADVANTAGES and self.advantages not in WITH_CRITIC
            if without and getattr(self, field) not in (None, False):
                raise ValueError(
                    f"algorithm.{field} is for the critic, and algorithm.advantages={self.advantages} has no critic. "
                    f"Unset it, or use algorithm.advantages=gae"
                )
        if self.loss == "cispo" and self.dual_clip is not None:
            raise ValueError("algorithm.dual_clip bounds the clipped objective, but algorithm.loss is cispo. Unset it")
        if self.kl_times_ratio and self.kl_in == "reward":
            raise ValueError(
                "algorithm.kl_times_ratio is for a KL term in the loss, but algorithm.kl_in is reward. Unset one"
            )
        if self.importance.endswith("mask") and self.importance_cap <= 1:
            raise ValueError(
                f"algorithm.importance_cap ({self.importance_cap:g}) with algorithm.importance={self.importance} would "
                f"mask every token: only weights between 1/cap and cap are kept. Use more than 1"
            )
        return self


class Eval(Section):
    """Evaluation on held-out prompts. All episodes of one evaluation use the same version of the weights."""

    path: str | None = None
    """Held-out rows, given like data.path: prompts, or demonstrations for `clew sft`; null: none."""
    every_steps: int = Field(default=10, ge=1)
    """Number N of steps between evaluations: versions 0, N, 2N, ... and the last are evaluated."""
    n_samples: int = Field(default=1, ge=1)
    """Number n of episodes per prompt, for pass@1, pass@2, pass@4, ... up to pass@n."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: take the likeliest token."""
    pass_above: float = Field(default=0.5, allow_inf_nan=False)
    """An episode passes (pass@k) if its total reward is above this. With the default, 1 passes and 0 does not."""


class Checkpoint(Section):
    """Checkpoints, from which a killed run restarts."""

    every_steps: int = Field(default=20, ge=1)
    """Number of steps between checkpoints; a resumed run replays those since the last."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, besides the first."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation (pass@1, then reward) as well, as checkpoints/best."""


class Record(Section):
    """The run directory."""

    keep_steps: int | None = Field(default=None, ge=1)
    """Number of newest steps whose data is kept; null: all."""


class Debug(Section):
    """Training on recorded batches without rollout, and portable copies of batches."""

    dump_rollout_data: bool = False
    """Copy the batch of each step to debug.path."""
    replay_rollout_data: bool = False
    """Train on the batches in debug.path, without rollout and inference."""
    path: str | None = None
    """Folder of dumped batches; for replay_rollout_data also a run directory."""
    format: Literal["parquet", "pt"] = "parquet"
    """Format of dumped batches: the record's own, or padded tensors for torch.load."""
    first_step: int = Field(default=0, ge=0)
    """Step to replay from. The run starts with the state, such as weights and optimizer, that the run in debug.path had
    before that step."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Debug:
        if self.dump_rollout_data and self.replay_rollout_data:
            raise ValueError(
                "debug.dump_rollout_data and debug.replay_rollout_data are both set: a run either makes its own "
                "batches or replays others. Unset one"
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
                f"debug.format={self.format} needs debug.dump_rollout_data=true. Set it, or leave both out: batches to "
                f"replay state their own format"
            )
        if self.first_step and not self.replay_rollout_data:
            raise ValueError("debug.first_step needs debug.replay_rollout_data=true. Set it, or leave both out")
        return self


class Launch(Section):
    """The processes of a run, and how they share the machine."""

    mode: Literal["local", "inline"] = "local"
    """local: one process per role; inline: one process in all, with user code on its main thread and no time limits."""
    devices: str | None = None
    """Devices for inference and training in AReaL's notation (its allocation_mode): sglang.d4t1 only starts 4 servers,
    d4t1 only trains on 4 devices, sglang.d4t1+d4t1 does both; null: one server, and launch.ranks."""
    ranks: int = Field(default=1, ge=1)
    """Number of processes that train together, each with a slice of the model (FSDP2)."""
    colocate: bool = False
    """Let training and inference take turns on one device: while a step is trained, inference stops and frees its
    cache's memory."""
    restarts: int = Field(default=3, ge=0)
    """Maximum number of times that each server or rollout process is started again after it was killed."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads in each process; null: one per core, or half of that if server and trainer compute side
    by side, divided among the trainer's ranks."""

    @model_validator(mode="after")
    def _ranks_are_processes(self) -> Launch:
        if self.mode == "inline" and self.ranks > 1:
            raise ValueError(
                f"launch.ranks is {self.ranks}, but launch.mode=inline is one process. Use launch.mode=local, or "
                f"launch.ranks=1"
            )
        return self


class Hang(Section):
    """Reaction of `clew train` to a run that makes no progress."""

    after_s: float | None = Field(default=300.0, gt=0)
    """Seconds without progress after which `clew hang` looks for the reason, or twice the longest pause so far if that
    is more; null: never."""
    action: Literal["warn", "abort", "restart"] = "warn"
    """Once a hang is diagnosed: warn, end the run, or start its processes again from the last step (at most
    launch.restarts times)."""


OTHER_TRAINERS_NAMES = {
    "beta": "algorithm.kl_coef",
    "delta": "algorithm.dual_clip",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "grad_clip": "training.max_grad_norm",
    "max_completion_length": "sampling.max_new_tokens",
    "max_staleness": "rollout.max_lag",
    "num_generations": "rollout.n_samples",
    "rollout_is": "algorithm.importance",
    "rollout_is_threshold": "algorithm.importance_cap",
    "rollout_rs": "algorithm.reject",
    "rollout_rs_threshold": "algorithm.reject.high",
    "tis_clip": "algorithm.importance_cap",
}
"""Clew's field for each name that TRL, verl, slime or AReaL uses, where the two names are not similar."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the valid name most like `name`, or the field that another trainer calls `name` (`OTHER_TRAINERS_NAMES`).

    The last part counts most: `rollout.lr` means `training.lr`. Initials count, too: `learning_rate` means `lr`.
    """
    names, last = list(names), name.rsplit(".", 1)[-1]
    foreign = difflib.get_close_matches(last, OTHER_TRAINERS_NAMES, n=1, cutoff=0.85)
    if foreign and OTHER_TRAINERS_NAMES[foreign[0]] in names:
        return OTHER_TRAINERS_NAMES[foreign[0]]
    initials = "".join(word[:1] for word in last.split("_"))

    def likeness(candidate: str) -> float:
        own = candidate.rsplit(".", 1)[-1]
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        return max(whole, 0.95 * difflib.SequenceMatcher(None, last, own).ratio(), 0.75 * (own == initials))

    return max(names, key=likeness)
