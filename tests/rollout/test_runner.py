"""The rollout loop: what is admitted, filed, rejected, evaluated, and made again after a kill."""

import asyncio
import json
import math
import time

import pytest

from clew import dotted
from clew.data import order
from clew.errors import ConfigError, DataError, RolloutError
from clew.inference.protocol import EngineUnreachable, RequestTooLong
from clew.record import rows as record_rows
from clew.record.rejected import count_rejected
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from clew.rollout.evaluation_summary import pass_at_k
from clew.waits import current_waits
from tests.record.test_run import SUMMARY
from tests.rollout.scripted import ROWS, Scripted, config_for, runner_for

CODE = "tests.rollout.user_code"
LOCAL = {"launch": {"mode": "local"}}


def publish(run, engine, version):
    engine.now = version
    run.inbox.publish(version)


def consume(run, version, groups):
    """Do what the trainer does with a batch, in its order."""
    run.steps.commit(version, {**SUMMARY, "groups": groups})


def drive(tmp_path, config, engine, versions, *, rows=ROWS, eval_rows=None):
    """Run rollout inline, and do what the trainer does for each of `versions`. Return the runner.

    The trainer publishes the version, waits for its evaluation and its batch, and commits the step.
    """
    runner = runner_for(tmp_path, config, engine, rows=rows, eval_rows=eval_rows)
    run = RunDirectory(config.run_path)

    async def trainer():
        for version in versions:
            publish(run, engine, version)
            if version:
                run.inbox.remove(run.steps.read(version - 1)["groups"])
            while config.evaluates(version) and run.evals.read(version) is None:
                assert await runner.advance()
            if version < config.training.steps:
                while len(run.inbox.names()) < config.rollout.batch_groups:
                    assert await runner.advance()
                consume(run, version, sorted(run.inbox.names())[: config.rollout.batch_groups])

    async def train_and_close():
        try:
            await trainer()
        finally:
            await runner.close()

    asyncio.run(train_and_close())
    return runner


def rejected(run):
    return {path.stem: record_rows.from_table(record_rows.read_table(path)) for path in run.rejected.glob("*.parquet")}


def test_inline_it_makes_exactly_what_the_run_consumes(tmp_path):
    config = config_for(tmp_path, rollout={"max_lag": 1})
    runner = drive(tmp_path, config, Scripted(abort_every=3), range(5))
    run = RunDirectory(config.run_path)
    assert run.finished_groups() == {f"g{number:06d}" for number in range(12)} == run.steps.consumed()
    assert run.inbox.names() == set() and run.inbox.running() == {}
    assert runner.facts["groups_finished"] == 12 and runner.facts["episodes"] == 24


def test_a_group_is_its_row_of_the_data_and_carries_what_training_needs(tmp_path):
    config = config_for(tmp_path)
    engine = Scripted()
    runner = runner_for(tmp_path, config, engine)
    run = RunDirectory(config.run_path)

    async def go():
        assert not await runner.advance()  # nothing is published
        publish(run, engine, 0)
        while len(run.inbox.names()) < 3:
            assert await runner.advance()
        assert not await runner.advance()  # admission is closed
        await runner.close()

    asyncio.run(go())
    for number in range(3):
        group = record_rows.from_table(run.inbox.scan()[f"g{number:06d}"])
        assert [row.id for row in group] == [f"g{number:06d}.e0.s0", f"g{number:06d}.e1.s0"]
        for row in group:
            assert row.data == ROWS[order(len(ROWS), number, config.seed)]
            assert row.loss_mask.sum() == row.interactions[0]["output_tokens"] > 0
            assert row.rewards == {"reward": row.reward} and row.error is None
            assert row.admitted_at <= row.started_at <= row.finished_at and row.consumed_at is None


