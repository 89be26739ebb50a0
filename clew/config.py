"""The typed configuration: one YAML file plus `key=value` overrides. It does not import torch.

OmegaConf merges and resolves `${...}`; pydantic checks types and ranges. An unknown field, or a contradiction, is an
error at once. It names the file and line (or the override) and, for an unknown field, the nearest valid name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from clew.algorithms import ADVANTAGES, PRESETS, WITH_CRITIC, WITHIN_GROUP, preset_options
from clew.config_fields import (
    ENGINES,
    SHARED_BY,
    Algorithm,
    Checkpoint,
    Data,
    Debug,
    Eval,
    Hang,
    Inference,
    Launch,
    Model,
    Record,
    Reward,
    Rollout,
    Sampling,
    Section,
    Training,
    Weights,
    nearest,
)
from clew.devices import TRAINING, Devices, Part, parse_devices
from clew.errors import ConfigError, RecordError
from clew.printing import visible
from clew.processes import cores
from clew.reading import check_yaml, read_text, wrong_field

DPO_BETA = 0.1
"""Default of algorithm.kl_coef for training.objective=dpo: the paper's beta."""

REPLICAS = ("data-parallel-size", "dp-size")
"""Options of vLLM and SGLang that make several replicas in one server."""

PIPELINES = ("pipeline-parallel-size", "pp-size")
"""Options of vLLM and SGLang that split the layers over workers."""

SERVERS_VARIABLE = "CLEW_LLM_SERVER_ADDRS"
SERVERS_ALIAS = "AREAL_LLM_SERVER_ADDRS"
"""AReaL's name for the same variable. It is read if Clew's is not set."""
TOKEN_VARIABLE = "CLEW_LLM_SERVER_TOKEN"


