"""`clew show` on records that these tests make: what is shown, what is not read, and what an error says."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from clew.cli.record import bundle
from clew.errors import RecordError
from clew.record import rows
from clew.record.batch_digest import digest_rows
from clew.record.bundle import write_bundle
from clew.record.files import write_json
from clew.record.inbox import Inbox
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.view import off_policy, prompt
from clew.view.show import show
from clew.view.tokens import shown_once, token_texts
from tests.training.sequences import make_config, make_sequence

SAMPLING = {"max_new_tokens": 6, "temperature": 0.7, "stop": ["\n"]}
METRICS = {"reward": 0.25, "sequences": 4.0, "response_length": 4.5, "lag_mean": 1.0, "lag_max": 2.0}
METRICS |= {"loss": 0.125, "grad_norm": 0.75}


def interaction(name: str, prompt: Any, completion: str) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": prompt,
        "completion": completion,
        "finish_reason": "stop",
        "input_tokens": 3,
        "output_tokens": 4,
        "sampling": SAMPLING,
        "seed": 77,
        "started_at": 1000.5,
        "finished_at": 1002.0,
    }


def sequence(name: str, completion: str = "the answer", *, reward: float = 0.0, **changes: Any) -> Sequence:
    known: dict[str, Any] = {
        "group_id": name.rsplit(".", 2)[0],
        "data": {"prompt": "What is 2+2?", "answer": "4"},
        "interactions": [interaction(name.rsplit(".", 1)[0] + ".i0", "What is 2+2?", completion)],
        "admitted_version": 1,
        "admitted_at": 1000.0,
        "started_at": 1000.5,
        "finished_at": 1002.5,
    }
    return dataclasses.replace(make_sequence(name, reward=reward, version=1), **(known | changes))


def failed(name: str, error: str) -> Sequence:
    empty: dict[str, Any] = {column: np.empty(0, dtype) for column, dtype in rows.ALIGNED.items()}
    return sequence(name, reward=float("nan"), finish_reason="error", error=error, rewards={}, **empty)


def group(name: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[Sequence]:
    return [sequence(f"{name}.e{number}.s0", reward=reward) for number, reward in enumerate(rewards)]


def commit(run: RunDirectory, step: int, batch: list[Sequence], **summary: Any) -> None:
    run.steps.write_data(step, rows.to_table(batch))
    stages = {"advantages": -1.5, "logprobs": -2.0, "loss": 0.25}
    arrays = {name: [np.where(row.loss_mask, value, 0) for row in batch] for name, value in stages.items()}
    run.steps.write_stages(step, 0, digest_rows(batch), arrays)
    known = {
        "groups": sorted({row.group_id for row in batch}),
        "versions": [1, 1],
        "digests": {"data": "00d1", "gradients": ["00e1", "00e2"], "weights": "00f1"},
        "tensors": {"gradients": ["00" * 8] * 2, "weights": "00" * 8},
        "metrics": METRICS,
        "plan": [[[0], [1]], [[2, 3]]],
        "environment": {"ranks": 1, "threads": 2, "device": "cpu", "packages": {"torch": "2.9"}},
        "config": {"training": {}, "algorithm": {}},
        "timings": {"rollout": 1.5, "publish": 0.5},
        "committed_at": 2000.0,
    }
    run.steps.commit(step, known | summary)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three steps of two groups each: g000000 .. g000005."""
    made = RunDirectory(tmp_path / "runs" / "test" / "0")
    made.describe(make_config("a/model"), threads=2)
    for step in range(3):
        batch = [*group(f"g{2 * step:06d}"), *group(f"g{2 * step + 1:06d}")]
        commit(made, step, batch, metrics=METRICS | {"reward": 0.25 + step / 4})
    return made


def shown(where: RunDirectory | Path, what: str | None = None, *, width: int = 200, **options: Any) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False, markup=False, emoji=False)
    show(where if isinstance(where, Path) else where.path, what, console=console, **options)
    return output.getvalue()


def line(text: str, first: str) -> list[str]:
    """The words of the one line that begins with `first`."""
    [found] = [words for words in map(str.split, text.splitlines()) if words and words[0] == first]
    return found


# A run ----------------------------------------------------------------------------------------------------------------


def test_a_run(run: RunDirectory) -> None:
    run.evals.write(
        0, [], {"pass@1": 0.125, "reward": 0.5, "length": 3.0, "truncated": 0.0, "episodes": 8, "failed": 1}
    )
    (run.checkpoints / "step-000002").mkdir()
    text = shown(run)
    assert line(text, "experiment")[1:] == ["test,", "trial", "0"]
    assert line(text, "model")[1:] == ["a/model", "float32", "cpu"]
    assert line(text, "steps")[1:] == ["3", "committed", "of", "20"]
    assert line(text, "reward")[1:] == ["0.250", "→", "0.750"]
    assert line(text, "checkpoints")[1:] == ["step-000002"]
    assert "torch" in line(text, "packages") and line(text, "git")
    assert line(text, "version")[1:] == ["0", "0.125", "0.500", "3.0", "0.000", "8", "1"]
    assert line(text, "2") == ["2", "2", "4", "0.750", "4.5", "1.00/2", "0.750", "1.25e-01", "2.00"]
    assert "k3" not in text  # no step has it


