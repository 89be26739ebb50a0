"""Configuration: merging, errors that name file, line and the nearest valid field."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew import config
from clew.algorithms import PRESETS, preset_options
from clew.config_fields import ENGINES, Inference, Reject
from clew.devices import assigned_gpus, gpus, parse_devices
from clew.dotted import only_trusted
from clew.errors import ConfigError
from clew.inference.detect_server import BACKENDS
from clew.reading import flat

GOOD = """\
experiment: sums
model:
  path: models/tiny
data:
  path: data/${experiment}.jsonl
training:
  lr: 3e-4
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_overrides_and_interpolation_are_resolved(good: Path) -> None:
    loaded = config.load(good, ["rollout.max_lag=2", "sampling.stop=['a','b']", "experiment=other"])
    assert loaded.data.path == "data/other.jsonl"
    assert loaded.rollout.max_lag == 2
    assert loaded.sampling.stop == ["a", "b"]
    assert loaded.training.lr == 3e-4
    assert loaded.run_path == Path("runs/other/0")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.reject={by: k3, over: token, high: 0.1}"],
        ["trial=1e-5", "experiment=0.5e3", "sampling.stop=['1e5']"],
        [r"sampling.stop=['\${x}','\\\\\${x}']"],
    ],
)
def test_what_is_dumped_loads_to_the_same(good: Path, tmp_path: Path, overrides: list[str]) -> None:
    loaded = config.load(good, overrides)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(loaded))
    assert config.load(again) == loaded


def test_a_section_that_may_be_null_is_set_and_unset_like_a_field(good: Path) -> None:
    assert config.load(good).algorithm.reject is None
    fields = ["algorithm.reject.by=ratio", "algorithm.reject.over=token", "algorithm.reject.high=3"]
    good.write_text(config.dump(config.load(good)))
    loaded = config.load(good, fields)
    reject = loaded.algorithm.reject
    assert reject is not None and (reject.by, reject.over, reject.low, reject.high) == ("ratio", "token", None, 3)
    good.write_text(config.dump(loaded))
    assert config.load(good, ["algorithm.reject.high=4"]).algorithm.reject == reject.model_copy(update={"high": 4})
    assert config.load(good, ["algorithm.reject=null"]).algorithm.reject is None


def test_a_mapping_replaces_a_field_and_is_merged_into_a_section(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "experiment: e\nmodel: {path: m}\ndata: {path: d.jsonl}\ninference: {backend: vllm, args: {max-num-seqs: 4}}\n"
        "rollout: {n_samples: 4, workflow_kwargs: {max_turns: 3}}\n"
        "algorithm: {reject: {by: ratio, over: token, low: 0.5, high: 2}}\n"
    )
    empty = config.load(file, ["inference.backend=embedded", "inference.args={}", "rollout.workflow_kwargs={}"])
    assert empty.inference.args == empty.rollout.workflow_kwargs == {}
    other = config.load(file, ["algorithm.reject={by: k3, over: token, high: 1}", "rollout.workflow_kwargs={a: 1}"])
    assert other.algorithm.reject == Reject(by="k3", over="token", high=1)
    assert other.rollout.workflow_kwargs == {"a": 1}
    more = config.load(file, ["rollout={batch_groups: 3}", "rollout.workflow_kwargs.a=1", "algorithm.reject.low=null"])
    assert more.rollout.n_samples == 4 and more.rollout.workflow_kwargs == {"max_turns": 3, "a": 1}
    assert more.algorithm.reject == Reject(by="ratio", over="token", high=2)