def test_a_restarted_process_issues_the_lost_groups_again_and_no_others(tmp_path):
    config = config_for(tmp_path, rollout={"max_lag": 1})
    engine = Scripted()
    runner = runner_for(tmp_path, config, engine)
    run = RunDirectory(config.run_path)

    async def killed_after(groups):
        publish(run, engine, 0)
        while len(run.inbox.names()) < groups:
            assert await runner.advance()
        await runner.close()

    asyncio.run(killed_after(6))
    first = {name: table.column("input_ids") for name, table in run.inbox.scan().items()}
    # As if it had been killed before g000001 and g000004 were filed. What was rejected of g000004 goes, because that
    # group is made again; what was rejected of g000005 stays, because that group was filed.
    run.inbox.remove(["g000001", "g000004"])
    (run.inbox.folder / ".g000004.arrows.77").write_bytes(b"half")
    run.reject("g000004.e0", [])
    run.reject("g000005.e1", [])
    engine = Scripted()
    runner = runner_for(tmp_path, config, engine)
    assert not list(run.inbox.folder.glob(".*"))
    assert sorted(path.stem for path in run.rejected.iterdir()) == ["g000005.e1"]
    asyncio.run(killed_after(6))
    assert {request_id.partition(".")[0] for request_id, _, _ in engine.requests} == {"g000001", "g000004"}
    again = {name: table.column("input_ids") for name, table in RunDirectory(run.path).inbox.scan().items()}
    assert again == first, "the same prompt, name and seeds give the same tokens"


def test_admission_is_corrected_when_a_version_is_published_meanwhile(tmp_path):
    """The trainer publishes between rollout's reading of the version and its writing of running.json."""
    config = config_for(tmp_path)
    engine = Scripted()
    runner = runner_for(tmp_path, config, engine)
    run = RunDirectory(config.run_path)
    write = runner._run.inbox.set_running
    seen = []

    def set_running(admitted):
        if not seen:
            publish(run, engine, 2)
        seen.append(dict(admitted))
        write(admitted)

    runner._run.inbox.set_running = set_running  # type: ignore[method-assign]

    async def go():
        publish(run, engine, 1)
        assert await runner.advance()
        await runner.close()

    asyncio.run(go())
    assert set(seen[0].values()) == {1} and set(seen[1].values()) == {2}
    for table in run.inbox.scan().values():
        assert set(table.column("admitted_version").to_pylist()) == {2}


# Failure -------------------------------------------------------------------------------------------------------------


def test_one_episode_in_twenty_fails_and_the_run_goes_on(tmp_path, caplog):
    config = config_for(
        tmp_path,
        rollout={"workflow": f"{CODE}.Faulty", "workflow_kwargs": {"every": 20}, "n_samples": 4},
        training={"steps": 8},
    )
    drive(tmp_path, config, Scripted(), range(9))
    run = RunDirectory(config.run_path)
    failed = rejected(run)
    assert len(failed) == 4 and run.steps.count() == 8
    [warning] = [each.getMessage() for each in caplog.records]
    assert "failed: RuntimeError: tool 20 is broken" in warning and "rollout.max_failed_share" in warning
    assert count_rejected(run).lines() == [
        "4 episodes failed:",
        "  4 times RuntimeError: tool 20 is broken, or with other numbers",
    ]
    for name, (row,) in failed.items():
        assert row.episode_id == name and row.finish_reason == "error" and math.isnan(row.reward)
        assert len(row.input_ids) == 0
        assert row.error is not None and row.error.startswith("RuntimeError: tool") and "user_code.py" in row.error


# The numbers of groups follow from the statistical test that clew/rollout/failure_limit.py explains.
@pytest.mark.parametrize(
    ("every", "counts"),
    [
        (2, r"102 of the last 204 episodes failed \(34 groups\)"),
        (1, r"24 of the last 24 episodes failed \(4 groups\)"),
    ],
)
def test_when_too_many_fail_the_run_stops_with_the_commonest_error(tmp_path, every, counts):
    config = config_for(
        tmp_path,
        rollout={"workflow": f"{CODE}.Faulty", "workflow_kwargs": {"every": every}, "n_samples": 6},
        training={"steps": 20},
    )
    with pytest.raises(RolloutError, match=counts) as raised:
        drive(tmp_path, config, Scripted(), range(21))
    message = str(raised.value)
    assert "RuntimeError: tool" in message and " times)" in message and message.count("Traceback") == 1
    assert "rollout.max_failed_share=0.2 is the limit: repair the cause, or raise it" in message


def test_hopeless_runs_stop_whatever_share_is_allowed(tmp_path):
    config = config_for(
        tmp_path,
        rollout={
            "workflow": f"{CODE}.Faulty",
            "workflow_kwargs": {"every": 1},
            "max_failed_share": 1.0,
            "n_samples": 4,
        },
        training={"steps": 20},
    )
    with pytest.raises(RolloutError, match=r"56 of the last 56 episodes failed \(14 groups\)"):
        drive(tmp_path, config, Scripted(), range(21))