def test_the_last_steps_or_those_asked_for(run: RunDirectory) -> None:
    for step in range(3, 30):
        commit(run, step, group(f"g{step + 3:06d}"))

    def steps(**options: Any) -> list[int]:
        table = shown(run, **options).partition("grad norm")[2].partition("\nhealth")[0].splitlines()[1:]
        return [int(row.split()[0]) for row in table]

    assert steps() == list(range(10, 30))
    assert steps(steps="3:6") == [3, 4, 5]
    assert steps(steps="-2:") == [28, 29]
    with pytest.raises(RecordError, match=r"--steps 50:60 names no committed step: there are 30"):
        shown(run, steps="50:60")
    assert steps(steps="5") == [5]
    for odd in ("a", "a:b", "1:2:3"):
        with pytest.raises(RecordError, match="expected one step, such as 137, or FIRST:END, such as 130:140"):
            shown(run, steps=odd)
    with pytest.raises(RecordError, match="leave out 3, or --steps"):
        shown(run, "3", steps="3:6")


def test_where_the_time_of_all_steps_went(run: RunDirectory) -> None:
    words = " ".join(line(shown(run), "time")[1:])
    assert words == "6 s in all steps: waiting for batches 4.5 s (75 %), publish 1.5 s (25 %)"
    commit(run, 3, group("g000006"), timings={"rollout": 7200.0, "optimizer": 354.0, "digest": 0.25})
    words = " ".join(line(shown(run), "time")[1:])
    assert words == "2 h 6 min in all steps: waiting for batches 2 h 0 min (95 %), optimizer 6 min (5 %)"


def test_many_evaluations_are_shortened(run: RunDirectory) -> None:
    for version in range(0, 300, 20):
        run.evals.write(version, [], {"pass@1": version / 1000})
    text = shown(run)
    versions = [int(row.split()[1]) for row in text.splitlines() if row.split()[:1] == ["version"]]
    assert versions == [0, *range(120, 300, 20)] and "… 5 more …" in text


def test_a_run_without_steps_or_configuration(tmp_path: Path) -> None:
    text = shown(RunDirectory(tmp_path / "bare"))
    assert line(text, "steps")[1:] == ["0", "committed", "of", "-"] and line(text, "model")[1:] == ["-"]


def test_a_folder_of_runs(run: RunDirectory, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "runs" / "test" / "sft")
    (tmp_path / "runs" / "test" / "material").mkdir()
    for folder, prefix in ((tmp_path / "runs", "test/"), (tmp_path / "runs" / "test", "")):
        text = shown(folder)
        assert line(text, f"{prefix}0")[1:5] == ["3/20", "0.250", "→", "0.750"]
        assert line(text, f"{prefix}sft")[1:3] == ["0/-", "-"] and "material" not in text
    with pytest.raises(RecordError, match="is no run directory"):
        shown(tmp_path / "runs" / "test" / "material")
    with pytest.raises(RecordError, match="is no run directory"):
        shown(tmp_path / "runs", "3")
    with pytest.raises(RecordError, match="--steps chooses among the steps of a run"):
        shown(tmp_path / "runs", steps="0:3")
    altered = RunDirectory(tmp_path / "runs" / "test" / "altered")
    altered.config_path.write_text("model: [")
    text = shown(tmp_path / "runs")
    assert line(text, "test/0")[1] == "3/20" and line(text, "test/altered") == ["test/altered"]
    assert f"test/altered: Cannot read {altered.config_path}" in text


def test_numbers_are_whole_however_narrow_the_terminal_is(run: RunDirectory) -> None:
    numbers = METRICS | {"loss": -4.57e-4, "grad_norm": 12.345, "behaviour_k3": 1.5e-6}
    commit(run, 3, group("g000006"), metrics=numbers)
    run.evals.write(0, [], {"pass@1": 0.125, "pass@4": 0.25, "reward": 0.5, "length": 3.0, "truncated": 0.0})
    cells = ["3", "1", "4", "0.250", "4.5", "1.00/2", "1.5e-06", "12.345", "-4.57e-04", "2.00"]
    for width in (200, 100, 80, 60, 40, 30):
        text = shown(run, width=width)
        assert max(map(len, text.splitlines())) <= width
        found = line(text, "3")
        assert found == [cell for cell in cells if cell in found] and {"3", "0.250"} <= {*found}
        assert ("columns left out: sequences, groups" in " ".join(text.split())) == (width < 80)
        assert line(text, "version")[:3] == ["version", "0", "0.125"]
    assert line(shown(run, "2", width=40), "g000004")[:2] == ["g000004", "1.00/1"]
    assert line(shown(run, "g000004", width=40), "g000004.e1")[:3] == ["g000004.e1", "4", "1"]
    folder = run.path.parents[1]
    assert line(shown(folder, width=60), "test/0")[:6] == ["test/0", "4/20", "0.250", "→", "0.250", "0.125"]
    folded = "".join(shown(run, width=12).partition("reward\n")[2].split())
    assert "0.250" in folded  # where nothing more can be left out


def test_steps_without_a_record_are_counted_by_checkpoints(run: RunDirectory) -> None:
    sft = RunDirectory(run.path.parent / "sft")
    sft.describe(make_config("a/model"), threads=2)
    for version in (0, 9, 20):
        (sft.checkpoints / f"step-{version:06d}").mkdir()
        (sft.checkpoints / f"step-{version:06d}" / "checkpoint.json").touch()
    assert line(shown(run.path.parent), "sft")[1] == "20/20"