@pytest.mark.parametrize(
    ("addition", "overrides", "said"),
    [
        (
            "  steps: 3\n  mirco_batch_tokens: 5\n",
            [],
            "good.yaml:9: there is no field 'training.mirco_batch_tokens'; did you mean 'training.micro_batch_tokens'?",
        ),
        ("rolout:\n  n_samples: 4\n", [], "good.yaml:8: there is no field 'rolout'; did you mean 'rollout'?"),
        (
            "",
            ["training.step=3"],
            "override training.step=3: there is no field 'training.step'; did you mean 'training.steps'?",
        ),
        ("", ["lr=1"], "override lr=1: there is no field 'lr'; did you mean 'training.lr'?"),
        ("", ["algorithm.epsilom=1"], "no field 'algorithm.epsilom'; did you mean 'algorithm.clip_low'?"),
        ("", ["algorithm.rollout_is=token"], "'algorithm.rollout_is'; did you mean 'algorithm.importance'?"),
        ("", ["training.learning_rate=1"], "no field 'training.learning_rate'; did you mean 'training.lr'?"),
        ("", ["training.lr=fast"], "override training.lr=fast: training.lr is 'fast'; expected a number."),
        (
            "  warmup_steps: -1\n",
            [],
            "good.yaml:8: training.warmup_steps is -1; expected a number greater than or equal to 0",
        ),
        ("", ["algorithm.minibatches=32"], "algorithm.minibatches (32) is above rollout.batch_groups (16)"),
        ("", ["inference.backend=vllm", "launch.mode=inline"], "launch.mode=inline needs the engine inside Clew's own"),
        ("", ["launch.devices=d2p2"], "launch.devices asks for p2 in 'd2p2': Clew has no pipeline parallelism"),
        ("", ["launch.devices=trt.d2"], "launch.devices names 'trt'"),
        ("", ["launch.devices=sglang.d1+vllm.d1"], "has two parts of one kind"),
        ("", ["launch.devices=embedded.t2"], "the embedded engine computes on one device"),
        ("", ["launch.devices=d4t2", "launch.ranks=4"], "says launch.ranks=8, and launch.ranks is 4"),
        ("", ["launch.devices=d1", "launch.colocate=true"], "launch.colocate shares one"),
        ("", ["inference.backend=vllm", "launch.colocate=true"], "launch.colocate needs the engine inside Clew's own"),
        ("", ["inference.args={max-num-seqs: 3}"], "inference.args (max-num-seqs) are options of vLLM or SGLang"),
        (
            "",
            ["inference.backend=vllm", "weights.via=collective", "inference.args={pipeline_parallel_size: 2}"],
            "inference.args.pipeline-parallel-size adds others. Use weights.via=disk",
        ),
        (
            "",
            ["inference.backend=sglang", "inference.args={dp-size: 2}"],
            "inference.args.dp-size makes several replicas in one server",
        ),
        (
            "",
            ["inference.backend=sglang", "weights.via=collective", "inference.on_update=wait"],
            "weights.via=collective needs all servers at once",
        ),
        ("", ["inference.backend=vllm", "sampling.top_k=3"], "sampling.top_k cuts the distribution"),
        (
            "",
            ["inference.backend=vllm", "sampling.top_k=3", "inference.args={return-sampling-mask: false}"],
            "sampling.top_k cuts the distribution",
        ),
        (
            "",
            ["inference.backend=vllm", "inference.args={return_sampling_mask: true}"],
            "inference.args.return-sampling-mask needs sampling.top_k and sampling.temperature above 0",
        ),
        ("", ["sampling.min_new_tokens=300"], "sampling.min_new_tokens (300) is above sampling.max_new_tokens (256)"),
        ("", ["algorithm.preset=gpro"], "your own module, such as my_project.gpro. Did you mean 'grpo'?"),
        (
            "",
            ["algorithm.loss=cipso"],
            "override algorithm.loss=cipso: algorithm.loss is 'cipso'; expected clip, cispo, or the dotted path of "
            "your own function, such as my_project.cipso. Did you mean 'cispo'?",
        ),
        ("", ["algorithm.advantages=groop"], "Did you mean 'group'?"),
        ("", ["training.betas=[0.9,1]"], "training.betas.1 is 1; expected a number less than 1"),
        (
            "",
            ["algorithm.overlong_penalty=300"],
            "overlong_penalty (300) is above sampling.max_new_tokens (256)",
        ),
        ("", ["algorithm.loss=cispo", "algorithm.dual_clip=3"], "algorithm.loss is cispo. Unset it"),
        ("", ["algorithm.importance=token_mask", "algorithm.importance_cap=1"], "would mask every token"),
        (
            "algorithm:\n  reject: {by: ratio, over: token, hihg: 2}\n",
            [],
            "good.yaml:9: there is no field 'algorithm.reject.hihg'; did you mean 'algorithm.reject.high'?",
        ),
        ("", ["algorithm.rejct.by=k3"], "there is no field 'algorithm.rejct'; did you mean 'algorithm.reject'?"),
        ("", ["algorithm.reject.high=2"], "the field 'algorithm.reject.over' is missing; it has no default."),
        (
            "",
            ["algorithm.reject={by: ratio, over: token}"],
            "algorithm.reject.low and algorithm.reject.high are both null, so nothing would be rejected. Set at least",
        ),
        (
            "",
            ["algorithm.reject={by: ratio, over: sequence_mean, low: 1.1, high: 2}"],
            "algorithm.reject.low (1.1) and algorithm.reject.high (2) would reject a ratio of 1",
        ),
        ("", ["algorithm.reject={by: k3, over: token, low: 0.1}"], "would reject what agrees best"),
        (
            "",
            ["algorithm.reject={by: ratio, over: sequence_max, low: 0.1}"],
            "Use algorithm.veto to reject sequences with a ratio below 0.1, or algorithm.reject.over=token",
        ),
        (
            "",
            ["algorithm.reject={by: k3, over: sequence_product, high: 2}"],
            "would multiply divergences, which says nothing. Use algorithm.reject.by=ratio, or over=sequence_mean",
        ),
        (
            "",
            ["algorithm.kl_times_ratio=true", "algorithm.kl_in=reward"],
            "algorithm.kl_times_ratio is for a KL term in the loss, but algorithm.kl_in is reward. Unset one.",
        ),
        ("", ["algorithm.veto=2"], "algorithm.veto is 2; expected a number less than 1"),
        ("", ["rollout.n_samples=1"], "rollout.n_samples is 1, and algorithm.advantages=group compares the episodes"),
        ("", ["algorithm.preset=rloo", "rollout.n_samples=1"], "Use at least 2, or algorithm.advantages=batch, gae"),
        (
            "",
            ["algorithm.preset=ppo", "rollout.n_samples=1", "rollout.drop_equal_rewards=true"],
            "with rollout.n_samples=1 every group's are. Use at least 2, or unset it",
        ),
        ("", ["algorithm.critic=models/rm"], "algorithm.critic is for the critic, and algorithm.advantages=group has"),
        (
            "",
            ["algorithm.bootstrap_truncated=true"],
            "bootstrap_truncated is for the critic, and algorithm.advantages=",
        ),
        ("", ["algorithm.preset=ppo", "reward.turn_discount=0.5"], "discounts tokens. Use algorithm.gamma"),
        (
            "",
            ["training.objective=dpo", "algorithm.kl_coef=0"],
            "algorithm.kl_coef is 0, and it is the beta of training.objective=dpo",
        ),
        (
            "",
            ["training.lora_alpha=8"],
            "training.lora_alpha scales adapters, and there are none without training.lora",
        ),
        (
            "",
            ["debug.path=dump"],
            "debug.path is set, but neither debug.dump_rollout_data=true (write batches there) nor",
        ),
        (
            "",
            ["debug.format=pt", "debug.path=dump", "debug.replay_rollout_data=true"],
            "debug.format=pt needs debug.dump_rollout_data=true. Set it, or leave both out",
        ),
        ("", ["training.lr"], "override 'training.lr': expected key=value"),
        ("", ["=3"], "override '=3': expected key=value"),
        ("", ["inference.args=[a"], "override 'inference.args=[a': did not find expected ',' or ']'"),
        ("rollout: mine.exact\nalgorithm: {preset: dapo}\n", [], "rollout is 'mine.exact'; expected fields"),
        ("inference: {args: [a]}\nlaunch: {devices: sglang.d1t2}\n", [], "inference.args is ['a']; expected fields"),
        ("data: [\n", [], "good.yaml:9: this is not YAML: "),
        ("data:\n\tpath: a\n", [], "good.yaml:9: this is not YAML: found character that cannot start any token"),
        ("", ["root=${nowhere}"], "nowhere"),
    ],
)
def test_a_field_that_cannot_be_meant_stops_at_once(good: Path, addition: str, overrides: list[str], said: str) -> None:
    good.write_text(GOOD + addition)
    with pytest.raises(ConfigError) as caught:
        config.load(good, overrides)
    assert said in str(caught.value)
    assert not str(caught.value).endswith(("?.", ".."))


