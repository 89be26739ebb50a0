"""The run directory: what each crash leaves behind, locks, servers, a full disk."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.config import Config
from clew.errors import RecordError
from clew.record import rows
from clew.record.batch_digest import digest_rows
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.rejected import count_rejected
from clew.record.run import RunDirectory, Server, open_run
from tests.record.test_rows import a_sequence, same

SUMMARY: dict[str, Any] = {
    "groups": ["g000000"],
    "versions": [0, 0],
    "digests": {"data": "00", "gradients": ["00"], "weights": "00"},
    "tensors": {"gradients": ["00" * 8], "weights": "00" * 8},
    "metrics": {"loss": 0.5, "grad_norm": 1},
    "plan": [[[0]]],
    "environment": {"ranks": 1, "tp": 1, "threads": 1, "device": "cpu", "packages": {"torch": "2.9"}},
    "config": {"training": {"lr": 1e-3}, "algorithm": {}},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def commit(run: RunDirectory, step: int) -> None:
    group = f"g{step:06d}"
    run.steps.write_data(step, rows.to_table([a_sequence(f"{group}.e0.s0")]))
    run.steps.commit(step, {**SUMMARY, "groups": [group]})


def test_a_checkpoint_may_become_complete_while_it_is_measured(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scandir = run.checkpoints / ".step-000001.123", os.scandir
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert run.unfinished_checkpoint() >= 7

    def complete(path: Path) -> Any:
        if path == folder:
            folder.rename(run.checkpoint(1))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", complete)
    assert run.unfinished_checkpoint() == 0


def test_a_group_waits_in_the_inbox_until_it_is_removed(run: RunDirectory) -> None:
    group = [a_sequence(f"g000004.e{i}.s0") for i in range(2)]
    run.inbox.put("g000004", group)
    run.inbox.set_running({"g000004": 1, "g000005": 2})
    assert run.inbox.names() == {"g000004"}
    assert run.inbox.running() == {"g000005": 2}
    read = rows.from_table(run.inbox.scan()["g000004"])
    assert all(same(a, b) for a, b in zip(group, read, strict=True))
    run.inbox.remove(["g000004"])
    assert run.inbox.scan() == {}


@given(st.data())
def test_a_waiting_group_that_was_altered_is_named(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        inbox = RunDirectory(Path(folder)).inbox
        inbox.put("g000004", [a_sequence("g000004.e0.s0")])
        written = bytearray(inbox.path("g000004").read_bytes())
        place, bit = data.draw(st.integers(0, len(written) - 1)), data.draw(st.integers(0, 7))
        if data.draw(st.booleans()):
            written[place] ^= 1 << bit
        else:
            del written[place:]
        inbox.path("g000004").write_bytes(written)
        with pytest.raises(RecordError, match=r"g000004\.arrows cannot be read .* remove it, and rollout makes"):
            inbox.scan()


def test_what_is_published(run: RunDirectory) -> None:
    assert run.inbox.published() is None
    run.inbox.publish(3)
    assert run.inbox.published() == 3


def test_a_step_counts_once_its_json_is_there(run: RunDirectory) -> None:
    commit(run, 0)
    run.steps.write_data(1, rows.to_table([a_sequence("g000001.e0.s0")]))
    assert run.steps.count() == 1
    assert run.steps.consumed() == {"g000000"}
    assert run.steps.pending_groups() == {"g000001"}
    assert run.finished_groups() == {"g000000", "g000001"}
    for step in (1, -1):
        with pytest.raises(RecordError, match=f"step {step} was not committed; the next step is 1"):
            run.steps.read(step)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tensors", None, "the field tensors is missing"),
        ("tensors.weights", "zz", "tensors.weights is 'zz'; expected "),
        ("metrics", None, "the field metrics is missing"),
        ("metrics.loss", "null", "metrics.loss is None; expected a number"),
        ("metrics.entropy", "0.5", "metrics.entropy is '0.5'; expected a number"),
        ("metrics.grad_norm", None, "the field metrics.grad_norm is missing"),
        ("environment", None, "the field environment is missing"),
        ("environment.ranks", "x", "environment.ranks is 'x'; expected a whole number"),
        ("environment.threads", 0, "environment.threads is 0; expected a number greater than"),
        ("environment.packages", "null", "environment.packages is None; expected "),
        ("plan", None, "the field plan is missing"),
        ("plan", "x", "plan is 'x'; expected a list"),
        ("config", None, "the field config is missing"),
        ("digests.weights", None, "the field digests.weights is missing"),
        ("step", 1, "step is 1; expected 0"),
    ],
)
def test_what_a_step_must_say(run: RunDirectory, key: str, value: Any, said: str) -> None:
    """value: None for no such key."""
    commit(run, 0)
    path = run.steps.json_path(0)
    summary = json.loads(path.read_text())
    *parents, name = key.split(".")
    inside = summary
    for parent in parents:
        inside = inside[parent]
    inside.pop(name, None)
    inside |= {} if value is None else {name: None if value == "null" else value}
    path.write_text(json.dumps(summary))
    with pytest.raises(RecordError, match=rf"step-000000\.json: {said}.* It was altered .* restore it from a copy"):
        run.steps.read(0)


def test_what_another_trainer_does_not_know(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.describe(None, trainer="another")
    run.steps.commit(0, {"groups": [], "versions": [0, 0], "digests": {}, "environment": {"trainer": "another"}})
    run.steps.commit(1, {"groups": [], "versions": [0, 0], "digests": {}, "metrics": {"loss": "x"}})
    assert run.steps.read(0)["groups"] == []
    with pytest.raises(RecordError, match=r"step-000001\.json: metrics.loss is 'x'; expected"):
        run.steps.read(1)


def test_a_format_that_is_none_is_told(run: RunDirectory) -> None:
    commit(run, 0)
    path = run.steps.json_path(0)
    path.write_text(path.read_text().replace('"clew_format": 4', '"clew_format": "x"'))
    with pytest.raises(RecordError, match=r"step-000000\.json is of format 'x': it was altered"):
        run.steps.read(0)


def test_stages_that_nobody_writes_are_told(run: RunDirectory) -> None:
    for rank, row in enumerate([a_sequence("a"), a_sequence("b")]):
        run.steps.write_stages(0, rank, digest_rows([row]), {"loss": [np.ones(2, np.float32)]})
    assert set(run.steps.read_stages(0, [a_sequence("a"), a_sequence("b")]).arrays["loss"]) == {"a", "b"}
    with pytest.raises(RecordError, match=r"step-000000\.parquet has the sequence c, and .*rank-0\.parquet does not"):
        run.steps.read_stages(0, [a_sequence("a"), a_sequence("c")])
    path = run.steps.stage_path(0, 1)
    table = rows.read_table(path)
    for names, said in {
        ("id", "digest", "origin", "lots"): "the column 'loss' is absent",
        ("it", "digest", "origin", "loss"): "the column 'it' is string",
        ("id", "loss", "origin", "digest"): "the column 'loss' is uint64",
        ("id", "digest", "loss", "lots"): "the column 'loss' is uint64",
    }.items():
        rows.write_table(path, table.rename_columns(list(names)))
        with pytest.raises(RecordError, match=rf"rank-1\.parquet was altered after it was written: {said}"):
            run.steps.read_stages(0)


def test_the_index_follows_from_the_steps(run: RunDirectory) -> None:
    for step in range(3):
        commit(run, step)
    whole = run.steps.index_path.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    altered = second[:12] + bytes([second[12] ^ 0x80]) + second[13:]  # no UTF-8 any more
    renamed = second.replace(b"groups", b"croups")
    for left in (
        b"",
        first,
        first + second[:9],
        first + b"garbage\n" + third,
        first + altered + third,
        first + renamed + third,
        first + third,
        first + b"[]\n",
        whole[:-5],
        whole + third,
    ):
        run.steps.index_path.write_bytes(left)
        assert run.steps.count() == 3
        assert [entry["groups"] for entry in run.steps.index()] == [["g000000"], ["g000001"], ["g000002"]]
        run.steps.repair()
        assert run.steps.index_path.read_bytes() == whole


def test_half_written_files_are_invisible_and_removed(run: RunDirectory) -> None:
    (run.steps.folder / ".step-000000.json.77").write_text("{")
    (run.inbox.folder / ".g000001.arrows.77").write_bytes(b"PAR")
    assert run.inbox.names() == set() and run.steps.count() == 0
    run.clean_after_trainer()
    assert (run.inbox.folder / ".g000001.arrows.77").exists()  # rollout's, which may still be writing it
    run.clean_after_rollout()
    assert sorted(path.name for path in run.inbox.folder.iterdir()) == []


def test_stages_open_as_lists(run: RunDirectory) -> None:
    batch = [a_sequence("a"), a_sequence("b")]
    run.steps.write_stages(0, 0, digest_rows(batch), {"advantages": [np.ones(2, np.float32), np.zeros(3, np.float32)]})
    table = rows.read_table(run.steps.stage_path(0, 0)).to_pydict()
    digests = digest_rows(batch)
    data, origins = zip(*digests.values(), strict=True)
    expected = {"id": ["a", "b"], "digest": [*data], "origin": [*origins], "advantages": [[1, 1], [0, 0, 0]]}
    assert table == expected
    stages = run.steps.read_stages(0)
    assert stages.digests == digests
    path = run.steps.stage_path(0, 0)
    older = rows.read_table(path).drop_columns(["origin"])
    rows.write_table(path, older)
    with pytest.raises(RecordError, match="the column 'origin' is absent"):
        run.steps.read_stages(0)
    assert stages.arrays["advantages"]["b"].tolist() == [0, 0, 0]


def test_pruning_keeps_what_was_committed(run: RunDirectory) -> None:
    for step in range(4):
        commit(run, step)
    run.steps.prune(before=3)
    assert not run.steps.has_data(2) and run.steps.has_data(3)
    assert run.steps.read(0)["groups"] == ["g000000"] and run.steps.count() == 4


def test_pruning_leaves_copies_that_a_user_made(run: RunDirectory) -> None:
    commit(run, 0)
    copies = [run.steps.folder / name for name in ("step-000000.bak.parquet", "step-000000 (1).parquet")]
    for copy in copies:
        shutil.copy(run.steps.data_path(0), copy)
    run.steps.prune(before=1)
    assert not run.steps.has_data(0) and all(copy.exists() for copy in copies)


def test_an_evaluation_without_a_result_is_never_the_best(run: RunDirectory) -> None:
    run.evals.write(0, [], {"pass@1": None, "reward": None})
    run.evals.write(1, [], {"pass@1": 0.0, "reward": -0.5})
    assert run.evals.best([0, 1], []) == 1
    assert run.evals.best([0], []) == 0


def test_evaluations_that_measured_something_else_are_not_compared(run: RunDirectory) -> None:
    changes = [{"step": 2, "fields": {"eval.path": ["easy.jsonl", "hard.jsonl"]}}]
    for version, share in ((0, 0.5), (2, 0.9), (4, 0.2), (6, 0.3)):
        run.evals.write(version, [], {"pass@1": share, "reward": share})
    assert run.evals.best([0, 2, 4, 6], changes) == 6
    assert run.evals.best([0, 2], changes) == 2


def test_an_image_that_is_shown_while_unused_ones_are_searched_is_kept(run: RunDirectory) -> None:
    shown, unused = run.media.put(b"\x89PNG shown"), run.media.put(b"\x89PNG unused")
    for name in (shown, unused):
        os.utime(run.media.path(name), (0, 0))

    def referred() -> set[str]:
        run.media.put(b"\x89PNG shown")  # by rollout, in another process
        return set()

    run.media.prune(referred)
    assert run.media.path(shown).exists() and not run.media.path(unused).exists()


def test_a_failed_episode_that_goes_while_images_are_searched_does_no_harm(run: RunDirectory) -> None:
    os.utime(run.media.path(run.media.put(b"\x89PNG unused")), (0, 0))
    (run.rejected / "g000007.e0.parquet").symlink_to("gone")
    run.prune(0)
    assert not list(run.media.folder.iterdir())


def test_a_failed_episode_that_goes_while_the_rejected_are_counted_does_no_harm(run: RunDirectory) -> None:
    (run.rejected / "g000007.e0.parquet").symlink_to("gone")
    run.reject("g000008.e0", [a_sequence("g000008.e0.s0", error="odd", finish_reason="error")])
    assert count_rejected(run).episodes == {"odd": 1}


def test_what_a_kill_left_of_a_pruned_step_is_removed_later(run: RunDirectory) -> None:
    batch = [a_sequence("g000000.e0.s0")]
    run.steps.write_stages(0, 0, digest_rows(batch), {})
    commit(run, 0)
    code = (
        "import os, sys; from pathlib import Path; from clew.record.run import RunDirectory\n"
        f"run, seen = RunDirectory(Path({str(run.path)!r})), []\n"
        "def end(event, args):\n"
        "    if event == 'shutil.rmtree' or event == 'os.remove' and 'step-000000.parquet' in str(args[0]):\n"
        "        seen.append(event); len(seen) == 2 and os._exit(9)\n"
        "sys.addaudithook(end); run.steps.prune(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    run.steps.prune(1)
    assert not run.steps.has_data(0) and not run.steps.stage_path(0, 0).parent.exists()


def test_one_trainer_a_run(run: RunDirectory) -> None:
    held = run.hold("trainer")
    code = f"from pathlib import Path; from clew.record.run import RunDirectory; RunDirectory(Path({str(run.path)!r}))"
    second = subprocess.run([sys.executable, "-c", code + ".hold('trainer')"], capture_output=True, text=True)
    assert f"another trainer (pid {os.getpid()}) already works on {run.path}" in second.stderr
    held.close()
    run.hold("trainer").close()


def test_servers_come_and_go(run: RunDirectory) -> None:
    server = Server(name="server", address="127.0.0.1:1", pid=1, ready=False)
    run.register_server(server)
    assert run.servers() == [server]
    run.remove_server("server")
    assert run.servers() == []


def test_a_directory_of_a_newer_format_is_refused(run: RunDirectory) -> None:
    run.run_json.write_text(json.dumps({"clew_format": rows.FORMAT + 1}))
    with pytest.raises(RecordError, match=r"run\.json is of format 5"):
        RunDirectory(run.path)


def test_a_directory_that_is_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"is no run directory: it holds no status/"):
        open_run(tmp_path)


def test_an_error_names_the_runs_beside_one_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "runs" / "addition" / "grpo" / "status").mkdir(parents=True)
    for wrong, near in [("nothing", "addition/grpo"), ("addition/nothing", "grpo")]:
        with pytest.raises(RecordError, match=rf"does not exist\. The runs in .* are {near}\.$"):
            open_run(tmp_path / "runs" / wrong)


def test_describe_keeps_when_it_was_created(run: RunDirectory) -> None:
    config = Config.model_validate({"experiment": "x", "model": {"path": "m"}, "data": {"path": "d"}})
    run.describe(config, threads=2)
    created = run.facts()["created"]
    run.describe(config, threads=1)
    assert run.facts()["created"] == created and run.facts()["threads"] == 1
    assert "torch" in run.facts()["packages"]
    assert open_run(run.path).config_path.read_text().startswith("experiment: x")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a small tmpfs needs root")
def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mounted]).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        run = RunDirectory(mounted / "run")
        with pytest.raises(RecordError, match=r"no space left .* Nothing recorded is lost"):
            for number in range(1000):
                run.inbox.put(f"g{number:06d}", [a_sequence(f"g{number:06d}.e0.s0", 4000)])
        lying = run.inbox.scan()  # each of them whole
        assert 0 < len(lying) < 1000
        assert not list(run.inbox.folder.glob(".*"))
        (tmp_path / "from").mkdir()
        (tmp_path / "from" / "file").write_bytes(bytes(2**20))
        with pytest.raises(RecordError, match=r"Cannot write .*to: no space left"), explain_disk_errors(mounted / "to"):
            shutil.copytree(tmp_path / "from", mounted / "to")
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(tmp_path / "pipe", b"report")
    assert os.read(reading, 10) == b"report" and (tmp_path / "pipe").is_fifo()
    os.close(reading)


def test_whoever_only_reads_a_run_makes_no_folder(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for folder in (
        run.logs,
        run.checkpoints,
        run.reports,
        run.rejected,
        run.evals.folder,
        run.inbox.folder,
        run.steps.folder,
    ):
        folder.rmdir()
    read = open_run(tmp_path / "run")
    assert read.steps.count() == 0 and not read.inbox.names() and not read.checkpointed() and not read.evals.read_all()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status"]


def test_a_change_of_the_configuration_is_noted_even_if_writing_it_down_failed_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(**{"experiment": "e", "model": {"path": "m"}, "data": {"path": "d"}})
    run.describe(config)
    changed = config.model_copy(update={"seed": config.seed + 1})

    def full(*_: object) -> None:
        raise RecordError("no space left")

    with monkeypatch.context() as patched, pytest.raises(RecordError):
        patched.setattr("clew.record.run.write_json", full)
        run.describe(changed, step=3)
    for _ in range(2):
        run.describe(changed, step=3)
        assert [change["step"] for change in run.facts()["changes"]] == [3]