@pytest.mark.parametrize(("value", "says"), [
    ("nan", "returned nan"), ("inf", "returned inf"), ("none", "returned None"), ("text", "returned '0.5'"),
    ("empty", "returned {}"), ("large", "returned {'a': 1e+308, 'b': 1e+308}. The sum of its rewards is too large"),
])  # fmt: skip
def test_a_workflow_that_returns_no_number(tmp_path, value, says):
    config = config_for(tmp_path, rollout={"workflow": f"{CODE}.Returns", "workflow_kwargs": {"value": value}})
    with pytest.raises(RolloutError) as raised:
        drive(tmp_path, config, Scripted(), range(5))
    assert f"{CODE}.Returns.run_episode {says}" in str(raised.value)


@pytest.mark.parametrize(("error", "says"), [("exit", "SystemExit: 3"), ("cancelled", "CancelledError: ")])
@pytest.mark.parametrize("mode", ["inline", "local"])
def test_a_workflow_that_exits_or_lets_a_cancellation_out_is_a_failed_episode(tmp_path, error, says, mode):
    rollout = {"workflow": f"{CODE}.Leaves", "workflow_kwargs": {"error": error}, "n_samples": 4}
    config = config_for(tmp_path, rollout={**rollout, "max_failed_share": 1.0}, launch={"mode": mode})
    if mode == "local":
        assert in_process_mode(tmp_path, config, lambda run: len(run.inbox.names()) == 3)[0]
    else:
        drive(tmp_path, config, Scripted(), range(2))
    failed = [
        row for rows in rejected(RunDirectory(config.run_path)).values() for row in rows if not len(row.input_ids)
    ]
    assert failed and all(row.error is not None and row.error.startswith(says) for row in failed)


@pytest.mark.parametrize("name", ["leaves", "leaves_later"])
def test_a_reward_that_exits_is_a_failed_episode(tmp_path, name):
    config = config_for(tmp_path, rollout={"reward": f"{CODE}.{name}"})
    with pytest.raises(RolloutError, match="SystemExit: 3"):
        drive(tmp_path, config, Scripted(), range(5))


def test_a_workflow_that_never_asks_the_model(tmp_path):
    config = config_for(tmp_path, rollout={"workflow": f"{CODE}.Silent"})
    with pytest.raises(RolloutError, match=r"without a response of the model"):
        drive(tmp_path, config, Scripted(), range(5))


def test_without_a_reward_function_the_first_episode_ends_the_run(tmp_path):
    config = config_for(tmp_path, rollout={"reward": None})
    with pytest.raises(ConfigError, match=r"rollout.reward is not set"):
        drive(tmp_path, config, Scripted(), range(5))


def in_process_mode(tmp_path, config, until, *, engine=None, seconds=20.0):
    """Let `run()` go on with version 0 published, until a condition holds or it raises."""
    engine = engine or Scripted()
    runner = runner_for(tmp_path, config, engine)
    run = RunDirectory(config.run_path)
    publish(run, engine, 0)

    async def go():
        task = asyncio.create_task(runner.run())
        deadline = time.monotonic() + seconds
        try:
            while not (done := until(run)) and not task.done() and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if task.done():
                await task
            return done
        finally:
            task.cancel()
            await runner.close()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(go()), run


def test_an_episode_that_never_returns_is_cancelled_and_recorded(tmp_path):
    config = config_for(tmp_path, rollout={"workflow": f"{CODE}.Stuck", "episode_timeout_s": 0.2}, **LOCAL)
    with pytest.raises(RolloutError, match=r"cancelled after 0.2 s \(rollout.episode_timeout_s\)"):
        in_process_mode(tmp_path, config, lambda run: False)


@pytest.mark.parametrize("name", ["sleeps", "stuck_in_c"])
def test_a_reward_that_never_returns_is_an_error_and_never_a_zero(tmp_path, name):
    config = config_for(
        tmp_path,
        rollout={"reward": f"{CODE}.{name}", "reward_timeout_s": 0.2, "batch_groups": 2, "max_failed_share": 0.1},
        **LOCAL,
    )
    with pytest.raises(RolloutError, match=r"timed out after 0.2 s \(rollout.reward_timeout_s\)"):
        in_process_mode(tmp_path, config, lambda run: False)
    assert RunDirectory(config.run_path).inbox.names() == set()


