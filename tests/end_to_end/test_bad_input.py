"""Errors about bad input are said once, with what, where and what to do; the exit code is not 0; nothing recorded
is lost; no process is left (`Project` checks the last two words of that after every command)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clew.printing import counted
from clew.record import rows
from clew.record.chain import sealed
from clew.training.checkpoint import FORMAT as CHECKPOINT_FORMAT
from tests.diagnose.planted import seal
from tests.end_to_end.project import USER_CODE, Ended, Project
from tests.forked import clew

REWARDS = """
def nan(completion, data): return float("nan")
def infinite(completion, data): return {"right": 1.0, "style": float("-inf")}
def text(completion, data): return "0.5"

def never(completion, data):
    while True:
        time.sleep(1)

def sometimes(completion, data):
    return never(completion, data) if data["prompt"] == "3+4=" else digits(completion, data)

def gated(completion, data):
    while not Path("go").exists():
        time.sleep(0.01)
    return digits(completion, data)
"""

FLAKY = """
import random
from clew.rollout.workflows import SingleTurn

class Flaky(SingleTurn):
    def __init__(self, percent: int):
        super().__init__()
        self.percent = percent

    async def run_episode(self, engine, data):
        if random.Random(engine.episode_id).random() < self.percent / 100:
            raise RuntimeError(f"the tool fell over in {engine.episode_id}")
        return await super().run_episode(engine, data)
"""


def failed(ended: Ended, *words: str) -> str:
    """The message of a command that failed as it should: all of these words, no traceback of Clew's own."""
    assert ended.code == 2, ended.output
    for word in words:
        assert word in ended.error, f"{word!r} is not in: {ended.error}"
    assert "defect of Clew" not in ended.output
    return ended.error


def completed(ended: Ended, steps: int = 3) -> None:
    assert ended.code == 0, ended.output
    assert f"trained {counted(steps, 'step')}." in ended.said


# The model ------------------------------------------------------------------------------------------------------------


def without(project: Project, *names: str) -> None:
    for name in names:
        (project.folder / "model" / name).rename(project.folder / name)


def put_back(project: Project, *names: str) -> None:
    for name in names:
        (project.folder / name).rename(project.folder / "model" / name)


def test_a_model_folder_that_lacks_something(project: Project) -> None:
    for missing, words in (
        (["tokenizer.json", "tokenizer_config.json"], "from model (model.path): it holds no tokenizer_config.json"),
        (["tokenizer.json"], "the tokenizer in model: it has no vocabulary"),
        (["model.safetensors"], "model (model.path) holds no weights (*.safetensors)"),
        (["config.json"], "from model (model.path): it holds no config.json"),
    ):
        without(project, *missing)
        failed(project.inline(), words, "found ", "save_pretrained")
        put_back(project, *missing)
    completed(project.inline("training.steps=1"), 1)


@pytest.mark.slow
def test_three_processes_that_fail_alike_are_one_message(project: Project) -> None:
    without(project, "tokenizer_config.json", "tokenizer.json")
    failed(project.clew("train"), "at step 0 of 3", "model (model.path): it holds no tokenizer_config.json",
           "runs/tiny/0/logs/")  # fmt: skip


def test_weights_that_are_truncated(project: Project) -> None:
    file = project.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    failed(project.inline(), "Cannot read the weights in model", "truncated", "Copy or save the model there again")


def test_no_model_folder(project: Project) -> None:
    (project.folder / "models").mkdir()
    failed(project.inline("model.path=models/tiny"), "there is no folder models/tiny", "save_pretrained", "hub name")


@pytest.mark.parametrize(("override", "words"), [
    ("model.path=./models", "there is no folder ./models"),
    ("data.path=prompt.jsonl", "data.path: Cannot read the data file prompt.jsonl: it does not exist. Did you mean"),
    ("eval.path=mine.py", "eval.path: Cannot read the data file mine.py: its name must end with one of .jsonl"),
    ("data.prompt=question", "row 1 has no column 'question'; it has 'prompt'"),
    ("eval.path=none.jsonl", "the data file none.jsonl: it does not exist"),
    ("rollout.reward=mine.py", "mine.py has no 'py'. Write mine.NAME"),
    ("rollout.reward=mine.digit", "mine.py has no 'digit'. Did you mean 'digits'?"),
    ("rollout.reward=mime.digits", "there is no module 'mime'"),
    ("rollout.workflow=clew.rollout.workflows.SingleTrun", "has no 'SingleTrun'. Did you mean 'SingleTurn'?"),
    ("algorithm.loss=mine.clipped", "algorithm.loss=mine.clipped"),
    ("root=prompts.jsonl/here", "Cannot make the run directory prompts.jsonl/here/"),
])  # fmt: skip
def test_what_is_named_is_looked_for_before_a_run_directory_is_made(
    project: Project, override: str, words: str
) -> None:
    failed(project.quick("train", override), words)
    assert not (project.folder / "runs").exists()


