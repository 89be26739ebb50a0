"""Whole runs in this process: equal twice, resumed from any checkpoint, and refused when the record was altered."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from clew import config as configuration
from clew.config import Config
from clew.errors import ClewError, ConfigError, ModelError, RecordError, TrainingError
from clew.loop.stopwatch import Clock
from clew.loop.tolerance import TOLERANCES
from clew.record import rows
from clew.record.evaluations import Evaluations
from clew.record.run import RunDirectory
from clew.training import checkpoint, optimizer
from clew.view.show import show
from tests.loop import losses, runs
from tests.loop.runs import learn
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learn")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(30)))
    return folder


def configure(folder: Path, trial: str, **changes: object) -> Config:
    sections = (
        "experiment: learn\n"
        "rollout: {reward: bench.rewards.digits, batch_groups: 3, n_samples: 3}\n"
        "sampling: {max_new_tokens: 10}\n"
        "training: {steps: 5, lr: 1e-3}\n"
        "algorithm: {minibatches: 2, kl_coef: 0.01}\n"
        "checkpoint: {every_steps: 2}\n"
    )
    return runs.configure(folder, sections, trial, changes)


@pytest.fixture(scope="module")
def first(folder: Path) -> RunDirectory:
    return learn(configure(folder, "first"))


def copy(run: RunDirectory, folder: Path, trial: str) -> RunDirectory:
    shutil.copytree(run.path, folder / "runs" / "learn" / trial, symlinks=True)
    return RunDirectory(folder / "runs" / "learn" / trial)


def keep_checkpoints(run: RunDirectory, *versions: int) -> None:
    for path in run.checkpoints.glob("step-*"):
        if int(path.name.removeprefix("step-")) not in versions:
            shutil.rmtree(path)


def test_two_runs_are_equal_bit_for_bit(folder: Path, first: RunDirectory) -> None:
    second = learn(configure(folder, "second"))
    assert first.steps.index() == second.steps.index()
    for name in ("model.safetensors", "trainer/state.safetensors"):
        last = Path("checkpoints") / "step-000005" / name
        assert (first.path / last).read_bytes() == (second.path / last).read_bytes()
    times = ("admitted_at", "started_at", "finished_at", "consumed_at", "interactions")
    for step in range(5):
        a, b = (rows.read_table(run.steps.data_path(step)).drop_columns(list(times)) for run in (first, second))
        assert a.equals(b)
        assert first.steps.stage_path(step, 0).read_bytes() == second.steps.stage_path(step, 0).read_bytes()


def test_two_runs_of_an_agent_are_equal_bit_for_bit(folder: Path) -> None:
    """Its requests come over sockets, each time in another order."""
    agent = {"rollout.agent": "tests.loop.agents.AtItsOwnPace", "rollout.reward": "null", "training.steps": 3}
    one, other = (learn(configure(folder, f"agent-{number}", **agent)) for number in range(2))
    assert one.steps.index() == other.steps.index()
    started = [
        [each["started_at"] for row in run.steps.read_data(0) for each in row.interactions] for run in (one, other)
    ]
    orders = [sorted(range(len(times)), key=times.__getitem__) for times in started]
    assert orders[0] != orders[1] and len(orders[0]) == 18


@pytest.mark.parametrize(
    "rollout",
    [
        {"rollout.workflow": "tests.loop.agents.Dawdles", "rollout.reward": "null"},
        {
            "rollout.workflow": "clew.rollout.workflows.MultiTurnRetry",
            "rollout.reward": "tests.loop.agents.slow_reward",
        },
    ],
)
def test_two_runs_of_a_workflow_that_waits_for_something_else_are_equal(folder: Path, rollout: dict[str, str]) -> None:
    name = rollout["rollout.workflow"].rpartition(".")[2]
    changes = {**rollout, "training.steps": 3, "sampling.max_new_tokens": 20}
    runs = [learn(configure(folder, f"{name}-{number}", **changes)) for number in range(2)]
    assert runs[0].steps.index() == runs[1].steps.index()


def test_taking_turns_on_one_device_frees_the_cache_and_changes_no_bit(folder: Path) -> None:
    own = {"algorithm.loss": "tests.loop.losses.watching", "training.steps": 2}
    indices = []
    for colocate in (False, True):
        losses.cache_bytes.clear()
        run = learn(configure(folder, f"colocate-{colocate}", **own, **{"launch.colocate": colocate}))
        assert len(losses.cache_bytes) == 4
        assert all((held == 0) == colocate for held in losses.cache_bytes), losses.cache_bytes
        assert ("release" in run.steps.read(1)["timings"]) == colocate
        indices.append(run.steps.index())
    assert indices[0] == indices[1]


def test_what_is_in_flight_when_a_step_is_trained_goes_on_after_it(folder: Path) -> None:
    """Its logprobs are those of the trainer, whose weights hardly move."""
    losses.cache_bytes.clear()
    in_flight = {
        "rollout.max_lag": 2,
        "sampling.max_new_tokens": 50,
        "sampling.min_new_tokens": 2,
        "training.lr": 1e-12,
    }
    own = {"algorithm.loss": "tests.loop.losses.watching", "launch.colocate": True, "training.steps": 3}
    run = learn(configure(folder, "colocate-in-flight", **in_flight, **own))
    assert losses.cache_bytes == [0] * 6
    metrics = [run.steps.read(step)["metrics"] for step in range(3)]
    assert max(each["behaviour_gap_max"] for each in metrics) < 1e-4 and max(each["lag_max"] for each in metrics) > 0


def test_another_seed_gives_another_run(folder: Path, first: RunDirectory) -> None:
    other = learn(configure(folder, "other-seed", seed=2, **{"training.steps": 1}))
    assert other.steps.index()[0] != first.steps.index()[0]


@pytest.mark.parametrize("versions", [(0,), (0, 2), (0, 4)])
def test_recorded_steps_are_trained_again_to_the_same_weights(
    folder: Path, first: RunDirectory, versions: tuple[int, ...]
) -> None:
    """Resume from each checkpoint, without its successors; then two more steps, live."""
    trial = f"from-{versions[-1]}"
    keep_checkpoints(copy(first, folder, trial), *versions)
    resumed = learn(configure(folder, trial, **{"training.steps": 7}))
    assert resumed.steps.index()[:5] == first.steps.index()
    assert resumed.steps.count() == 7
    consumed = [group for entry in resumed.steps.index() for group in entry["groups"]]
    assert sorted(consumed) == [f"g{i:06d}" for i in range(21)]


def test_inference_and_trainer_agree(first: RunDirectory) -> None:
    for step in range(5):
        metrics = first.steps.read(step)["metrics"]
        assert metrics["lag_max"] == 0
        assert metrics["behaviour_gap_max"] < 1e-4


def test_an_altered_batch_is_named(folder: Path, first: RunDirectory) -> None:
    run = copy(first, folder, "altered")
    keep_checkpoints(run, 0)
    batch = run.steps.read_data(3)
    logprobs = batch[0].logprobs.copy()
    logprobs[-1] += 0.25
    run.steps.write_data(3, rows.to_table([replace(batch[0], logprobs=logprobs), *batch[1:]]))
    with pytest.raises(RecordError, match=r"Cannot go on with .*: step 3: steps/step-000003\.parquet is not the file"):
        learn(configure(folder, "altered"))
    assert run.steps.index() == first.steps.index()


def test_a_truncated_batch_is_named(folder: Path, first: RunDirectory) -> None:
    run = copy(first, folder, "truncated")
    keep_checkpoints(run, 0)
    path = run.steps.data_path(2)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RecordError, match=r"Cannot go on with .*: step 2: steps/step-000002\.parquet is not the file"):
        learn(configure(folder, "truncated"))


def test_a_changed_configuration_is_refused_where_steps_must_be_trained_again(
    folder: Path, first: RunDirectory
) -> None:
    run = copy(first, folder, "changed")
    keep_checkpoints(run, 0, 4)
    with pytest.raises(ConfigError, match=r"steps 4 to 4 .* training\.lr 0\.001 -> 0\.01\. Go on.*Ctrl-C"):
        learn(configure(folder, "changed", **{"training.lr": 0.01, "training.steps": 6}))


def test_what_a_failed_step_advises_to_change_may_change_where_steps_must_be_trained_again(
    folder: Path, first: RunDirectory
) -> None:
    keep_checkpoints(copy(first, folder, "advised"), 0, 4)
    advised = {"micro_batch_tokens": 50, "spike_factor": 1e6, "on_bad_gradient": "skip"}
    changes = {f"training.{name}": value for name, value in advised.items()}
    run = learn(configure(folder, "advised", **changes, **{"training.steps": 6}))
    assert run.steps.index()[:5] == first.steps.index()
    plans = [run.steps.read(step)["plan"] for step in (4, 5)]
    assert [max(map(len, plan)) > 1 for plan in plans] == [False, True]


def test_a_checkpoint_says_that_its_weights_are_the_records_only_within_a_tolerance(
    folder: Path, first: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(first, folder, "drifted")
    keep_checkpoints(run, 0, 4)
    with monkeypatch.context() as elsewhere:
        near = (TOLERANCES["float32"], "a test")
        elsewhere.setattr("clew.loop.replay.how_to_compare", lambda *_: near)
        learn(configure(folder, "drifted"))
    assert checkpoint.read_manifest(run.checkpoint(5)).get("drifted") is True
    learn(configure(folder, "drifted", **{"training.steps": 6}))  # a step of its own, with digests on record
    assert checkpoint.read_manifest(run.checkpoint(6)).get("drifted") is None


def test_the_weights_of_a_last_step_that_differs_are_not_saved(
    folder: Path, first: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(first, folder, "differs")
    keep_checkpoints(run, 0, 4)
    monkeypatch.setattr(optimizer, "learning_rate", lambda *_, **__: 2e-3)
    with pytest.raises(TrainingError, match="step 4, trained again from the record, differs"):
        learn(configure(folder, "differs"))
    assert run.checkpointed() == [0, 4]


def test_other_updates_per_step_are_refused_under_a_schedule_that_counts_them(
    folder: Path, first: RunDirectory
) -> None:
    copy(first, folder, "other-updates")
    changes = {"algorithm.minibatches": 3, "training.schedule": "linear"}
    with pytest.raises(ConfigError, match=r"with other updates per step: algorithm\.minibatches .*=linear counts"):
        learn(configure(folder, "other-updates", **changes))


def test_another_model_is_refused(folder: Path, first: RunDirectory) -> None:
    copy(first, folder, "other-model")
    with pytest.raises(ConfigError, match=r"with another model: model\.path .* A run keeps its model"):
        shutil.copytree(folder / "model", folder / "same-elsewhere")
        learn(configure(folder, "other-model", **{"model.path": folder / "same-elsewhere"}))
    with pytest.raises(ConfigError, match=r"with another model: training\.lora_alpha .* A run keeps its model"):
        learn(configure(folder, "other-model", **{"training.lora_rank": 4, "training.lora_alpha": 64}))


def test_a_run_whose_root_was_moved_with_its_model_goes_on(folder: Path, tmp_path: Path) -> None:
    def options(root: Path, steps: int) -> dict[str, object]:
        return {"root": root, "model.path": root / "model", "training.steps": steps}

    shutil.copytree(folder / "model", tmp_path / "before" / "model")
    learn(configure(folder, "moved", **options(tmp_path / "before", 1)))
    (tmp_path / "before").rename(tmp_path / "after")
    config = configure(folder, "moved", **options(tmp_path / "after", 2))
    learn(config)
    assert RunDirectory(config.run_path).steps.count() == 2
    spelled = options(tmp_path / "after", 3) | {"root": f"{tmp_path}/./after"}
    learn(configure(folder, "moved", **spelled))
    assert RunDirectory(config.run_path).steps.count() == 3


def test_another_model_in_the_same_place_is_refused_as_the_reference(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "replaced")
    config = configure(folder, "replaced", **{"model.path": folder / "replaced", "training.steps": 1})
    learn(config)
    learn(config)
    tiny_model(folder / "replaced", seed=1)
    with pytest.raises(ModelError, match=r"replaced \(model\.path\), the reference .*, is not the model that the run"):
        learn(config)


def test_a_checkpoint_without_its_steps_is_refused(folder: Path, first: RunDirectory) -> None:
    run = copy(first, folder, "without-steps")
    shutil.rmtree(run.steps.folder)
    with pytest.raises(RecordError, match="has a checkpoint of version 5, but 0 committed steps: steps were removed"):
        learn(configure(folder, "without-steps"))


def test_an_evaluation_that_was_added_later_does_not_wait_for_the_past(folder: Path, first: RunDirectory) -> None:
    copy(first, folder, "evaluated")
    changes = {"training.steps": 6, "eval.path": folder / "prompts.jsonl", "eval.every_steps": 1}
    run = learn(configure(folder, "evaluated", **changes))
    assert [each["version"] for each in run.evals.read_all()] == [5, 6]


def test_weights_that_are_not_finite_are_not_committed(folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"step 0: after the update, .* has NaN or infinity, .* Start another"):
        learn(configure(folder, "too-high", **{"training.lr": 1e38, "algorithm.minibatches": 1}))
    assert RunDirectory(folder / "runs" / "learn" / "too-high").steps.count() == 0


def test_it_goes_on_from_a_checkpoint_with_another_configuration(folder: Path, first: RunDirectory) -> None:
    copy(first, folder, "onwards")
    run = learn(configure(folder, "onwards", **{"training.lr": 0.01, "training.steps": 6}))
    assert run.steps.index()[:5] == first.steps.index()
    assert run.steps.read(5)["metrics"]["lr"] == 0.01


def test_other_threads_are_compared_within_a_tolerance(
    folder: Path, first: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    run = copy(first, folder, "threads")
    keep_checkpoints(run, 0)
    learn(configure(folder, "threads", **{"launch.threads": 2}))
    assert (
        "step 0: compared within 0.001 + 0.001 x |recorded|, not bit for bit: threads 1 recorded, 2 here" in caplog.text
    )
    assert run.steps.index() == first.steps.index()


@pytest.mark.parametrize("best", [None, 2])
def test_old_data_goes_when_few_steps_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, best: int | None) -> None:
    monkeypatch.setattr(Evaluations, "best", lambda _, versions, __: best if best in versions else None)
    run = learn(configure(folder, f"pruned-{best}", **{"record.keep_steps": 1, "checkpoint.keep": 1}))
    assert run.checkpointed() == ([0, 5] if best is None else [0, 2, 5])
    assert [step for step in range(5) if run.steps.has_data(step)] == [4]
    assert run.steps.count() == 5


def test_an_error_of_rollout_ends_the_run_with_its_words(folder: Path) -> None:
    with pytest.raises(ClewError, match=r"no field|no function|cannot|bench"):
        learn(configure(folder, "wrong-reward", **{"rollout.reward": "bench.rewards.nothing"}))


def test_the_parts_of_an_update_are_on_record(first: RunDirectory) -> None:
    timings = first.steps.read(1)["timings"]
    assert all(timings[f"publish/{part}"] > 0 for part in ("write", "abort", "load", "verify"))


def test_the_clock_counts_nothing_twice() -> None:
    clock = Clock()
    with clock("outer"):
        with clock("inner"):
            for _ in range(20000):
                pass
        with clock("inner"):
            pass
    taken = clock.take()
    assert set(taken) == {"outer", "inner"} and taken["inner"] > taken["outer"] >= 0
    assert clock.take() == {}


def test_a_finished_run_keeps_its_configuration_when_nothing_is_trained(
    folder: Path, first: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    run = copy(first, folder, "finished")
    before = run.config_path.read_bytes(), run.run_json.read_bytes()
    learn(configure(folder, "finished", seed=99, **{"training.lr": 0.5, "training.steps": 1}))
    assert (run.config_path.read_bytes(), run.run_json.read_bytes()) == before
    [said] = [each for each in caplog.messages if "configuration" in each]
    assert "no step is left to train" in said and "seed 1 -> 99" in said and "training.lr 0.001 -> 0.5" in said


def test_a_run_that_has_more_steps_than_are_wanted_ends_with_a_checkpoint_of_them(
    folder: Path, first: RunDirectory
) -> None:
    run = copy(first, folder, "fewer")
    keep_checkpoints(run, 0, 4)
    learn(configure(folder, "fewer", **{"training.steps": 3}))
    assert run.checkpointed() == [0, 4, 5] and (run.checkpoints / "latest").readlink() == Path("step-000005")


def test_changes_of_the_configuration_are_announced_and_kept_with_their_step(
    folder: Path, first: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    copy(first, folder, "changing")
    learn(configure(folder, "changing", **{"training.lr": 0.01, "training.steps": 6}))
    assert "the configuration changes from step 5 on: training.steps 5 -> 6, training.lr 0.001 -> 0.01" in caplog.text
    run = learn(configure(folder, "changing", **{"training.lr": 0.002, "training.steps": 7}))
    learn(configure(folder, "changing", **{"training.lr": 0.002, "training.steps": 7}))
    assert configuration.load(run.config_path).training.lr == 0.002
    assert run.facts()["changes"] == [
        {"step": 5, "fields": {"training.steps": [5, 6], "training.lr": [0.001, 0.01]}},
        {"step": 6, "fields": {"training.steps": [6, 7], "training.lr": [0.01, 0.002]}},
    ]
    shown = Console(width=200, file=io.StringIO(), record=True)
    show(run.path, console=shown)
    assert "from step 6: training.steps 6 -> 7, training.lr 0.01 -> 0.002" in shown.export_text()


def test_an_option_that_is_left_out_is_a_change(folder: Path) -> None:
    given, left_out = (configure(folder, "options", **{"rollout.workflow_kwargs": each}) for each in ({"a": 5}, {}))
    run = RunDirectory(folder / "runs" / "learn" / "options")
    run.describe(given)
    assert run.changes(left_out) == {"rollout.workflow_kwargs.a": [5, None]}
    run.describe(left_out)
    assert run.changes(given) == {"rollout.workflow_kwargs.a": [None, 5]}


def test_latest_names_the_newest_checkpoint_and_never_dangles(folder: Path, first: RunDirectory) -> None:
    link = first.checkpoints / "latest"
    assert link.readlink() == Path("step-000005")
    run = copy(first, folder, "latest")
    keep_checkpoints(run, 0, 2)
    assert not (run.checkpoints / "latest").exists(), "the link dangles"
    run = learn(configure(folder, "latest", **{"training.steps": 6, "checkpoint.keep": 1}))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-000000", "step-000006"]
    assert (run.checkpoints / "latest").readlink() == Path("step-000006")
    keep_checkpoints(run, 0)
    learn(configure(folder, "latest", **{"training.steps": 6, "checkpoint.keep": 1}))
    assert (run.checkpoints / "latest" / "model.safetensors").is_file()