def test_an_async_reward_has_the_time_limit_too(tmp_path):
    config = config_for(tmp_path, rollout={"reward": f"{CODE}.patient", "reward_timeout_s": 0.2}, **LOCAL)
    done, _ = in_process_mode(tmp_path, config, lambda run: len(run.inbox.names()) == 3)
    assert done
    config = config_for(tmp_path / "slow", rollout={"reward": f"{CODE}.patient", "reward_timeout_s": 0.2}, **LOCAL)
    runner = runner_for(tmp_path / "slow", config, Scripted(), rows=[row | {"sleep": 9} for row in ROWS])
    RunDirectory(config.run_path).inbox.publish(0)
    with pytest.raises(RolloutError, match="patient timed out"):
        asyncio.run(asyncio.wait_for(runner.run(), 20))


def test_the_process_ends_by_itself_after_the_last_step_and_says_what_it_waits_for(tmp_path):
    config = config_for(tmp_path, training={"steps": 2}, **LOCAL)
    engine = Scripted(delay_s=0.01)
    runner = runner_for(tmp_path, config, engine)
    run = RunDirectory(config.run_path)
    seen = []

    async def trainer():
        await asyncio.sleep(0.05)
        for version in range(3):
            seen.extend((wait.what, wait.unblocks) for wait in current_waits())
            publish(run, engine, version)
            if version:
                run.inbox.remove(run.steps.read(version - 1)["groups"])
            if version < 2:
                while len(run.inbox.names()) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.3)
                closed = [wait for wait in current_waits() if wait.what == "admission"]
                assert closed and closed[0].as_dict()["numbers"].startswith(
                    f"admission closed: 3 waiting, 0 running, lag limit 0 at version {version}"
                )
                consume(run, version, sorted(run.inbox.names()))

    async def both():
        await asyncio.wait_for(asyncio.gather(runner.run(), trainer()), 20)
        await runner.close()

    asyncio.run(both())
    assert ("the first weights", "the trainer") in seen
    assert run.steps.consumed() == {f"g{number:06d}" for number in range(6)}


@pytest.mark.parametrize(("with_evaluation", "asked"), [(False, 6), (True, 7)])
def test_episodes_whose_server_is_away_wait_for_the_model(tmp_path, with_evaluation, asked):
    class Away(Scripted):
        async def generate(self, request):
            raise EngineUnreachable("127.0.0.1:1", "the connection was refused")

        async def version(self):
            await asyncio.sleep(3600)

    evaluates = {"eval": {"path": "eval.jsonl", "every_steps": 3}} if with_evaluation else {}
    config, engine = config_for(tmp_path, **LOCAL, **evaluates), Away()
    runner = runner_for(tmp_path, config, engine, eval_rows=ROWS[:1])
    what = "running groups" + " and the evaluation of version 0" * with_evaluation

    async def numbers():
        publish(RunDirectory(config.run_path), engine, 0)
        running = asyncio.ensure_future(runner.run())
        await asyncio.sleep(0.2)
        [wait] = [wait for wait in current_waits() if wait.what == what]
        text = wait.numbers_now()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()
        return text

    assert f"; {asked} episodes: {asked} requests wait for the model, 0 for the reward, 0 in" in asyncio.run(numbers())


def test_admission_is_closed_when_the_last_groups_of_the_run_are_made(tmp_path):
    config = config_for(tmp_path, training={"steps": 1}, rollout={"max_lag": 1}, **LOCAL)
    said = []

    def waits(run):
        said[:] = [wait.as_dict()["numbers"] for wait in current_waits() if wait.what == "admission"]
        return said

    assert in_process_mode(tmp_path, config, waits)[0]
    assert said[0].startswith("admission closed: 3 waiting, 0 running, lag limit 1 at version 0")