def test_demonstrations_without_the_column_leave_no_run_directory(project: Project) -> None:
    failed(project.quick("sft"), "row 1 has no column 'completion'; it has 'prompt'")
    failed(project.quick("sft", "data.completion=reply"), "row 1 has no column 'reply'; it has 'prompt'")
    assert not (project.folder / "runs").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conversation_without_an_assistant_leaves_no_run_directory(project: Project, ranks: int) -> None:
    project.prompts([{"messages": [{"role": "user", "content": "1+1="}]}])
    failed(project.quick("sft", f"launch.ranks={ranks}"), "row 1: 'messages': no message has the role assistant")
    assert not (project.folder / "runs").exists()


def drop_special_tokens(project: Project, *names: str) -> None:
    file = project.folder / "model" / "tokenizer_config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in names}
    file.write_text(json.dumps(kept))


def test_no_pad_token_falls_back_to_the_end_token(project: Project) -> None:
    completed(project.inline())
    with_pad = project.digests()
    drop_special_tokens(project, "pad_token")
    project.set(trial="without")
    completed(project.inline())
    assert project.digests() == with_pad  # responses ended by the end token as before


def test_neither_pad_nor_end_token(project: Project) -> None:
    drop_special_tokens(project, "pad_token", "eos_token")
    failed(project.inline(), "the tokenizer in model: it has neither a pad token nor an end token", "Set eos_token")


# The data -------------------------------------------------------------------------------------------------------------


def test_prompts_longer_than_the_context(project: Project) -> None:
    project.prompts([{"prompt": "12" * 200}] * 8)
    failed(project.inline(), "episodes failed", "the prompt has 400 tokens", "context (max_position_embeddings) is 256",
           "Shorten the prompt", "runs/tiny/0/rejected")  # fmt: skip
    assert project.run.rejected_groups()


def test_one_prompt_longer_than_the_context_is_rejected_and_the_run_goes_on(project: Project) -> None:
    project.prompts([{"prompt": "12" * 200 if i == 3 else f"{i}+1="} for i in range(16)])
    completed(project.inline("training.steps=8"), 8)
    (group,) = project.run.rejected_groups()
    kept = rows.from_table(rows.read_table(project.path / "rejected" / f"{group}.parquet"))
    assert len(kept) == 4 and all("the prompt has 400 tokens" in (row.error or "") for row in kept)
    assert all(row["groups"].count(group) == 0 for row in project.run.steps.index())


def test_data_that_cannot_make_a_batch(project: Project) -> None:
    good = (project.folder / "prompts.jsonl").read_text()
    one, other = {"prompt": "1"}, {"promt": "2"}
    for found, words in (
        ([], ["prompts.jsonl: it holds no rows", "Write at least one"]),
        ([one], ["rollout.batch_groups is 2, and prompts.jsonl has 1 rows", "Use rollout.batch_groups=1"]),
        ([one] * 4 + [other], ["prompts.jsonl: row 5 has no column 'prompt'", "Did you mean 'promt'?", "data.prompt"]),
    ):
        project.prompts(found)
        failed(project.inline(), *words)
    (project.folder / "prompts.jsonl").write_text(good)
    completed(project.inline("training.steps=1"), 1)