def test_another_preset_takes_back_a_constant_that_followed_from_the_old_one(good: Path, tmp_path: Path) -> None:
    good.write_text(GOOD + "algorithm: {loss_mean: constant}\n")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.dump(config.load(good)))
    assert config.load(resolved).algorithm.loss_constant == config.load(good).sampling.max_new_tokens
    assert config.load(resolved, ["algorithm.preset=rloo"]) == config.load(good, ["algorithm.preset=rloo"])


def test_a_number_is_no_configuration(good: Path) -> None:
    good.write_text("3\n")
    with pytest.raises(ConfigError, match="expected sections with plain values"):
        config.load(good)


def test_a_list_is_no_configuration(good: Path) -> None:
    good.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected sections such as model: and data:, found list"):
        config.load(good, ["training.steps=3"])


def test_numbers_are_names_of_experiments_and_trials(good: Path) -> None:
    for trial in ("1", "010", "1.10", "1e3", "on"):
        assert config.load(good, [f"trial={trial}"]).trial == trial
    assert config.load(good, ["experiment=2026", "trial='7'"]).trial == "7"
    good.write_text(GOOD + "trial: 7\n")
    with pytest.raises(ConfigError, match=r"trial is 7; expected text\. Put it in quotes\."):
        config.load(good)