# What can never work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rollout", "error", "says"), [
    ({"batch_groups": 13}, DataError, "rollout.batch_groups is 13, and rows.jsonl has 12 rows"),
    ({"workflow": f"{CODE}.Fawlty"}, ConfigError, "Did you mean 'Faulty'"),
    ({"workflow": "clew.rollout.workflow.SingleTurn"}, ConfigError, "no module .*Did you mean 'workflows'"),
    ({"workflow": "SingleTurn"}, ConfigError, r"expected a dotted path such as my_module\.SingleTurn"),
    ({"reward": "../rewards.py"}, ConfigError, r"expected a dotted path such as my_module\.name"),
    ({"workflow": f"{CODE}.NotAWorkflow"}, ConfigError, "async def run_episode"),
    ({"workflow_kwargs": {"enable_thinkin": True}}, ConfigError, "Did you mean 'enable_thinking'"),
    ({"workflow": f"{CODE}.Returns"}, ConfigError, r"needs the argument 'value'"),
    ({"workflow": f"{CODE}.Opens"}, ConfigError, r"Opens\(\) raised FileNotFoundError at .*user_code\.py:\d+: "),
    ({"reward": "tests.rollout.user_cod.exact"}, ConfigError, "Did you mean 'user_code'"),
])  # fmt: skip
def test_what_can_never_work_is_refused_at_start(tmp_path, rollout, error, says):
    with pytest.raises(error, match=says):
        runner_for(tmp_path, config_for(tmp_path, rollout=rollout), Scripted())