def test_lag_is_unknown_where_versions_are_another_trainers(run: RunDirectory) -> None:
    commit(run, 3, [dataclasses.replace(row, versions=row.versions + 135) for row in group("g000006")])
    assert "lag" not in line(shown(run, "3"), "group") and line(shown(run, "g000006"), "lag")[1] == "-"
    commit(run, 4, group("g000007"), metrics=METRICS | {"lag_mean": -135.0, "lag_max": -135.0})
    assert line(shown(run), "4")[5] == "-"


def test_a_bundle(run: RunDirectory, tmp_path: Path) -> None:
    bundle = write_bundle(run, 2, stages_only=True, to=tmp_path / "small.zip")
    text = shown(bundle)
    assert line(text, "run")[1] == str(bundle) and "it holds step 2, without weights" in text
    assert line(text, "0")[:4] == ["0", "2", "-", "-"] and line(text, "2")[3] == "0.750"
    assert "gradients  00e1 00e2" in shown(bundle, "2") and "weights    00f1" in shown(bundle, "0")
    assert shown(bundle, "g000004") == shown(run, "g000004")
    assert shown(bundle, "g000005.e1.s0", tokens=True) == shown(run, "g000005.e1.s0", tokens=True)
    with pytest.raises(RecordError, match=r"^.*small\.zip has no step 3: steps 0 to 2 are committed\.$"):
        shown(bundle, "3")
    made = clew(str(bundle), "2")
    assert made.returncode == 0 and "g000004" in made.stdout
    bundle.write_bytes(bundle.read_bytes()[:-100])
    broken = clew(str(bundle))
    assert broken.returncode == 2 and "small.zip: it is neither a run directory nor a bundle" in broken.stderr