def test_a_line_that_is_not_json(project: Project) -> None:
    (project.folder / "prompts.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"\n')
    failed(project.inline(), "prompts.jsonl:2: this line is not JSON", "one object on each line")
    assert not (project.folder / "runs").exists()


def test_held_out_data_without_the_column(project: Project) -> None:
    project.prompts([{"question": "1"}], "held_out.jsonl")
    failed(project.inline("eval.path=held_out.jsonl"), "held_out.jsonl: row 1 has no column 'prompt'", "'question'")


# Rewards and workflows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reward", "words"), [
    ("nan", "reward mine.nan returned nan (float)"),
    pytest.param("infinite", "reward mine.infinite returned style: -inf (float)", marks=pytest.mark.slow),
    pytest.param("text", "reward mine.text returned '0.5' (str)", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_reward_that_is_no_finite_number(project: Project, reward: str, words: str) -> None:
    project.code(USER_CODE + REWARDS)
    completed(project.inline("training.steps=1"), 1)
    before = project.digests()
    failed(project.inline(f"rollout.reward=mine.{reward}"), words, "expected a finite number",
           "The data row: {'prompt'", "runs/tiny/0/rejected")  # fmt: skip
    completed(project.inline())
    assert project.digests()[:1] == before


def test_a_workflow_that_raises_too_often(project: Project) -> None:
    project.code(USER_CODE + FLAKY)
    flaky = ["rollout.workflow=mine.Flaky", "rollout.workflow_kwargs.percent=70", "training.steps=50"]
    said = failed(project.inline(*flaky), "episodes failed", "rollout.max_failed_share=0.2 is the limit",
                  "RuntimeError: the tool fell over in g0", 'mine.py", line', "runs/tiny/0/rejected")  # fmt: skip
    assert said.count("Traceback") == 1  # of one episode, where the user's code raised
    before, finished = project.digests(), project.run.inbox.names()
    completed(project.inline())
    assert project.digests()[: len(before)] == before and finished <= project.run.steps.consumed()


def test_a_workflow_that_seldom_raises(project: Project) -> None:
    project.code(USER_CODE + FLAKY)
    project.set(rollout={"n_samples": 8, "workflow": "mine.Flaky", "workflow_kwargs": {"percent": 5}})
    completed(project.inline("training.steps=4"), 4)
    kept = [rows.from_table(rows.read_table(file)) for file in (project.path / "rejected").glob("g*.e*.parquet")]
    assert 0 < len(kept) < 20 and all("the tool fell over" in (row.error or "") for each in kept for row in each)


@pytest.mark.slow
def test_a_reward_that_never_returns(project: Project) -> None:
    """Time limits hold where there are processes. Some calls hang: errors on record, the run goes on; all: it ends."""
    project.code(USER_CODE + REWARDS)
    project.set(rollout={"reward": "mine.sometimes", "reward_timeout_s": 2, "reward_workers": 4})
    completed(project.clew("train", "training.steps=8"), 8)
    (group,) = project.run.rejected_groups()
    (error,) = {row.error for row in rows.from_table(rows.read_table(project.path / "rejected" / f"{group}.parquet"))}
    assert error and "reward mine.sometimes timed out after 2 s (rollout.reward_timeout_s)" in error
    before = project.digests()
    never = project.clew("train", "rollout.reward=mine.never", "training.steps=9")
    failed(
        never,
        "the rollout ended",
        "at step 8 of 9",
        "episodes failed",
        "reward mine.never timed out after 2 s (rollout.reward_timeout_s)",
    )
    assert project.digests() == before


# Machines -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_port_in_use(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed(project.clew("train", f"inference.listen=127.0.0.1:{port}"), "the server ended",
               f"Cannot listen on 127.0.0.1:{port}: the port is in use", "inference.listen=127.0.0.1:PORT")  # fmt: skip


@pytest.fixture
def small_disk(project: Project) -> Iterator[Path]:
    disk = project.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let this user mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk(project: Project, small_disk: Path) -> None:
    project.set(root="disk/runs", training={"steps": 8}, checkpoint={"every_steps": 2})
    full = project.clew("train")
    failed(full, "no space left", "disk/runs/tiny/0", "ree some space")
    before = project.digests()
    finished = project.run.inbox.names() | project.run.steps.consumed()
    assert 0 < len(before) < 8
    failed(project.inline(), "no space left", "Nothing recorded is lost")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    completed(project.inline(), 8)
    assert project.digests()[: len(before)] == before and finished <= project.run.steps.consumed()


@pytest.mark.slow
def test_no_inodes_and_a_disk_that_is_read_only(project: Project, small_disk: Path) -> None:
    project.set(root="disk/runs", training={"steps": 3})
    mount = ["mount", str(small_disk), "-o"]
    subprocess.run([*mount, "remount,size=64m,nr_inodes=20"], check=True)
    failed(project.inline(), "no space left", "disk/runs/tiny/0")
    subprocess.run([*mount, "remount,nr_inodes=10000"], check=True)
    completed(project.inline(), 3)
    subprocess.run([*mount, "remount,ro"], check=True)
    for arguments, code in (
        (["show"], 0),
        (["status"], 0),
        (["replay"], 0),
        (["bundle", "--step", "1", "--to", "disk/a"], 2),
    ):
        with clew(arguments[0], "disk/runs/tiny/0", *arguments[1:], cwd=project.folder) as process:
            _, said = process.communicate(60)
        assert process.returncode == code, said
        assert ("Cannot write disk/a: Read-only file system" in said) == (code == 2), said
    failed(project.inline("training.steps=4"), "Read-only file system", "disk/runs/tiny/0")


# The record -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Three steps on record, the checkpoint after them gone: the next run trains them again."""
    project = Project(tmp_path_factory.mktemp("trained"))
    project.set(checkpoint={"every_steps": 100})
    completed(project.inline())
    shutil.rmtree(project.path / "checkpoints" / "step-000003")
    project.set(training={"steps": 4})
    yield project
    project.close()


@pytest.fixture
def resuming(project: Project, trained: Project) -> Project:
    shutil.copytree(trained.folder, project.folder, symlinks=True, dirs_exist_ok=True)
    project.config = json.loads(json.dumps(trained.config))
    return project


def test_a_truncated_step(resuming: Project) -> None:
    before = resuming.digests()
    for name, cut in (("step-000001.parquet", 0.5), ("step-000001.parquet", 0.0), ("step-000001.json", 0.5)):
        file = resuming.path / "steps" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: int(cut * len(whole))])
        failed(resuming.inline(), "Cannot go on with runs/tiny/0: step 1", f"steps/{name}", "Restore it from a copy")
        file.write_bytes(whole)
    completed(resuming.inline(), 4)
    assert resuming.digests()[:3] == before