@pytest.mark.parametrize(("content", "said"), [
    ("def always(completion, data)\n    return 1\n", r"my_broken_rewards\.py:1 is not valid Python: "),
    ("import nowhere_at_all\n", r"raised ModuleNotFoundError at .*my_broken_rewards\.py:1: No module named 'nowhere"),
    ("1 / 0\n", r"raised ZeroDivisionError at .*my_broken_rewards\.py:1: division"),
    ("raise SystemExit(3)\n", r"raised SystemExit at .*my_broken_rewards\.py:1: 3"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported_is_told_with_its_line(tmp_path, monkeypatch, content, said):
    (tmp_path / "my_broken_rewards.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        dotted.load("my_broken_rewards.always", "rollout.reward")


def test_a_reward_in_the_current_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text("def always(completion, data):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    config = config_for(tmp_path, rollout={"reward": "my_own_rewards.always"})
    drive(tmp_path, config, Scripted(), [0])
    assert RunDirectory(config.run_path).steps.count() == 1


# Filters -------------------------------------------------------------------------------------------------------------


def test_groups_whose_rewards_are_all_equal_are_refilled(tmp_path):
    config = config_for(
        tmp_path,
        rollout={
            "drop_equal_rewards": True,
            "n_samples": 3,
            "workflow": f"{CODE}.Faulty",
            "workflow_kwargs": {"every": 1000},
        },
    )
    drive(tmp_path, config, Scripted(), range(5))
    run = RunDirectory(config.run_path)
    filtered = rejected(run)
    assert filtered and run.steps.count() == 4
    assert run.steps.consumed().isdisjoint(filtered)
    assert len(run.steps.consumed() | set(filtered)) == 12 + len(filtered)
    for group in filtered.values():
        assert len(group) == 3 and len({row.reward for row in group}) == 1
        assert {row.error for row in group} == {f"filtered: all rewards equal ({group[0].reward:g})"}


def test_a_filter_that_rejects_everything_stops_the_run(tmp_path):
    config = config_for(tmp_path, rollout={"drop_equal_rewards": True, "batch_groups": 1, "reward": f"{CODE}.patient"})
    with pytest.raises(RolloutError, match=r"rejected the last 40 groups.*40 groups all 1"):
        drive(tmp_path, config, Scripted(), [0])


def test_the_wait_says_that_the_filter_rejects_everything(tmp_path):
    rollout = {"drop_equal_rewards": True, "batch_groups": 2, "reward": f"{CODE}.patient"}
    config = config_for(tmp_path, rollout=rollout, **LOCAL)
    run, engine, seen = RunDirectory(config.run_path), Scripted(turns=5), []

    async def scenario():
        runner = runner_for(tmp_path, config, engine)
        publish(run, engine, 0)
        work = asyncio.ensure_future(runner.run())
        while not work.done():
            await asyncio.sleep(0)
            seen.extend((wait.what, wait.numbers_now()) for wait in current_waits() if "group" in wait.what)
        await runner.close()
        return work.exception()

    assert isinstance(asyncio.run(scenario()), RolloutError)
    first = next(number for number, (what, _) in enumerate(seen) if what == "a group that the filter does not reject")
    assert first > 0 and "the filter rejects everything" not in seen[0][1]
    assert "the filter rejects everything: rollout.drop_equal_rewards rejected the last " in seen[-1][1]
    assert "groups all 1)" in seen[-1][1] and "A higher sampling.temperature, more rollout.n_samples" in seen[-1][1]


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 1, 4) == 1.0


def test_evaluation_is_due_at_the_first_every_nth_and_the_last_version(tmp_path):
    config = config_for(tmp_path, eval={"path": "eval.jsonl", "every_steps": 3}, training={"steps": 8})
    assert [version for version in range(9) if config.evaluates(version)] == [0, 3, 6, 8]
    assert not config_for(tmp_path).evaluates(0)


def test_evaluations_are_by_one_version_and_filed_with_their_summary(tmp_path):
    config = config_for(
        tmp_path,
        eval={"path": "eval.jsonl", "every_steps": 3, "n_samples": 4, "temperature": 0.7},
        rollout={"workflow": f"{CODE}.Faulty", "workflow_kwargs": {"every": 1000}, "max_lag": 1},
    )
    engine = Scripted()
    drive(tmp_path, config, engine, range(5), eval_rows=ROWS[:2])
    run = RunDirectory(config.run_path)
    assert [summary["version"] for summary in run.evals.read_all()] == [0, 3, 4]
    summary = run.evals.read(3)
    assert summary is not None
    assert set(summary) >= {"pass@1", "pass@2", "pass@4", "reward", "rewards", "length", "truncated", "failed"}
    assert summary["prompts"] == 2 and summary["episodes"] == 8 and summary["failed"] == 0
    table = record_rows.from_table(record_rows.read_table(run.evals.folder / "version-000003.parquet"))
    assert [row.episode_id for row in table[:5]] == [
        "v000003.g000000.e0",
        "v000003.g000000.e1",
        "v000003.g000000.e2",
        "v000003.g000000.e3",
        "v000003.g000001.e0",
    ]
    assert {int(version) for row in table for version in row.versions[row.loss_mask]} == {3}
    assert summary["pass@1"] == pytest.approx(sum(row.reward > 0.5 for row in table) / 8) == summary["reward"]
    temperatures = {params.temperature for name, _, params in engine.requests if name.startswith("v")}
    assert temperatures == {0.7}


def test_an_evaluation_runs_no_more_episodes_than_the_engine_takes_at_a_time(tmp_path):
    class Counting(Scripted):
        now_running = most = 0

        async def generate(self, request):
            counts = request.id.startswith("v")
            self.now_running += counts
            self.most = max(self.most, self.now_running)
            completion = await super().generate(request)
            self.now_running -= counts
            return completion

    config = config_for(tmp_path, eval={"path": "eval.jsonl", "n_samples": 2}, inference={"max_running": 3})
    engine = Counting()
    drive(tmp_path, config, engine, [0], eval_rows=ROWS[:5])
    assert engine.most == 3, "the time limits of the others would run while they wait for the engine"
    summary = RunDirectory(config.run_path).evals.read(0)
    assert summary is not None and summary["episodes"] == 10


def test_a_failed_episode_does_not_end_an_evaluation(tmp_path):
    config = config_for(
        tmp_path,
        eval={"path": "eval.jsonl"},
        rollout={"workflow": f"{CODE}.Faulty", "workflow_kwargs": {"every": 7}, "max_failed_share": 1.0},
    )
    drive(tmp_path, config, Scripted(), [0], eval_rows=ROWS[:8])
    summary = RunDirectory(config.run_path).evals.read(0)
    assert summary is not None and summary["failed"] == 2


def test_an_evaluation_of_which_all_fails_is_on_record_and_not_complete(tmp_path, caplog):
    config = config_for(tmp_path, eval={"path": "eval.jsonl"}, rollout={"reward": f"{CODE}.returns_column"})
    run = RunDirectory(config.run_path)
    rows, eval_rows = ([row | {"returns": value} for row in ROWS[:4]] for value in ("1", "None"))
    with pytest.raises(RolloutError, match=f"on record in {run.evals.folder}"):
        drive(tmp_path, config, Scripted(), [0], rows=rows, eval_rows=eval_rows)
    failed = record_rows.from_table(record_rows.read_table(run.evals.folder / "version-000000.parquet"))
    assert len(failed) == 4 and all("returned None" in (row.error or "") for row in failed)
    assert run.evals.read(0) is None, "it is made again once the cause is repaired"
    assert f"Failed episodes are kept in {run.evals.folder}" in caplog.text


def test_an_evaluation_by_two_versions_is_an_error(tmp_path):
    class Moves(Scripted):
        async def generate(self, request):
            self.now = 1
            return await super().generate(request)

    config = config_for(tmp_path, eval={"path": "eval.jsonl"})
    with pytest.raises(RolloutError, match="the evaluation of version 0 has tokens by version 1"):
        drive(tmp_path, config, Moves(), [0], eval_rows=ROWS[:2])


def test_an_evaluation_is_left_out_when_its_weights_were_replaced(tmp_path, caplog):
    config = config_for(tmp_path, eval={"path": "eval.jsonl"})
    run = RunDirectory(config.run_path)

    class Replaced(Scripted):
        async def generate(self, request):
            run.announce_weights(WeightRef(version=1, path="weights", digest="00"))
            self.now = 1
            return await super().generate(request)

    engine = Replaced()
    runner = runner_for(tmp_path, config, engine, eval_rows=ROWS[:2])

    async def go():
        publish(run, engine, 0)
        while await runner.advance():
            assert len(engine.requests) == 8, "3 groups of 2 episodes, and one evaluation of 2"
        await runner.close()

    asyncio.run(go())
    assert run.evals.read(0) is None and len(run.inbox.names()) == 3
    assert "the evaluation of version 0 is left out: its weights were replaced" in caplog.text


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_retry_that_does_not_fit_is_not_made_and_the_episode_is_kept(tmp_path, discount):
    class Short(Scripted):
        async def generate(self, request):
            if len(request.input_ids) > 30:
                raise RequestTooLong("the prompt has more than 30 tokens")
            return await super().generate(request)

    retries = {"max_turns": 9, "discount": discount}
    config = config_for(
        tmp_path,
        rollout={
            "workflow": "clew.rollout.workflows.MultiTurnRetry", "workflow_kwargs": retries, "reward": f"{CODE}.patient"
        },
    )  # fmt: skip
    config.rollout.workflow_kwargs["threshold"] = 2.0
    drive(tmp_path, config, Short(), range(2))
    run = RunDirectory(config.run_path)
    for table in run.inbox.scan().values():
        for row in record_rows.from_table(table):
            turns = len(row.interactions)
            assert turns < 9 and row.reward == discount ** (turns - 1)
    assert not rejected(run)


def test_two_inline_runs_consume_the_same_groups(tmp_path):
    groups = []
    for trial in ("a", "b"):
        config = config_for(
            tmp_path / trial,
            eval={"path": "eval.jsonl", "every_steps": 2},
            rollout={"workflow": "clew.rollout.workflows.MultiTurnRetry"},
        )
        drive(tmp_path / trial, config, Scripted(turns=5, abort_every=4), range(5), eval_rows=ROWS[:3])
        run = RunDirectory(config.run_path)
        groups.append([json.loads(line)["groups"] for line in run.steps.index_path.read_text().splitlines()])
    assert groups[0] == groups[1]


def test_with_the_embedded_engine_two_inline_runs_are_equal_token_for_token(tmp_path):
    """Check, too, that each recorded logprob is the model's own for that token after exactly the tokens before it."""
    import torch

    from clew.inference.embedded import build_engine
    from clew.inference.local import LocalEngine
    from tests.models import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    runs = []
    for trial in ("a", "b"):
        config = config_for(
            tmp_path / trial,
            rollout={"workflow": "clew.rollout.workflows.MultiTurnRetry"},
            training={"steps": 1},
            sampling={"temperature": 0.8},
        )
        model = tiny_model(tmp_path / "model")
        engine = LocalEngine(build_engine(model, tokenizer, max_running=8, cache_gib=0.05))
        runner = runner_for(tmp_path / trial, config, engine)
        run = RunDirectory(config.run_path)

        async def go(runner=runner, run=run, engine=engine):
            run.inbox.publish(0)
            while len(run.inbox.names()) < 3:
                assert await runner.advance()
            await runner.close()
            await engine.close()

        asyncio.run(go())
        runs.append([row for _, table in sorted(run.inbox.scan().items()) for row in record_rows.from_table(table)])
    model = tiny_model(tmp_path / "model")
    for first, second in zip(*runs, strict=True):
        assert first.id == second.id and len(first.interactions) == 2
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures"):
            assert getattr(first, name).tobytes() == getattr(second, name).tobytes(), name
        with torch.no_grad():
            logits = model(torch.tensor(first.input_ids[None]).long()).logits[0, :-1] / 0.8
        scored = logits.log_softmax(-1).gather(-1, torch.tensor(first.input_ids[1:, None]).long())[:, 0].numpy()
        assert abs(scored - first.logprobs[1:])[first.loss_mask[1:]].max() < 1e-4