class Config(Section):
    """Settings of a run. A command ignores the sections that it does not need."""

    experiment: str = Field(pattern=r"^[\w-][\w.-]*$")
    """Name of the experiment. The run directory is ROOT/EXPERIMENT/TRIAL."""
    trial: str = Field(default="0", pattern=r"^[\w-][\w.-]*$")
    """Name of this run within the experiment: the last part of the run directory."""
    root: str = "runs"
    """Folder that holds the run directories."""
    seed: int = Field(default=1, ge=0)
    """Seed of the run; all other seeds derive from it and from IDs."""
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    inference: Inference = Inference()
    weights: Weights = Weights()
    training: Training = Training()
    algorithm: Algorithm = Algorithm()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    record: Record = Record()
    debug: Debug = Debug()
    launch: Launch = Launch()
    hang: Hang = Hang()

    @model_validator(mode="before")
    @classmethod
    def _resolve_algorithm(cls, values: Any) -> Any:
        """Fill in what the user left open: the preset's fields, the constant of the loss, and the KL weight of DPO."""
        algorithm = _section(values, "algorithm")
        # A run's config.yaml has all fields, so a user's preset module is not imported: it may be gone by now.
        if algorithm.get("preset") in PRESETS or not _spells_out_all_fields(algorithm):
            for name, value in _preset_values(values).items():
                section, field = name.split(".")
                if field not in _section(values, section):
                    values = _with(values, name, value)
        algorithm = _section(values, "algorithm")
        if algorithm.get("loss_mean") == "constant" and algorithm.get("loss_constant") is None:
            values = _with(values, "algorithm.loss_constant", _max_new_tokens(values))
        if _section(values, "training").get("objective") == "dpo" and "kl_coef" not in algorithm:
            values = _with(values, "algorithm.kl_coef", DPO_BETA)
        return values

    @model_validator(mode="before")
    @classmethod
    def _resolve_devices(cls, values: Any) -> Any:
        """Set the fields that launch.devices implies: engine, ranks and tensor parallelism."""
        text = _section(values, "launch").get("devices")
        if not isinstance(text, str):
            return values
        devices = parse_devices(text)
        implied: dict[str, Any] = {}
        if devices.inference is not None:
            implied["inference.backend"] = devices.inference.name
            args = _section(values, "inference").get("args") or {}
            if devices.inference.t > 1 and isinstance(args, Mapping):
                values = _with(values, "inference.args", {SHARED_BY[-1]: devices.inference.t, **args})
        if devices.training is not None:
            implied |= {"launch.ranks": devices.training.size, "training.tp": devices.training.t}
        for name, value in implied.items():
            section, field = name.split(".")
            given = _section(values, section).get(field, value)
            if str(given) != str(value):  # ${oc.env:NAME} gives text
                raise ValueError(f"launch.devices={text} says {name}={value}, and {name} is {given}. Unset one of them")
            values = _with(values, name, value)
        return values

    @model_validator(mode="after")
    def _devices_agree(self) -> Config:
        devices = self.devices
        if self.launch.devices is None:
            return self
        if field := self._shares_device():
            raise ValueError(f"launch.devices gives processes their own devices, and {field} shares one. Unset one")
        engine = devices.inference
        if engine is not None and engine.name == "embedded" and engine.t > 1:
            raise ValueError(
                f"launch.devices={self.launch.devices}: the embedded engine computes on one device. Use t1, or vllm or "
                f"sglang"
            )
        if engine is not None and (given := self.inference.shares) != engine.t:
            raise ValueError(
                f"launch.devices={self.launch.devices} says {SHARED_BY[-1]}={engine.t}, and inference.args has "
                f"{given}. Unset one of them"
            )
        return self

    @model_validator(mode="after")
    def _rollout_agrees(self) -> Config:
        rollout = self.rollout
        penalty, limit = self.algorithm.overlong_penalty, self.sampling.max_new_tokens
        if penalty is not None and penalty > limit:
            raise ValueError(
                f"algorithm.overlong_penalty ({penalty}) is above sampling.max_new_tokens ({limit}): every response "
                f"would count as overlong. Use at most {limit}"
            )
        if rollout.agent is not None and rollout.workflow != Rollout.model_fields["workflow"].default:
            raise ValueError(
                f"rollout.agent ({rollout.agent}) and rollout.workflow ({rollout.workflow}) are both set: an episode "
                f"runs only one of them. Unset the other"
            )
        if rollout.n_samples < 2 and self.algorithm.advantages in WITHIN_GROUP:
            raise ValueError(
                f"rollout.n_samples is 1, and algorithm.advantages={self.algorithm.advantages} compares the episodes "
                f"of a group with one another. Use at least 2, or algorithm.advantages=batch, gae or none"
            )
        if rollout.n_samples < 2 and rollout.drop_equal_rewards:
            raise ValueError(
                "rollout.drop_equal_rewards rejects groups whose rewards are all equal, and with rollout.n_samples=1 "
                "every group's are. Use at least 2, or unset it"
            )
        for name in ("max_turns", "max_episode_tokens"):
            if rollout.agent is None and getattr(rollout, name) is not None:
                raise ValueError(f"rollout.{name} limits an agent's requests, and rollout.agent is not set. Unset it")
        return self

    @model_validator(mode="after")
    def _training_agrees(self) -> Config:
        if self.algorithm.advantages in WITH_CRITIC and self.reward.turn_discount != 1:
            raise ValueError(
                f"reward.turn_discount ({self.reward.turn_discount:g}) discounts whole turns, and algorithm.advantages="
                f"gae discounts tokens. Use algorithm.gamma instead"
            )
        if self.training.objective == "dpo" and self.algorithm.kl_coef == 0:
            raise ValueError(
                "algorithm.kl_coef is 0, and it is the beta of training.objective=dpo: nothing would be learned. Use "
                "more than 0, or unset it for 0.1"
            )
        if self.training.objective != "sft" and self.eval.path is not None:
            raise ValueError(
                f"eval.path names held-out rows, and training.objective={self.training.objective} has no held-out loss "
                f"yet. Unset it"
            )
        if self.training.objective == "reward_model" and self.training.lora_rank is not None:
            raise ValueError(
                "training.lora_rank freezes all but the adapters of a language model, and training.objective="
                "reward_model has a new head to train. Unset it"
            )
        if self.launch.ranks % self.training.tp:
            raise ValueError(
                f"training.tp is {self.training.tp}, which does not divide launch.ranks ({self.launch.ranks}): the "
                f"ranks work in groups of this size. Use a multiple of it for launch.ranks, or training.tp="
                f"{math.gcd(self.training.tp, self.launch.ranks)}"
            )
        if self.training.tp > 1 and self.training.lora_rank is not None:
            raise ValueError(
                "training.lora_rank adds adapters to whole layers, and training.tp splits layers. Use training.tp=1: "
                "FSDP2 spreads the frozen model over launch.ranks in any case"
            )
        if self.training.lora_alpha is not None and self.training.lora_rank is None:
            raise ValueError(
                "training.lora_alpha scales adapters, and there are none without training.lora_rank. Unset it"
            )
        if self.algorithm.minibatches > self.rollout.batch_groups:
            raise ValueError(
                f"algorithm.minibatches ({self.algorithm.minibatches}) is above rollout.batch_groups "
                f"({self.rollout.batch_groups}): a mini-batch needs at least one group"
            )
        return self

    @model_validator(mode="after")
    def _engine_agrees_with_launch(self) -> Config:
        backend = self.inference.backend
        if backend != "embedded" and (field := self._shares_device()):
            raise ValueError(
                f"{field} needs the engine inside Clew's own processes, and inference.backend is "
                f"{backend}. Use launch.mode=local without launch.colocate, or "
                f"inference.backend=embedded"
            )
        if self.inference.on_update == "wait" and self.launch.colocate:
            raise ValueError(
                "launch.colocate interrupts generation whenever the trainer takes the device, and "
                "inference.on_update=wait asks that it is never interrupted. Use continue or restart, or unset "
                "launch.colocate"
            )
        if self.weights.via == "collective" and (self.launch.mode == "inline" or self.training.lora_rank):
            field = "launch.mode=inline" if self.launch.mode == "inline" else "training.lora_rank"
            raise ValueError(
                f"weights.via=collective sends all weights of a model to servers, and {field} is set. Use "
                f"weights.via=disk"
            )
        if self.weights.via == "collective" and self.inference.on_update == "wait" and backend != "embedded":
            raise ValueError(
                "weights.via=collective needs all servers at once, and with inference.on_update=wait each joins when "
                "its last generation has ended. Use continue or restart, or weights.via=disk"
            )
        several = [name for name in (*REPLICAS, *PIPELINES) if self.inference.options.get(name, 1) != 1]
        if several and several[0] in REPLICAS:
            raise ValueError(
                f"inference.args.{several[0]} makes several replicas in one server, which answers for only one of them "
                f"when its weights are checked. Start as many servers instead: launch.devices={backend}.dN+dM"
            )
        if several and self.weights.via == "collective":
            raise ValueError(
                f"weights.via=collective reaches the workers of tensor parallelism only, and "
                f"inference.args.{several[0]} adds others. Use weights.via=disk"
            )
        if backend == "embedded" and self.inference.args:
            raise ValueError(
                f"inference.args ({', '.join(self.inference.args)}) are options of vLLM or SGLang, and "
                f"inference.backend is embedded. Unset them, or set inference.backend"
            )
        return self

    @model_validator(mode="after")
    def _engine_agrees_with_sampling(self) -> Config:
        """Refuse sampling options with which the engine reports logprobs of the cut distribution, not the policy's."""
        backend = self.inference.backend
        cuts, masks_by = set(ENGINES[backend].cuts), ENGINES[backend].masks_by
        if self.inference.options.get(masks_by):
            cuts &= {"min_new_tokens"}
            if self.sampling.top_k == 0 or self.sampling.temperature == 0:
                raise ValueError(
                    f"inference.args.{masks_by} needs sampling.top_k and sampling.temperature "
                    f"above 0: {backend} then refuses requests in which one is 0. Set both"
                )
        if wrong := self.sampling.model_dump(include=cuts, exclude_defaults=True):
            masks = f", or inference.args.{masks_by}=true (on GPUs)" if masks_by else ""
            raise ValueError(
                f"sampling.{next(iter(wrong))} cuts the distribution, and inference.backend={backend} reports logprobs "
                f"after the cut: nothing could be trained on. Unset it, or set inference.backend=embedded{masks}"
            )
        return self

    def _shares_device(self) -> str:
        """Return the field by which the engine and the trainer share one device; "" if they do not."""
        if self.launch.mode == "inline":
            return "launch.mode=inline"
        return "launch.colocate" if self.launch.colocate else ""

    @property
    def run_path(self) -> Path:
        """Return the run directory, ROOT/EXPERIMENT/TRIAL."""
        return Path(self.root) / self.experiment / self.trial

    @property
    def sends_adapters(self) -> bool:
        """True if only adapters are sent to inference servers. Otherwise all weights are, with adapters merged in."""
        option = ENGINES[self.inference.backend].adapters_by
        adapts = option != "" and self.inference.options.get(option) is not False and self.inference.shares == 1
        return self.training.lora_rank is not None and adapts

    @property
    def devices(self) -> Devices:
        """Return the parsed launch.devices. If it is not set, return one server and launch.ranks ranks."""
        if self.launch.devices is not None:
            return parse_devices(self.launch.devices)
        ranks, tp = self.launch.ranks, self.training.tp
        return Devices(
            inference=Part(name=self.inference.backend, d=1, t=1), training=Part(name=TRAINING, d=ranks // tp, t=tp)
        )

    @property
    def threads(self) -> int:
        """Return the number of torch's threads in each process.

        This is launch.threads, if it is set. Otherwise it is one per core if trainer and server take turns, and half as
        many if they compute side by side (launch.mode=local with rollout.max_lag above 0, without launch.colocate).
        With launch.devices, all servers and groups of ranks get an equal share of the cores.
        """
        if self.launch.threads is not None:
            return self.launch.threads
        if self.launch.devices is not None:
            return max(1, cores() // sum(part.d for part in (self.devices.inference, self.devices.training) if part))
        side_by_side = self.launch.mode == "local" and self.rollout.max_lag > 0 and not self.launch.colocate
        return max(1, cores() // 2) if side_by_side else cores()

    def evaluates(self, version: int) -> bool:
        """Return True for versions to evaluate: the last, and each multiple of eval.every_steps."""
        asked = version % self.eval.every_steps == 0 or version == self.training.steps
        return self.eval.path is not None and asked

    @property
    def rank_threads(self) -> int:
        """Return the number of torch's threads in each trainer rank: launch.threads, or else its share of `threads`."""
        training = self.devices.training
        # With launch.devices, `threads` is already the share of one group of ranks.
        ranks = training.t if self.launch.devices is not None and training is not None else self.launch.ranks
        return self.launch.threads or max(1, self.threads // ranks)


def check_critic_fields(config: Config, *, with_critic: bool) -> None:
    """Raise ConfigError if the critic's fields do not fit a user's own advantages. `Config` checks built-in ones."""
    algorithm = config.algorithm
    if algorithm.advantages in ADVANTAGES:
        return
    if with_critic:
        if config.reward.turn_discount != 1:
            raise ConfigError(
                f"reward.turn_discount ({config.reward.turn_discount:g}) discounts whole turns, and algorithm."
                f"advantages={algorithm.advantages} gets the rewards of tokens. "
                f"Apply options.gamma in that function instead"
            )
        return
    for field in ("critic", "critic_lr", "bootstrap_truncated"):
        if getattr(algorithm, field) not in (None, False):
            raise ConfigError(
                f"algorithm.{field} is for the critic, and algorithm.advantages={algorithm.advantages} has no critic. "
                f"Unset it, or give that function the parameters (rewards, values, options)"
            )


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `key=value` overrides, resolve `${...}` and check the result. Raises ConfigError."""
    path = Path(path)
    try:
        text = read_text(path, "check the path: a YAML file is expected")
    except RecordError as error:
        raise ConfigError(str(error)) from None
    return parse(text, path, overrides)


def parse(text: str, path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML text, as `load` does for a file. `path` is for error messages."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = _merged(text)
        if not OmegaConf.is_dict(merged):
            found = type(OmegaConf.to_container(merged)).__name__
            raise ConfigError(f"{path}: expected sections such as model: and data:, found {found}.")
        changes = [change for override in overrides for change in _changes_by(override)]
        if any("preset" in _section(change, "algorithm") for change in changes):
            _forget_preset(merged)
        values = OmegaConf.to_container(OmegaConf.merge(merged, *changes), resolve=True)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        begins = f" in line {error.context_mark.line + 1}" if error.context_mark else ""
        context = f" ({error.context}{begins})" if error.context else ""
        raise ConfigError(f"{path}{line}: this is not YAML: {error.problem}{context}.") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:500]}") from None
    return checked(values, path, text, overrides)


def _changes_by(override: str) -> list[dict[str, Any]]:
    """Return what to merge for a `key=value` override. A mapping replaces the field that it is given for."""
    values, name = _values_of(override), override.partition("=")[0]
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    is_field = "." in name  # a section keeps the fields that are not named
    return [_values_of(f"{name}=null"), values] if is_field and isinstance(value, Mapping) else [values]


def _values_of(override: str) -> dict[str, Any]:
    """Return the sections and fields that a `key=value` override sets. Raises ConfigError if it cannot be read."""
    import yaml
    from omegaconf import OmegaConf

    name, _, text = override.partition("=")
    if "=" not in override or not all(name.split(".")):
        raise ConfigError(f"override {override!r}: expected key=value, for example training.steps=100.")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {getattr(error, 'problem', None) or error}.") from None
    if name in ("experiment", "trial") and not isinstance(values[name], str):
        return {name: text}  # in a name, 010 stays text
    return values


def checked(values: Any, path: Path, text: str = "", overrides: Sequence[str] = ()) -> Config:
    """Return values as a configuration. Raises ConfigError, whose message uses the other arguments."""
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
    except (AssertionError, AttributeError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"expected sections with plain values ({type(error).__name__}: {error})") from None


def _with(values: Any, name: str, value: Any) -> dict[str, Any]:
    """Return the unchecked values with one field set, by its dotted name."""
    section, field = name.split(".")
    if not isinstance(values.get(section) or {}, Mapping):
        return values  # pydantic reports the section later
    return {**values, section: {**_section(values, section), field: value}}


def _section(values: Any, name: str) -> dict[str, Any]:
    """Return a section before it is checked; empty if it is missing or not a mapping."""
    section = values.get(name) if isinstance(values, Mapping) else None
    return dict(section) if isinstance(section, Mapping) else {}


def _max_new_tokens(values: Any) -> int:
    """Return sampling.max_new_tokens, or its default if the value is missing or invalid."""
    section, name = _section(values, "sampling"), "max_new_tokens"
    given = {name: section[name]} if name in section else {}
    try:
        return Sampling.model_validate(given).max_new_tokens  # ${oc.env:NAME} gives text
    except ValidationError:
        return Sampling().max_new_tokens


def _preset_values(values: Any) -> dict[str, Any]:
    """Return the options that the chosen preset sets, by their dotted names; empty without a preset.

    Raises:
        ConfigError: The preset is a user's module that cannot be loaded, or sets a field that does not exist.
    """
    preset = _section(values, "algorithm").get("preset")
    if not isinstance(preset, str) or (preset not in PRESETS and "." not in preset):
        return {}
    options = preset_options(preset, max_new_tokens=_max_new_tokens(values))
    names = [name for name in field_names() if name.count(".") == 1]  # a preset sets algorithm.reject as a whole
    if unknown := [name for name in options if name not in names]:
        raise ConfigError(
            f"algorithm.preset={preset} sets {unknown[0]}, and there is no such field; did you mean "
            f"{nearest(unknown[0], names)!r}?"
        )
    return options


def _spells_out_all_fields(algorithm: Mapping[str, Any]) -> bool:
    """Return whether a section `algorithm` has all fields, as in a run's config.yaml."""
    return algorithm.keys() >= Algorithm.model_fields.keys()


def _forget_preset(values: Any) -> None:
    """Remove the fields of presets whose value is only the default or the old preset's value.

    Without this, another preset on the command line would have no effect on a file that spells out all fields, such as
    a run's config.yaml.
    """
    from omegaconf import OmegaConf

    written = OmegaConf.to_container(values, resolve=False)  # another override may replace an unknown ${...}
    try:
        chosen = _preset_values(written)
    except ConfigError:
        if _spells_out_all_fields(_section(written, "algorithm")):
            raise  # it is unknown which of these fields the old preset had set
        chosen = {}  # the user's module is gone; the new preset replaces it
    for name in {*chosen, *(field for preset in PRESETS for field in preset_options(preset))}:
        section, field = name.split(".")
        kind: Any = Config.model_fields[section].annotation
        default = kind.model_fields[field].get_default(call_default_factory=True)
        derived = _max_new_tokens(written) if field == "loss_constant" else default
        if _section(written, section).get(field, ...) in (chosen.get(name, default), derived):
            del values[section][field]


def preset_in_words(config: Config) -> str:
    """Return the options that the preset sets, as one line of text for people; empty without a preset."""
    chosen = _preset_values(config.model_dump())
    return ", ".join(
        f"{name}={value if isinstance(value, str) else str(value).lower()}" for name, value in chosen.items()
    )


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML; `load` reads it back."""
    content = _escaped(config.model_dump(mode="json"))
    text = as_yaml(content, allow_unicode=True)
    return text if visible(text) == text else as_yaml(content)  # this escapes all non-ASCII characters


def _escaped(value: Any) -> Any:
    """Return values with each `${` escaped, so that OmegaConf reads it as text and resolves nothing."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: _escaped(each) for name, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list) else value


def as_yaml(values: Mapping[str, Any], **options: Any) -> str:
    """Return values as YAML for `parse`. Text that OmegaConf takes for a number, such as the trial 1e-5, is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    number = re.compile(r"[-+]?\.?\d[\d_]*\.?[\d_]*([eE][-+]?\d+)?$")  # PyYAML itself takes 1e5 for text
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, **options)


def server_addresses() -> list[str]:
    """Return the host:port of each inference server in CLEW_LLM_SERVER_ADDRS (comma-separated), or in `SERVERS_ALIAS`.

    If both are empty, callers use the servers of the run directory.

    Raises:
        ConfigError: An address is not host:port, or is given twice.
    """
    name = SERVERS_VARIABLE if os.environ.get(SERVERS_VARIABLE, "").strip() else SERVERS_ALIAS
    addresses = [address.strip() for address in os.environ.get(name, "").split(",") if address.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ConfigError(f"{name} holds {address!r}, expected host:port, such as 127.0.0.1:20082.")
    servers = [f"127.0.0.1:{a.removeprefix('localhost:')}" if a.startswith("localhost:") else a for a in addresses]
    if twice := [address for address, server in zip(addresses, servers, strict=True) if servers.count(server) > 1]:
        raise ConfigError(f"{name} holds one server twice: {', '.join(twice)}. Name each server once.")
    return addresses


def server_token() -> str:
    """Return the token of the servers in CLEW_LLM_SERVER_ADDRS: the value of CLEW_LLM_SERVER_TOKEN, or an empty string.

    A server that is started with this variable set uses it, too.
    """
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def provider() -> tuple[str, str]:
    """Return the values of OPENAI_BASE_URL and OPENAI_API_KEY, each empty if it is not set."""
    return os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")


def field_names(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields. A section that may be null counts as a field, too."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        if not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            names.append(prefix + name)
        if (nested := nested_section(field)) is not None:
            names += field_names(nested, f"{prefix}{name}.")
    return names


def nested_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, or may hold instead of null; None if it holds a plain value."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _explain(problem: Any, path: Path, text: str, overrides: Sequence[str]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    # For a check across fields, pydantic names only a section, or nothing. But the message begins with the field.
    begins = re.split("[ =]", message, maxsplit=1)[0]
    where = _where(begins if not name or begins.startswith(f"{name}.") else name, path, text, overrides)
    if problem["type"] == "extra_forbidden":
        sections = [section for section in Config.model_fields if section not in field_names()]
        return f"{where}: there is no field {name!r}; did you mean {nearest(name, field_names() + sections)!r}?"
    if problem["type"] == "missing":
        return f"{where}: the field {name!r} is missing; it has no default."
    if name and message.startswith("Input should be "):
        message = wrong_field(problem)
    elif name and not message.startswith(f"{name}."):
        message = f"{name}: {message}"
        if not isinstance(problem["input"], (dict, BaseModel)):
            message += f", found {problem['input']!r}"
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        message += ". Put it in quotes"
    return f"{where}: {message}{'' if message.endswith('?') else '.'}"


def _where(name: str, path: Path, text: str, overrides: Sequence[str]) -> str:
    for override in reversed(overrides):
        key = override.split("=", 1)[0]
        if key == name or name.startswith(key + ".") or (name and key.startswith(name + ".")):
            return f"override {override}"
    line = _line_of(name, text)
    return f"{path}:{line}" if line else str(path)


def _line_of(name: str, text: str) -> int | None:
    """Return the line, from 1, of the deepest part of `name` that the YAML has; None if it has none."""
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