def test_an_altered_evaluation(project: Project) -> None:
    project.set(eval={"path": "prompts.jsonl", "every_steps": 3})
    completed(project.inline())
    for version in (0, 3):
        path = project.path / "evals" / f"version-{version:06d}.json"
        whole = path.read_text()
        for altered in (whole.replace('"reward": ', '"reward": "much", "was": '), whole[:-9], "null")[: 3 - version]:
            path.write_text(altered)
            failed(project.inline("training.steps=4"), path.name)
        path.write_text(whole)
    completed(project.inline("training.steps=4"), 4)


def test_an_index_that_was_altered_is_made_again(resuming: Project) -> None:
    before, index = resuming.digests(), resuming.run.steps.index_path
    index.write_text("gar" + index.read_text())
    completed(resuming.inline(), 4)
    assert resuming.digests()[:3] == before


def test_what_is_truncated_before_its_step_is_committed_can_be_removed(resuming: Project) -> None:
    """After a power failure, say."""
    before = resuming.digests()
    for file, words in (
        (resuming.run.steps.data_path(3), "remove it: the step is not committed, and its batch is chosen again"),
        (resuming.run.inbox.path("g000006"), "remove it, and rollout makes the group again"),
    ):
        file.write_bytes(b"PAR1")
        failed(resuming.inline(), str(file.relative_to(resuming.folder)), words)
        file.unlink()
    completed(resuming.inline(), 4)
    assert resuming.digests()[:3] == before and resuming.run.steps.read(3)["groups"] == ["g000006", "g000007"]


def test_demonstrations_in_the_run_directory_of_reinforcement(resuming: Project) -> None:
    failed(resuming.quick("sft", "data.completion=answer"), "runs/tiny/0 holds a run of `clew train`", "trial=NAME")


def newer_json(file: Path, field: str) -> None:
    said = {**json.loads(file.read_text()), field: 9}
    if said.pop("seal", None) is None:
        file.write_text(json.dumps(said))
    else:
        file.write_bytes(sealed(said))


def newer_step(project: Project) -> Path:
    file = project.path / "steps" / "step-000002.parquet"
    pq.write_table(pq.read_table(file).replace_schema_metadata({"clew_format": "9"}), file)
    return file


def newer_run(project: Project) -> Path:
    newer_json(project.path / "run.json", "clew_format")
    return project.path / "run.json"


def newer_commit(project: Project) -> Path:
    newer_json(project.path / "steps" / "step-000000.json", "clew_format")
    return project.path / "steps" / "step-000000.json"


def newer_checkpoint(project: Project) -> Path:
    completed(project.inline(), 4)
    project.set(training={"steps": 5})
    file = project.path / "checkpoints" / "step-000004" / "checkpoint.json"
    newer_json(file, "format")
    return file


@pytest.mark.parametrize("newer", [newer_step, newer_run, newer_commit, newer_checkpoint])
def test_a_record_of_a_newer_format(resuming: Project, newer) -> None:
    file = newer(resuming)
    if newer in (newer_step, newer_commit):
        seal(resuming.run)  # a newer Clew would have committed the file as it is
    newest = CHECKPOINT_FORMAT if newer is newer_checkpoint else rows.FORMAT
    failed(resuming.inline(), str(file.relative_to(resuming.folder)), "format 9", f"up to {newest}", "Upgrade Clew")


@pytest.mark.slow
def test_two_trainers_on_one_run_directory(project: Project) -> None:
    project.code(USER_CODE + REWARDS)
    project.set(rollout={"reward": "mine.gated"}, launch={"mode": "inline"})
    first = project.start("train")
    project.until(lambda: project.status("trainer")["doing"] == "training", first)
    for second in (["train"], ["learn"], ["train", "launch.mode=local"]):
        failed(project.quick(*second), f"another trainer (pid {first.pid}) already works on runs/tiny/0", "trial=NAME")
    (project.folder / "go").touch()
    completed(project.end(first))