def test_a_check_across_sections_names_the_override(good: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override rollout\.n_samples=1: rollout\.n_samples is 1"):
        config.load(good, ["rollout.n_samples=1"])
    good.write_text(GOOD + "algorithm: {loss: cispo, dual_clip: 3}\n")
    with pytest.raises(ConfigError, match=r"good\.yaml:8: algorithm\.dual_clip"):
        config.load(good, ["algorithm.clip_high=0.3"])


def test_a_preset_sets_what_nothing_else_sets(good: Path, tmp_path: Path) -> None:
    good.write_text(GOOD + "algorithm: {preset: dapo, clip_high: 0.5}\nsampling: {max_new_tokens: 1000}\n")
    loaded = config.load(good)
    algorithm = loaded.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.overlong_penalty) == (0.2, 0.5, 200)
    assert loaded.rollout.drop_equal_rewards
    said = config.preset_in_words(loaded)
    assert "algorithm.clip_high=0.28" in said and "rollout.drop_equal_rewards=true" in said
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.dump(loaded))
    assert config.load(resolved) == loaded
    other = config.load(resolved, ["algorithm.preset=dr_grpo", "algorithm.loss_constant=7"]).algorithm
    assert (other.advantages, other.loss_mean, other.loss_constant, other.overlong_penalty) == (
        "mean",
        "constant",
        7,
        None,
    )
    assert other.clip_high == 0.5
    for gspo in ("algorithm.preset=gspo", "algorithm={preset: gspo}"):
        changed = config.load(resolved, [gspo])
        assert not changed.rollout.drop_equal_rewards and changed.algorithm.clip_low == 3e-4
    good.write_text(GOOD + "algorithm: {preset: dapo, clip_low: '${oc.env:NOT_SET_ANYWHERE}'}\n")
    assert config.load(good, ["algorithm.preset=ppo", "algorithm.clip_low=0.1"]).algorithm.clip_low == 0.1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_sets_fields_that_there_are(good: Path, preset: str) -> None:
    loaded = flat(config.load(good, [f"algorithm.preset={preset}"]).model_dump())
    options = preset_options(preset)
    assert options.keys() <= set(config.field_names()) and options == {name: loaded[name] for name in options}