def test_a_bundle_without_weights_is_said_to_be_checked_not_run(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle(run.path, 1, stages_only=True, to=(file := tmp_path / "a.zip"))
    assert f"`clew replay {file}` checks its stages, on any machine." in capsys.readouterr().out


def test_a_record_in_the_making(run: RunDirectory) -> None:
    """The step is committed, but not in the index yet. A killed process left stray files."""
    run.steps.write_data(3, rows.to_table(group("g000006")))
    write_json(
        run.steps.json_path(3), json.loads(run.steps.json_path(2).read_text()) | {"step": 3, "groups": ["g000006"]}
    )
    (run.inbox.folder / ".g000007.parquet.77").write_text("PAR1")
    assert line(shown(run), "3") and "consumed by step 3" in shown(run, "g000006")


# A prompt over time --------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> RunDirectory:
    """Make a run that trains on row 1 at the steps 0 and 2, on row 0 at step 1, and leaves row 1 out once."""
    data = [{"prompt": "What is 2+2?", "answer": "4"}, {"prompt": "What is 3+3?", "answer": "6"}, {"prompt": "Never"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in data))
    made = RunDirectory(tmp_path / "runs" / "test" / "0")
    made.describe(make_config("a/model", data={"path": str(file)}), threads=1)
    for step, place in enumerate((1, 0, 1)):
        rewards = (0.0, 1.0) if step else (0.0, 0.0)
        batch = [dataclasses.replace(row, data=data[place]) for row in group(f"g{step:06d}", rewards)]
        commit(made, step, [*batch, *([] if step else group("g000009"))])
    out = [dataclasses.replace(row, data=data[1], error="filtered: all rewards equal (1)") for row in group("g000005")]
    made.reject("g000005", out)
    return made


def test_one_prompt_over_time(asked: RunDirectory) -> None:
    for wanted in ("1", "3+3", "What is 3+3?"):
        text = shown(asked, prompt=wanted)
        assert line(text, "data.answer")[1:] == ["6"] and ("row " in text) == (wanted == "1")
        assert "2 trained on, 1 left out" in text
        assert line(text, "0") == ["0", "g000000", "0", "0", "0.000", "4.0", "-"]
        assert line(text, "2") == ["2", "g000002", "0", "1", "0.500", "4.0", "1.00/1"]
        out = "- g000005 0 1 0.500 4.0 - filtered: all rewards equal (1)"
        assert line(text, "-") == out.split()
        assert "g000001" not in text and "g000009" not in text


def test_a_prompt_that_is_meant_by_nobody_or_several(asked: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"'What' is in 2 prompts of this run: 'What is 3\+3\?'; 'What is 2\+2\?'\."):
        shown(asked, prompt="What")
    with pytest.raises(RecordError, match=r"no prompt that holds 'Who' in the 3 steps that have their sequences"):
        shown(asked, prompt="Who")
    with pytest.raises(RecordError, match=r"no group of row 2 \('Never'\) in the 3 steps"):
        shown(asked, prompt="2")
    with pytest.raises(
        RecordError, match=r"has no row 7: it has 3, counted from 0\. .* no prompt that holds '7' in the"
    ):
        shown(asked, prompt="7")
    with pytest.raises(RecordError, match=r"leave out the other options"):
        shown(asked, "1", prompt="3")
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(RecordError, match=r"To find a prompt without the data file, give a text that it holds\."):
        shown(asked, prompt="1")
    assert "2 trained on" in shown(asked, prompt="3+3")


def test_a_number_without_a_row_is_a_text(asked: RunDirectory, tmp_path: Path) -> None:
    text = shown(asked, prompt="3")  # the file has the rows 0 to 2
    assert line(text, "data.answer")[1:] == ["6"] and "2 trained on, 1 left out" in text and "row " not in text
    commit(asked, 3, [dataclasses.replace(row, data={"prompt": "2"}) for row in group("g000012")])
    assert "g000012" in shown(asked, prompt="2")  # the row 2 has no group, and this is all of the prompt
    assert line(shown(asked, prompt="1"), "data.answer")[1:] == ["6"]
    with pytest.raises(RecordError, match=r"has no prompt that holds '9{5000}' in the"):
        shown(asked, prompt="9" * 5000)
    (tmp_path / "prompts.jsonl").unlink()
    assert line(shown(asked, prompt="3"), "data.answer")[1:] == ["6"]
    commit(asked, 4, [dataclasses.replace(row, data={"prompt": "33"}) for row in group("g000013")])
    with pytest.raises(RecordError, match=r"'3' is in 2 prompts .*prompts\.jsonl.* it does not exist"):
        shown(asked, prompt="3")


# The most off-policy sequences ----------------------------------------------------------------------------------------


def test_the_most_off_policy_sequences(run: RunDirectory) -> None:
    with pytest.raises(RecordError, match=r"both its sequences and the stage proximal_logprobs on record"):
        shown(run, off_policy=True)
    for step in range(3):
        batch = run.steps.read_data(step)
        far = {"g000002.e1.s0": np.log(2), "g000005.e0.s0": -np.log(4)}  # ratios of 2 and 1/4, on the first token alone
        values = [np.where(row.loss_mask, row.logprobs, 0) for row in batch]
        for row, value in zip(batch, values, strict=True):
            value[3] += far.get(row.id, 1e-3)
        run.steps.write_stages(step, 0, digest_rows(batch), {"proximal_logprobs": values})
    text = shown(run, off_policy=True)
    second, first = (row.split() for row in sorted(text.splitlines()[2:4]))
    # k3 is r - 1 - log r with r = proximal / behaviour, as a mean over 4 tokens.
    assert second == ["1", "g000002.e1.s0", f"{(1 - np.log(2)) / 4:.2e}", "2", "0.00/0", "4"]
    assert first[:4] == ["2", "g000005.e0.s0", f"{(-3 / 4 + np.log(4)) / 4:.2e}", "0.25"]
    assert text.index("g000005.e0.s0") < text.index("g000002.e1.s0") and len(text.splitlines()) == 13
    assert text.rstrip().endswith(f"clew show {run.path} g000005.e0.s0 --tokens")
    run.steps.write_stages(2, 0, digest_rows(batch), {"proximal_logprobs": [values[0][:-1], *values[1:]]})  # altered
    assert "g000005.e0.s0" in shown(run, off_policy=True)
    run.steps.prune(before=2)
    assert "g000002" not in shown(run, off_policy=True)
    with pytest.raises(RecordError, match="none of these steps"):
        shown(run, off_policy=True, steps="0:2")
    with pytest.raises(RecordError, match="leave out everything else but --steps"):
        shown(run, "2", off_policy=True)


@pytest.mark.parametrize("options", [{"off_policy": True}, {"prompt": "What"}])
def test_a_step_that_is_pruned_meanwhile_is_left_out(
    run: RunDirectory, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        batch = run.steps.read_data(step)
        stages = {"proximal_logprobs": [row.logprobs for row in batch]}
        run.steps.write_stages(step, 0, digest_rows(batch), stages)

    def pruned(items: Iterable[Any], *_: object, **__: object) -> Iterable[Any]:
        run.prune(2)
        return items

    for module in (off_policy, prompt):
        monkeypatch.setattr(module, "tracked", pruned)
    text = shown(run, **options)
    assert "g000005" in text and "g000003" not in text


def test_a_sequence_without_a_finite_distance_is_the_most_off_policy(run: RunDirectory) -> None:
    batch = run.steps.read_data(0)
    values = [np.where(row.loss_mask, row.logprobs, 0) for row in batch]
    for row, value, far in zip(batch, values, [1.0, np.nan, *[0.0] * len(batch)], strict=False):
        value[row.loss_mask] += far
    run.steps.write_stages(0, 0, digest_rows(batch), {"proximal_logprobs": values})
    first, second = (row.split()[1] for row in shown(run, off_policy=True).splitlines()[2:4])
    assert (first, second) == (batch[1].id, batch[0].id)


# A step ---------------------------------------------------------------------------------------------------------------


def test_a_step(run: RunDirectory) -> None:
    text = shown(run, "2")
    assert "gradients  00e1 00e2" in text and "weights    00f1" in text
    assert "micro-batches of each update: 2 1" in text
    assert "threads 2" in text and "torch 2.9" in text and "rollout 1.500" in text and "lag_max 2" in text
    assert line(text, "g000004") == [
        *("g000004", "2", "1.00/1", "0.500", "0.500", "0", "1", "-1.50", "-1.50", "What", "is", "2+2?")
    ]


def test_the_environment_of_a_step_comes_last(run: RunDirectory) -> None:
    text = shown(run, "2")
    assert text.index("lag_max") < text.index("g000004") < text.index("environment")


def test_no_such_step(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no step 7: steps 0 to 2 are committed\.$"):
        shown(run, "7")
    run.steps.write_data(3, rows.to_table(group("g000006")))
    with pytest.raises(RecordError, match=r"has no step 3: steps 0 to 2 are committed\. Step 3 is being made"):
        shown(run, "3")
    with run.hold("trainer"), run.report("trainer") as reporter:
        reporter.set(doing="failed", error="TrainingError: step 3: too large.\nmore")
    failed = (
        r"The run has ended at step 3 of \d+: trainer failed with TrainingError: step 3: too large\. Start it again"
    )
    with pytest.raises(RecordError, match=failed):
        shown(run, "3")
    with pytest.raises(RecordError, match=r"has no step 0: no step is committed yet"):
        shown(RunDirectory(tmp_path / "bare"), "0")


def test_a_truncated_step_is_said_and_only_where_it_is_needed(run: RunDirectory) -> None:
    path = run.steps.data_path(1)
    path.write_bytes(path.read_bytes()[:-100])
    for what in ("1", "g000002", "g000003.e0"):
        with pytest.raises(RecordError, match=r"step-000001\.parquet cannot be read .* truncated or altered"):
            shown(run, what)
    assert shown(run) and shown(run, "2") and shown(run, "g000004")
    run.steps.data_path(3).write_bytes(b"PAR1")
    with pytest.raises(RecordError, match=r"remove it: the step is not committed"):
        shown(run, "g000006")


def test_pruned_steps_keep_what_was_committed(run: RunDirectory) -> None:
    run.reject("g000000.e2", [failed("g000000.e2.s0", "ValueError: odd")])
    run.steps.prune(before=2)
    run.describe(make_config("a/model", record={"keep_steps": 1}))
    assert "0.250" in shown(run)
    said = " ".join(shown(run, "0").split())
    assert "digest of weights" in said
    assert "the sequences of step 0 are gone: " in said and "the next that has its own is step 2." in said
    with pytest.raises(RecordError, match=r"the sequences of step 0 are gone: .*: `clew show .* 0`"):
        shown(run, "g000000")
    assert "ValueError: odd" in shown(run, "g000000.e2")
    assert "ValueError: odd" in shown(run, "g000000.e2", tokens=True)


def test_only_what_is_shown_is_read(run: RunDirectory) -> None:
    for step in (0, 1):
        run.steps.json_path(step).write_text("garbage")
        run.steps.data_path(step).write_text("garbage")
        run.steps.stage_path(step, 0).write_text("garbage")
    assert shown(run, "2") and shown(run, "g000004") and shown(run, "g000005.e1", tokens=True)
    with pytest.raises(RecordError, match=r"step-000001\.json: expected JSON, found"):
        shown(run, "1")


# A group --------------------------------------------------------------------------------------------------------------


def test_a_group_that_was_trained_on(run: RunDirectory) -> None:
    run.reject("g000002.e2", [failed("g000002.e2.s0", "ValueError: no tool\nTraceback")])
    text = shown(run, "g000002")
    assert line(text, "fate")[1:] == ["consumed", "by", "step", "1"]
    assert line(text, "data.prompt")[1:] == ["What", "is", "2+2?"] and line(text, "data.answer")[1:] == ["4"]
    assert line(text, "g000002.e1") == ["g000002.e1", "1", "4", "1", "-1.5", "match", "1", "stop", "1", "the", "answer"]
    assert "error: ValueError: no tool\\nTraceback" in text


def test_what_was_rejected(run: RunDirectory) -> None:
    batch = [*group("g000030"), *group("g000031")]
    commit(run, 3, batch, metrics=METRICS | {"rejected_share": 0.4375})
    why = [[3, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0], [0, 1, 0, 1]]
    values = [np.zeros(len(row.input_ids), np.float32) for row in batch]
    for row, value, reasons in zip(batch, values, why, strict=True):
        value[row.loss_mask] = reasons
    run.steps.write_stages(3, 0, digest_rows(batch), {"rejected": values})
    of_run = shown(run)
    assert line(of_run, "3")[6] == "43.8%" and line(of_run, "2")[6] == "-"
    text = shown(run, "3")
    assert line(text, "g000030")[3:8] == ["5", "of", "8", "(reject,", "veto)"]
    assert line(text, "g000031")[3:7] == ["2", "of", "8", "(reject)"]
    text = shown(run, "g000030")
    assert line(text, "g000030.e0")[2:7] == ["4", "1", "of", "4", "(reject,"]
    assert line(text, "g000030.e1")[2:5] == ["4", "all", "(veto)"]
    text = shown(run, "g000031")
    assert line(text, "g000031.e0")[2:4] == ["4", "-"] and line(text, "g000031.e1")[2:6] == ["4", "2", "of", "4"]
    assert "rejected" not in shown(run, "g000002") and "rejected" not in shown(run, "1")
    tokens = shown(run, "g000030.e0", tokens=True)
    assert line(tokens, "3")[-2] == "reject+veto" and len(line(tokens, "4")) == len(line(tokens, "3")) - 1
    assert line(shown(run, "g000031.e1", tokens=True), "4")[-2] == "reject"
    run.steps.write_stages(3, 0, digest_rows(batch), {"rejected": [value[:2] for value in values]})
    for what in ("3", "g000030"):
        assert "reject," not in shown(run, what), "an altered file is named elsewhere"
    assert "reject+veto" not in shown(run, "g000030.e0", tokens=True)


def test_a_group_elsewhere(run: RunDirectory) -> None:
    run.inbox.put("g000010", group("g000010"))
    run.inbox.set_running({"g000011": 3})
    run.reject("g000012", [dataclasses.replace(row, error="filtered: all equal") for row in group("g000012")])
    run.reject("g000013", [failed("g000013.e0.s0", "ValueError: odd")])
    run.steps.write_data(3, rows.to_table(group("g000014")))
    run.evals.write(2, group("v000002.g000001", (1.0,)), {"pass@1": 1.0})
    fates = {
        "g000010": "waiting in the inbox",
        "g000011": "being made, admitted at version 3",
        "g000012": "rejected: filtered: all equal",
        "g000013": "rejected: all 1 episodes failed",
        "g000014": "chosen for step 3, which is not committed yet",
        "v000002.g000001": "evaluation of version 2",
    }
    for name, fate in fates.items():
        assert " ".join(line(shown(run, name), "fate")[1:]) == fate
    assert "v000002.g000001.e0" in shown(run, "v000002.g000001.e0")
    assert "filtered: all equal" in shown(run, "g000012.e0")


def test_a_group_that_is_committed_while_it_is_looked_for(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.inbox.put("g000010", group("g000010"))
    read = Inbox.read

    def read_late(inbox: Inbox, name: str) -> Any:
        commit(run, 3, group(name))
        inbox.remove([name])
        return read(inbox, name)

    monkeypatch.setattr(Inbox, "read", read_late)
    assert " ".join(line(shown(run, "g000010"), "fate")[1:]) == "consumed by step 3"


def test_no_such_group(run: RunDirectory) -> None:
    with pytest.raises(RecordError, match=r"no group g000099: steps 0 to 2 are committed, with groups from g000000 to"):
        shown(run, "g000099")
    for name in ("g000099.e1", "g2", "v2.g1.s0"):
        with pytest.raises(RecordError, match=r"nor in rejected/|no version is evaluated yet"):
            shown(run, name)
    with pytest.raises(RecordError, match=r"nor in rejected/\. Did you mean g000002\?$"):
        shown(run, "g2")
    with pytest.raises(RecordError, match=r"no v000002\.g000001: no version is evaluated yet"):
        shown(run, "v000002.g000001")
    with pytest.raises(
        RecordError, match=r"Cannot find '/etc/\*': it is neither a step nor an ID\. Expected a step such as 137"
    ):
        shown(run, "/etc/*")


def test_groups_of_another_trainer(tmp_path: Path) -> None:
    """Their names, configuration and metrics are not ours."""
    run = RunDirectory(tmp_path / "other")
    run.describe(None, trainer="another")
    run.config_path.write_text("model: a-name\ndata: 7\n")
    bare = [dataclasses.replace(row, interactions=[], data={}) for row in group("prompt-7")]
    said: list[Any] = [{"completion": "well", "judge": {"score": 1}, "sampling": None}, "only a text"]
    told = dataclasses.replace(bare[0], interactions=said)
    commit(run, 0, [told, bare[1]], metrics={}, plan=[], environment={}, digests={"data": "0"}, timings={})
    assert "prompt-7" in shown(run, "0") and "prompt-7.e1" in shown(run, "prompt-7")
    assert line(shown(run), "step") == ["step", "groups"] and line(shown(run), "0") == ["0", "1"]
    text = shown(run, "prompt-7.e0")
    assert "well" in text and 'judge={"score": 1}' in text and "only a text" in text
    assert "no interaction is recorded" in shown(run, "prompt-7.e1")


# An episode -----------------------------------------------------------------------------------------------------------


def test_an_episode(run: RunDirectory) -> None:
    text = shown(run, "g000003.e1")
    assert line(text, "reward")[1:] == ["1", "=", "match", "1"]
    assert line(text, "finished")[1:] == ["+2.50", "s"] and line(text, "consumed")[1:] == ["-"]
    assert line(text, "versions")[1:] == ["1,", "admitted", "at", "1"] and line(text, "lag")[1:] == ["0.00/0"]
    assert 'temperature=0.7  stop=["\\n"]' in text and "seed=77" in text and "took=+1.50 s" in text
    assert "prompt\nWhat is 2+2?\ncompletion\nthe answer\n" in text


def test_a_conversation_is_shown_in_full_and_once(run: RunDirectory) -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    second = [*first, call, {"role": "tool", "content": "4"}]
    long = "word " * 1000
    turns = [interaction("g000050.e0.i0", first, "calls"), interaction("g000050.e0.i1", second, long)]
    run.inbox.put("g000050", [sequence("g000050.e0.s0", interactions=turns)])
    text = shown(run, "g000050.e0")
    assert text.count("Be brief.") == text.count("Hi") == 1
    assert "the 2 messages of g000050.e0.i0, and" in text and 'tool_calls: [{"name": "add"}]' in text
    assert long in text  # neither cut nor wrapped
    only = shown(run, "g000050.e0.i1")
    assert "g000050.e0.s0" in only and "Be brief." in only and "calls" not in only.replace("tool_calls", "")


def test_an_episode_that_failed(run: RunDirectory) -> None:
    run.reject("g000002.e2", [failed("g000002.e2.s0", "ValueError: no tool\nTraceback ...")])
    text = shown(run, "g000002.e2")
    assert "error\nValueError: no tool\nTraceback ...\n" in text and line(text, "reward")[1:] == ["-"]
    assert "What is 2+2?" in text


def test_no_such_episode(run: RunDirectory) -> None:
    run.inbox.set_running({"g000011": 3})
    with pytest.raises(RecordError, match=r"no episode g000002\.e9\. .*: consumed by step 1; its episodes are g"):
        shown(run, "g000002.e9")
    with pytest.raises(RecordError, match=r"being made, admitted at version 3; it has no episode yet"):
        shown(run, "g000011.e0")
    for part in ("s1", "i1"):
        with pytest.raises(RecordError, match=rf"no g000002\.e0\.{part}; it has g000002\.e0\.s0, g000002\.e0\.i0"):
            shown(run, f"g000002.e0.{part}")


def test_what_models_wrote_is_neither_markup_nor_commands(run: RunDirectory) -> None:
    bad = "[red]x[/] :smile: \x1b]0;title\x07 \u202eabc \x9b2J \ud83d tab\tend\r"
    safe = "[red]x[/] :smile: \\x1b]0;title\\x07 \\u202eabc \\x9b2J \\ud83d tab\\tend\\r"
    row = sequence("g000050.e0.s0", bad, data={"prompt": bad, bad: bad}, finish_reason="\x1bc", rewards={bad: 1.0})
    commit(run, 3, [row, failed("g000050.e1.s0", bad)], metrics=METRICS | {"reward/[/x]\x1b": 1.0})
    odd = {"id": bad, "prompt": [{"role": bad, "content": bad, bad: bad}], "completion": bad, bad: bad}
    run.inbox.put("g000051", [sequence("g000051.e0.s0", interactions=[odd])])
    for what in ("3", "g000050", "g000050.e0", "g000050.e1", "g000051", "g000051.e0"):
        text = shown(run, what)
        text.encode()
        assert not {char for char in text if not char.isprintable()} - {"\n"}
        assert what == "3" or safe.replace("\\ud83d", "") in text.replace("\\ud83d", "").replace("?", "")


# Tokens ---------------------------------------------------------------------------------------------------------------


def a_tokenizer(run: RunDirectory, step: int, tokens: list[str]) -> None:
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir()
    made = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))


def test_tokens(run: RunDirectory) -> None:
    a_tokenizer(run, 0, ["old"] * 1)
    a_tokenizer(run, 10, ["?", *(f"<{number}>" for number in range(1, 100))])
    row = rows.from_table(rows.read_table(run.steps.data_path(1)))[0]
    for what in ("g000002.e0", "g000002.e0.s0"):
        text = shown(run, what, tokens=True)
        assert "".join(f"<{token}>" for token in row.input_ids) in text
        assert line(text, "0") == ["0", str(row.input_ids[0]), f"<{row.input_ids[0]}>"]
        generated = ["3", str(row.input_ids[3]), "-3.0000", "-2.0000", "1", "-1.5000", "0.2500"]
        assert line(text, "3") == [*generated, f"<{row.input_ids[3]}>"]


def test_tokens_are_coloured_by_advantage(run: RunDirectory) -> None:
    batch = group("g000020")
    commit(run, 3, batch)
    signs = [np.where(row.loss_mask, sign, 0) for row, sign in zip(batch, (1.0, -1.0), strict=True)]
    run.steps.write_stages(3, 0, digest_rows(batch), {"advantages": signs})
    a_tokenizer(run, 0, ["?", *(f"<{number}>" for number in range(1, 100))])
    for name, colour in (("g000020.e0", "0;190;0"), ("g000020.e1", "230;0;0")):
        output = io.StringIO()
        console = Console(file=output, width=200, force_terminal=True, color_system="truecolor", highlight=False)
        show(run.path, name, tokens=True, console=console)
        ids = batch[int(name[-1])].input_ids
        assert f"\x1b[2m<{ids[0]}>" in output.getvalue() and f"\x1b[4;38;2;{colour}m<{ids[4]}>" in output.getvalue()


def test_tokens_without_a_tokenizer_or_a_step(run: RunDirectory) -> None:
    run.inbox.put("g000050", group("g000050"))
    text = shown(run, "g000050.e0", tokens=True)
    token = str(make_sequence("g000050.e0.s0").input_ids[3])
    assert "Tokens are shown by their ids: no" in text and "no advantages are on record" in text
    assert line(text, "3") == ["3", token, "-3.0000", "-", "1", "-", "-", f"⟨{token}⟩"]
    folder = run.checkpoints / "step-000001"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in shown(run, "g000050.e0", tokens=True)


def test_tokens_of_the_ranks(run: RunDirectory) -> None:
    """Each rank wrote its own rows."""
    batch = group("g000020")
    commit(run, 3, batch)
    for rank, row in enumerate(batch):
        advantage = np.where(row.loss_mask, float(rank + 5), 0)
        run.steps.write_stages(3, rank, digest_rows([row]), {"advantages": [advantage]})
    assert line(shown(run, "g000020.e1", tokens=True), "3")[5] == "6.0000"


def test_advantages_that_are_no_numbers(run: RunDirectory) -> None:
    batch = group("g000020")
    commit(run, 3, batch)
    for odd in (np.nan, np.inf, -np.inf):
        run.steps.write_stages(
            3, 0, digest_rows(batch), {"advantages": [np.where(row.loss_mask, odd, 0) for row in batch]}
        )
        assert line(shown(run, "g000020.e1", tokens=True), "3")[5] == ("-" if np.isnan(odd) else str(odd))


def test_tokens_of_what_has_none(run: RunDirectory) -> None:
    for what in (None, "1", "g000002"):
        with pytest.raises(RecordError, match="--tokens shows an episode or a sequence"):
            shown(run, what, tokens=True)


def test_a_character_of_several_tokens_is_shown_with_its_last() -> None:
    letters = {"Ã": 0, "©": 1, "a": 2, "ð": 3, "Ł": 4, "ĺ": 5, "Ģ": 6}  # é is 0 1, 😀 is 3 4 5 6, as GPT-2 writes bytes
    tokenizer = Tokenizer(WordLevel(letters, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    assert token_texts([2, 0, 1, 2], tokenizer) == ["a", "⟨0⟩", "é", "a"]
    assert token_texts([3, 4, 5, 6], tokenizer) == ["⟨3⟩", "⟨4⟩", "⟨5⟩", "😀"]
    assert token_texts([2, 999, 2], tokenizer) == ["a", "⟨999⟩", "a"]  # the model's vocabulary is often larger
    assert len(token_texts([0, 0, 0, 0, 0, 2, 999], tokenizer)) == 7


def test_spaces_between_words_are_kept() -> None:
    tokenizer = Tokenizer(WordLevel({"▁one": 0, "▁two": 1}, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    assert token_texts([0, 1, 1], tokenizer) == ["one", " two", " two"]


# From the shell -------------------------------------------------------------------------------------------------------


def clew(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CLEW_PARENT_PID": str(os.getpid())} | variables
    command = [sys.executable, "-X", "importtime", "-m", "clew", "show", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_from_the_shell_complete_and_without_torch(run: RunDirectory) -> None:
    long = "x" * 150
    run.inbox.put("g000050", [sequence("g000050.e0.s0", long)])
    for arguments in (["g000050"], ["g000050.e0", "--tokens"], ["1"], ["--steps", "0:2"]):
        made = clew(str(run.path), *arguments, COLUMNS="40")
        assert made.returncode == 0, made.stderr
        imported = {row.rpartition("|")[2].strip() for row in made.stderr.splitlines()}
        assert not imported & {"torch", "transformers"} and "clew.view.show" in imported
        assert arguments != ["g000050"] or made.stdout.count("x") >= 100
    wrong = clew(str(run.path), "99")
    assert wrong.returncode == 2 and "clew: " in wrong.stderr and "has no step 99" in wrong.stderr
    config = run.path.parent / "config.yaml"
    values = {"experiment": "test", "trial": "0", "model": {"path": "m"}, "data": {"path": "d"}}
    config.write_text(json.dumps({"root": str(run.path.parents[1]), **values}))
    assert "3 committed" in clew(str(config)).stdout


def test_characters_that_the_terminal_does_not_have_are_spelt_out(run: RunDirectory) -> None:
    made = clew(str(run.path), PYTHONIOENCODING="latin-1")
    assert made.returncode == 0, made.stderr
    assert f"\\u2192 clew show {run.path} 0" in made.stdout


def test_the_tokens_of_an_image_are_shown_once() -> None:
    ids, generated = [5, *[7] * 20, 6, *[7] * 9, *[3] * 7], [False] * 22 + [True] * 9 + [False] * 7
    assert shown_once(ids, generated) == [(0, 1), (1, 20), *((place, 1) for place in range(21, 38))]


def test_a_damaged_file_of_stages_hides_only_the_advantages(run: RunDirectory) -> None:
    path = run.steps.stage_path(1, 0)
    whole = shown(run, "1")
    assert "advantages" in whole
    path.write_bytes(path.read_bytes()[:-40])
    damaged = shown(run, "1")
    assert "no advantages: " in damaged and path.name in damaged and "g000002" in whole and "g000002" in damaged
    tokens = shown(run, "g000002.e0", tokens=True)
    assert "no advantages: " in tokens and line(tokens, "3")[2:6] == ["-3.0000", "-", "1", "-"]


def test_the_curves_as_a_picture(run: RunDirectory, tmp_path: Path) -> None:
    """The steps have neither entropy nor clip fraction on record: those panels say so."""
    run.evals.write(0, [], {"pass@1": None, "reward": 0.5})
    drawn = clew(str(run.path), "--plot", str(tmp_path / "curves.png"))
    assert drawn.returncode == 0 and drawn.stdout == f"plot: {tmp_path}/curves.png\n"
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG" and not list(tmp_path.glob(".*"))
    refused = clew(str(run.path), "2", "--plot", str(tmp_path / "other.png"))
    assert refused.returncode == 2 and "leave out the other options" in refused.stderr
    folder = clew(str(run.path), "--plot", ".")
    assert folder.returncode == 2 and "is a directory" in folder.stderr
    nowhere = clew(str(run.path), "--plot", str(tmp_path / "none" / "curves.png"))
    assert nowhere.returncode == 2 and "none/curves.png: No such file or directory" in nowhere.stderr
    RunDirectory(tmp_path / "empty")
    empty = clew(str(tmp_path / "empty"), "--plot", str(tmp_path / "other.png"))
    assert empty.returncode == 2 and "no step is committed yet" in empty.stderr


def test_the_best_checkpoint_is_marked(run: RunDirectory) -> None:
    for version in (90, 92):
        (run.checkpoints / f"step-{version:06d}").mkdir()
    (run.checkpoints / "best").symlink_to("step-000090")
    assert "step-000090 (best)" in shown(run, width=200) and "step-000092 (best)" not in shown(run, width=200)
