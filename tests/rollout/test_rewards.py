"""Reward functions: both signatures, what they may return, and worker processes that are killed for real."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from clew.errors import ConfigError, EpisodeError
from clew.rollout.reward_function import RewardFunction, by_name, checked, reward_of_agent, total
from clew.rollout.reward_pool import RewardPool

HERE = str(Path(__file__).parent)
CODE = "tests.rollout.user_code"


def living_workers() -> list[psutil.Process]:
    """The living reward workers of this process."""
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any("reward_worker" in part for part in child.cmdline())]


def reward(name):
    return RewardFunction(f"{CODE}.{name}", "prompt")


def test_a_plain_function_gives_a_number_or_named_numbers():
    assert reward("exact")("5", {"answer": 5}) == 1.0
    both = reward("named")("5", {"answer": 5})
    assert isinstance(both, dict) and both == {"right": 1.0, "short": 1.0}
    assert {type(value) for value in both.values()} == {float}
    assert total(both) == 2.0 and total(0.5) == 0.5
    assert by_name(0.5) == {"reward": 0.5} and by_name(both) is both


def test_trls_signature_is_adapted():
    assert reward("trl_style")("5", {"prompt": "2+3=", "answer": "5"}) == 1.0
    assert reward("trl_chat")("right", {"prompt": [{"role": "user", "content": "?"}]}) == 1.0
    assert reward("trl_chat")("wrong", {"prompt": [{"role": "user", "content": "?"}]}) == 0.0


@pytest.mark.parametrize("value", ["True", "3", "np.float32(3)", "np.int64(3)", "np.bool_(True)", "np.array([3.0])"])
def test_scalars_are_numbers(value):
    assert reward("returns_column")("", {"returns": value}) in (1.0, 3.0)


@pytest.mark.parametrize(
    "value",
    [
        "nan",
        "inf",
        "-inf",
        "'0.5'",
        "None",
        "[1.0]",
        "{}",
        "{'a': nan}",
        "{1: 2}",
        "np.array([1.0, 2.0])",
        "1j",
        "np.float64('nan')",
    ],
)
def test_what_is_no_finite_number_is_an_error_that_names_function_value_and_row(value):
    with pytest.raises(EpisodeError) as raised:
        reward("returns_column")("", {"returns": value, "id": "row 17"})
    message = str(raised.value)
    assert f"{CODE}.returns_column returned" in message and "expected" in message and "row 17" in message


def test_torch_scalars_are_numbers():
    import torch

    assert checked(torch.tensor(0.5), "w") == 0.5
    assert checked({"a": torch.tensor([2])}, "w") == {"a": 2.0}


def test_what_cannot_be_a_reward_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"no 'exakt'. Did you mean 'exact'"):
        reward("exakt")
    with pytest.raises(ConfigError, match="cannot be called as"):
        reward("takes_one")
    with pytest.raises(ConfigError, match="expected a function"):
        reward("Silent")


# Worker processes ----------------------------------------------------------------------------------------------------


async def in_pool(name, jobs, workers=1, timeout_s=20.0):
    """The answers to jobs that are handed in side by side, exceptions included; nothing is left running."""
    pool = RewardPool(f"{CODE}.{name}", "prompt", workers=workers, timeout_s=timeout_s)
    try:
        return await asyncio.gather(*(pool(*job) for job in jobs), return_exceptions=True)
    finally:
        pool.close()
        assert not living_workers()


def test_a_pool_answers_each_caller():
    jobs = [(str(i % 3), {"answer": i % 2}) for i in range(60)]
    assert asyncio.run(in_pool("exact", jobs, workers=2)) == [float(i % 3 == i % 2) for i in range(60)]


def test_a_large_row_passes():
    assert asyncio.run(in_pool("exact", [("1", {"answer": 1, "context": "x" * 3_000_000})])) == [1.0]


def test_an_exception_comes_back_with_its_traceback_and_prints_do_no_harm(capfd):
    first, second = asyncio.run(in_pool("raises", [("x", {}), ("y", {})]))
    assert isinstance(first, EpisodeError) and isinstance(second, EpisodeError)
    assert str(first).startswith(f"reward {CODE}.raises raised ValueError: no reward for 'x'\n")
    assert "user_code.py" in str(first)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("about to raise") == 2


@pytest.mark.parametrize("name", ["sleeps", "stuck_in_c"])
def test_a_reward_that_never_returns_is_killed_and_replaced(name):
    began = time.monotonic()
    answers = asyncio.run(in_pool(name, [("", {}), ("", {})], timeout_s=0.5))
    assert time.monotonic() - began < 8
    for answer in answers:
        assert isinstance(answer, EpisodeError)
        assert f"{name} timed out after 0.5 s (rollout.reward_timeout_s)" in str(answer)


@pytest.mark.parametrize(("name", "how"), [("dies", "signal SIGKILL"), ("leaves", "exit code 3")])
def test_a_worker_that_dies_is_replaced(name, how):
    for answer in asyncio.run(in_pool(name, [("", {}), ("", {})])):
        assert isinstance(answer, EpisodeError) and how in str(answer)


@pytest.mark.parametrize("returned", [{"": 1.0}, {"g0.e0.i0": 1.0, "correct": 1.0}])
def test_an_agents_reward_must_name_a_response_of_its_episode(returned):
    with pytest.raises(EpisodeError, match="is not the id of any response"):
        reward_of_agent(returned, "mine.Agent.run", ids={"g0.e0.i0"}, own={})


def test_a_function_whose_child_comes_back_from_it_gives_each_row_its_own_reward():
    [first, second] = asyncio.run(in_pool("forks", [("1", {}), ("2", {})]))
    assert (first, second) == (1.0, 2.0)


def test_a_replaced_worker_that_imports_an_edited_file_is_announced(tmp_path, monkeypatch, caplog):
    file = tmp_path / "edited_rewards.py"
    monkeypatch.syspath_prepend(tmp_path)
    source = "import os\ndef one(completion, data):\n    return 1.0 if completion else os._exit(3)\n"

    async def edit_and_die():
        pool = RewardPool("edited_rewards.one", "prompt", workers=1, timeout_s=20)
        try:
            before = await pool("x", {})
            await asyncio.gather(pool("", {}), return_exceptions=True)
            assert not caplog.messages
            file.write_text(source.replace("1.0", "20.0"))
            await asyncio.gather(pool("", {}), return_exceptions=True)
            return before, await pool("x", {})
        finally:
            pool.close()

    file.write_text(source)
    assert asyncio.run(edit_and_die()) == (1.0, 20.0)
    (message,) = caplog.messages
    assert f"{file}, the file of rollout.reward=edited_rewards.one, has changed (digest " in message


def test_what_a_worker_that_died_had_started_is_killed(tmp_path):
    [answer] = asyncio.run(in_pool("leaves_a_child", [("", {"note_pid": str(tmp_path / "pid")})]))
    assert isinstance(answer, EpisodeError) and "exit code 3" in str(answer)
    gone = int((tmp_path / "pid").read_text())
    _, alive = psutil.wait_procs([psutil.Process(gone)] if psutil.pid_exists(gone) else [], timeout=5)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_a_cancelled_caller_frees_its_place():
    async def cancel_first():
        pool = RewardPool(f"{CODE}.sleeps", "prompt", workers=1, timeout_s=60)
        try:
            stuck = asyncio.create_task(pool("", {}))
            queued = asyncio.create_task(pool("", {}))
            await asyncio.sleep(0.5)
            stuck.cancel()
            queued.cancel()
            return await asyncio.wait_for(pool("", {"sleep": 0}), 10)
        finally:
            pool.close()

    assert asyncio.run(cancel_first()) == 1.0


@pytest.mark.parametrize("name", ["sleeps", "stuck_in_c"])
def test_workers_die_with_their_parent(name, tmp_path):
    note = tmp_path / "pid"
    program = (
        "import asyncio, sys\n"
        "from clew.rollout.reward_pool import RewardPool\n"
        "async def main():\n"
        f"    pool = RewardPool('{CODE}.{name}', 'prompt', workers=2, timeout_s=600)\n"
        f"    await asyncio.gather(pool('', {{'note_pid': '{note}'}}), pool('', {{}}))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    worker = psutil.Process(int(note.read_text()))
    assert len(psutil.Process(parent.pid).children()) == 2
    parent.kill()
    parent.wait()
    worker.wait(timeout=5)


def test_a_worker_imports_no_torch():
    async def loaded() -> set[str]:
        pool = RewardPool(f"{CODE}.exact", "prompt", workers=1, timeout_s=20)
        try:
            await pool("5", {"answer": 5, "prompt": "2+3="})
            (worker,) = living_workers()
            return {os.path.basename(region.path) for region in worker.memory_maps()}  # noqa: PTH119
        finally:
            pool.close()

    assert not any("torch" in name for name in asyncio.run(loaded()))