PAGE = """
OPTIONS = {"clip_high": 0.3, "advantages": "mean", "overlong_penalty": lambda limit: limit // 2, "eval.n_samples": 2}
OPTIONS["reject"] = {"by": "ratio", "over": "token", "high": 3}

def loss(logprobs_N, advantages_N):
    return -logprobs_N * advantages_N, {}
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of a user's page, whose dotted path is mine.page."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "page.py").write_text(PAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine" / "page.py"
    for name in ("mine", "mine.page"):
        sys.modules.pop(name, None)


def test_a_page_of_the_users_own_is_a_preset(good: Path, page: Path) -> None:
    loaded = config.load(good, ["algorithm.preset=mine.page", "algorithm.clip_high=0.4"])
    algorithm = loaded.algorithm
    assert (algorithm.loss, algorithm.advantages, algorithm.clip_high) == ("mine.page.loss", "mean", 0.4)
    assert (algorithm.overlong_penalty, loaded.eval.n_samples) == (128, 2)
    assert algorithm.reject is not None and algorithm.reject.high == 3
    good.write_text(config.dump(loaded))
    other = config.load(good, ["algorithm.preset=cispo"])
    assert (other.algorithm.loss, other.algorithm.clip_high, other.eval.n_samples) == ("cispo", 0.4, 1)


def test_a_users_page_is_code_and_is_loaded_only_if_it_is_needed_and_trusted(good: Path, page: Path) -> None:
    preset = ["algorithm.preset=mine.page"]
    with only_trusted("x is a bundle"), pytest.raises(ConfigError, match=r"Nothing was imported.*--trust mine\.page"):
        config.load(good, preset)
    assert "mine.page" not in sys.modules
    with only_trusted("x is a bundle", ["mine.page"]):
        loaded = config.load(good, preset)
    sys.modules.pop("mine.page")
    page.unlink()
    good.write_text(GOOD + "algorithm: {preset: mine.page, clip_high: 0.4}\n")
    other = config.load(good, ["algorithm.preset=cispo"]).algorithm
    assert (other.preset, other.clip_high) == ("cispo", 0.4)
    good.write_text(config.dump(loaded))
    with only_trusted("x is a bundle"):
        assert config.load(good) == loaded  # a record says all that the page said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "expected a module with any of OPTIONS"),
        ("OPTIONS = {'clip_hihg': 1}", r"sets algorithm\.clip_hihg.*did you mean 'algorithm\.clip_high'"),
        ("OPTIONS = {'algorithm.reject.high': 1}", r"there is no such field; did you mean 'algorithm\.reject'"),
        ("1 / 0", r"importing it raised ZeroDivisionError at .*page\.py:1"),
    ],
)
def test_what_cannot_be_a_page_is_told(good: Path, page: Path, text: str, said: str) -> None:
    page.write_text(text)
    with pytest.raises(ConfigError, match=said):
        config.load(good, ["algorithm.preset=mine.page"])


def test_a_record_from_before_these_options_means_what_it_meant() -> None:
    before = {"minibatches": 2, "clip_low": 0.2, "clip_high": 0.28, "importance_cap": 2.0, "kl_coef": 0.1}
    algorithm = config.Algorithm(**before)
    assert (algorithm.advantages, algorithm.loss, algorithm.ratio, algorithm.loss_mean) == (
        "group",
        "clip",
        "token",
        "token",
    )
    assert (algorithm.importance, algorithm.kl_estimator, algorithm.kl_in) == ("token_truncate", "k3", "loss")


def test_a_constant_length_is_that_of_a_response(good: Path) -> None:
    assert config.load(good, ["algorithm.loss_mean=constant"]).algorithm.loss_constant == 256
    longer = config.load(good, ["algorithm.preset=dr_grpo", "sampling.max_new_tokens=99"])
    assert longer.algorithm.loss_constant == 99


def test_numbers_from_the_environment_are_text_that_means_a_number(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTH", "1000")
    monkeypatch.setenv("RANKS", "2")
    good.write_text(GOOD + "sampling: {max_new_tokens: '${oc.env:LENGTH}'}\nlaunch: {ranks: '${oc.env:RANKS}'}\n")
    assert config.load(good, ["algorithm.preset=dr_grpo"]).algorithm.loss_constant == 1000
    assert config.load(good, ["algorithm.preset=dapo"]).algorithm.overlong_penalty == 200
    assert config.load(good, ["launch.devices=d2"]).launch.ranks == 2


def test_a_missing_file_and_a_missing_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read .*none\.yaml: it is missing"):
        config.load(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("experiment: x\nmodel:\n  dtype: float32\ndata: {path: x}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: the field 'model\.path' is missing"):
        config.load(tmp_path / "a.yaml")


def test_few_knobs_each_with_a_sentence() -> None:
    # 100, eval.pass_above, checkpoint.keep_best, eight of the corrections that most other systems have,
    # algorithm.bootstrap_truncated, launch.devices, hang.after_s, hang.action, inference.on_update and weights.via
    assert len(config.field_names()) <= 119
    schema = config.Config.model_json_schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            assert field.get("description", "").endswith((".", ")")), name


def test_the_schema_is_printed_for_editors() -> None:
    printed = subprocess.run([sys.executable, "-m", "clew", "config", "--schema"], capture_output=True, check=True)
    assert json.loads(printed.stdout)["properties"]["training"]


def test_importing_it_imports_no_torch() -> None:
    code = "import clew.config, clew.record.run, clew.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.sampled_from(config.field_names()), st.data())
def test_a_misspelt_field_finds_its_neighbour(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(name.rindex(".") + 2 if "." in name else 1, len(name) - 1)) if len(name) > 5 else 0
    misspelt = name[:at] + name[at + 1 :]
    if misspelt in config.field_names() or len(name.rsplit(".", 1)[-1]) < 7:
        return
    assert config.nearest(misspelt, config.field_names()) == name


def test_devices_in_areals_notation_set_engine_ranks_and_tensor_parallelism(good: Path) -> None:
    def resolved(devices: str) -> tuple[str, int, int, dict[str, object]]:
        loaded = config.load(good, [f"launch.devices={devices}"])
        assert loaded == config.parse(config.dump(loaded), good)
        return loaded.inference.backend, loaded.launch.ranks, loaded.training.tp, loaded.inference.args

    assert resolved("sglang.d4p1t1") == ("sglang", 1, 1, {})
    assert resolved("sglang:d4t2") == ("sglang", 1, 1, {"tensor-parallel-size": 2})
    assert resolved("d4p1t1") == ("embedded", 4, 1, {})
    assert resolved("vllm.d4p1t1+fsdp:d2p1t2") == ("vllm", 4, 2, {})


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["launch.ranks=4"], 4),
        (["launch.devices=d4t1"], 4),
        (["launch.devices=d2t2"], 4),
        (["launch.devices=embedded.d1+d3"], 4),
        (["launch.devices=embedded.d4"], 4),
        (["launch.devices=d4t1", "launch.threads=3"], 3),
    ],
)
def test_ranks_share_all_cores(good: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], threads: int) -> None:
    monkeypatch.setattr(config, "cores", lambda: 16)
    assert config.load(good, overrides).rank_threads == threads


def test_devices_are_dealt_out_and_more_than_there_are_is_refused_with_the_numbers(tmp_path: Path) -> None:
    dealt = assigned_gpus(parse_devices("sglang.d2t2+d2"), list("01234567"))
    assert dealt == {"server": "0,1", "server-1": "2,3", "trainer": "4,5"}
    assert assigned_gpus(parse_devices("sglang.d2t2+d2"), []) == {}, "on a machine without GPUs they are processes"
    with pytest.raises(ValueError, match=r"needs 12 devices \(8 for sglang and 4 for training\), and there are 3"):
        assigned_gpus(parse_devices("sglang.d4t2+d4"), list("012"))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia10"):
        (tmp_path / name).touch()
    assert gpus({}, tmp_path) == ["0", "1", "2"], "CUDA's numbers, not those of the nodes"
    assert gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["1"] and gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_the_readmes_configuration_is_one(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    block = readme.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(block)
    loaded = config.load(tmp_path / "mine.yaml")
    assert (loaded.experiment, loaded.rollout.reward) == ("mine", "my_rewards.exact_match")


def test_each_engine_has_facts_and_each_server_a_client() -> None:
    names = get_args(Inference.model_fields["backend"].annotation)
    assert tuple(ENGINES) == names == ("embedded", *BACKENDS)
