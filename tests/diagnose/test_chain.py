"""The chain of commits: replay, diff, show and resume name a file that was replaced in the middle of a run."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from clew.diagnose.diff import diff
from clew.diagnose.rerun import Options, rerun
from clew.errors import RecordError
from clew.loop.resume import check_chain
from clew.loop.trainer_process import learn_inline
from clew.record import chain, rows
from clew.record.bundle import write_bundle
from clew.record.run import RunDirectory
from clew.view.show import show
from tests.diagnose.planted import as_format_3, configure, seal


def again(path: Path, steps: str | None = None, stages: str | None = None, overrides: list[str] | None = None) -> bool:
    return rerun(path, Options(steps=steps, stages=stages, overrides=overrides or []))


def broken(run: RunDirectory) -> list[str]:
    """Read all files of all steps; return those that do not fit."""
    return [f"step {each.step}: {each.file}" for each in chain.breaks(run, range(run.steps.count()))]


def shown(path: Path, what: str | None = None) -> str:
    output = io.StringIO()
    show(path, what, console=Console(file=output, width=400))
    return output.getvalue()


@pytest.fixture(scope="session")
def twin(folder: Path, original: Path) -> Path:
    """Another run with the same seed: all its numbers are the same, except times."""
    config = configure(folder, "trial=twin")
    learn_inline(config, lambda step, summary: None)
    return config.run_path


def replace(run: RunDirectory, twin: Path, step: int, *, index: bool = False) -> None:
    """Replace the files of a step by those of another run; with `index`, also its line of the index."""
    for path in (run.steps.json_path(step), run.steps.data_path(step), run.steps.stage_path(step, 0)):
        shutil.copy(twin / path.relative_to(run.path), path)
    if index:
        lines = run.steps.index_path.read_text().splitlines(keepends=True)
        lines[step] = (twin / "steps" / "index.jsonl").read_text().splitlines(keepends=True)[step]
        run.steps.index_path.write_text("".join(lines))


def test_a_run_fits_together(run: RunDirectory) -> None:
    assert broken(run) == []
    said = run.steps.read(3)["chain"]
    assert set(said) == {
        "steps/step-000002.json",
        "steps/step-000003.parquet",
        "steps/step-000003/rank-0.parquet",
        "checkpoints/step-000002/checkpoint.json",
    }
    following = json.loads((run.checkpoints / "step-000004" / "checkpoint.json").read_text())
    assert following["follows"] == chain.digest(run.steps.json_path(3).read_bytes())


@pytest.mark.parametrize("index", [False, True])
def test_each_command_names_a_replaced_step_in_the_middle(
    run: RunDirectory, twin: Path, index: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other step has the same numbers, so only the chain can tell."""
    replace(run, twin, 2, index=index)
    said = "BROKEN CHAIN  step 2: steps/step-000002.json does not fit the commits around it ("
    assert not again(run.path)
    output = capsys.readouterr().out
    assert output.count("BROKEN CHAIN") == 1 and said in output and "every stage agrees with the record" in output
    assert not again(run.path, "4", stages="data")
    assert said in capsys.readouterr().out
    assert not diff(twin, run.path, ignore=[], plot=None)
    assert f"BROKEN CHAIN  {run.path.name}: step 2: steps/step-000002.json" in capsys.readouterr().out
    assert said in shown(run.path) and said in shown(run.path, "4")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RecordError, match=r"Cannot go on with .*: step 2: steps/step-000002\.json does not fit"):
        check_chain(run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_step_that_was_not_committed_does_not_hide_a_broken_chain(
    run: RunDirectory, twin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.steps.json_path(5).unlink()
    run.steps.index_path.write_text("".join(run.steps.index_path.read_text().splitlines(keepends=True)[:5]))
    assert again(run.path, "5")
    replace(run, twin, 4)
    assert not again(run.path, "5")
    assert "BROKEN CHAIN" in capsys.readouterr().out


@pytest.mark.parametrize("step", [3, 5])
def test_an_index_line_of_a_missing_step_is_not_reported_as_superfluous(run: RunDirectory, step: int) -> None:
    run.steps.json_path(step).unlink()
    found = [f"step {each.step}: {each.file}" for each in chain.breaks(run)]
    assert f"step {step}: steps/step-{step:06d}.json" in found
    assert not [each for each in found if "index.jsonl" in each]


def test_a_run_whose_step_was_replaced_does_not_go_on(run: RunDirectory, twin: Path, folder: Path) -> None:
    replace(run, twin, 2)
    with pytest.raises(RecordError, match=r"Cannot go on with .*steps/step-000002\.json does not fit"):
        learn_inline(configure(folder, f"root={run.path.parent.parent}"), lambda step, summary: None)


@pytest.mark.parametrize("which", ["data", "stages"])
def test_files_of_another_run_with_the_same_numbers_are_named(
    run: RunDirectory, twin: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.steps.data_path(1) if which == "data" else run.steps.stage_path(1, 0)
    table = rows.read_table(path)
    rows.write_table(path, table.replace_schema_metadata({"clew_format": "4", "by": "another"}))
    assert not again(run.path, "0:2")
    name = path.relative_to(run.path).as_posix()
    assert f"step 1: {name} is not the file that the step was committed with" in capsys.readouterr().out
    assert broken(run) == [f"step 1: {name}"]


@pytest.mark.parametrize("change", [{"admitted_version": 7}, {"error": "odd"}, {"admitted_at": 1.0}])
def test_a_change_outside_a_sequences_digest_is_noticed(
    run: RunDirectory, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = run.steps.read_data(1)
    batch[2] = dataclasses.replace(batch[2], **change)  # pyright: ignore[reportArgumentType]
    run.steps.write_data(1, rows.to_table(batch))
    assert not again(run.path)
    assert "step 1: steps/step-000001.parquet is not the file" in capsys.readouterr().out


INDEX: dict[str, tuple[Callable[[list[str]], list[str]], str | None, bool]] = {
    "groups": (lambda lines: [*lines[:2], lines[2].replace('"groups": ["g', '"groups": ["h'), *lines[3:]], "2", False),
    "json": (lambda lines: [*lines[:5], lines[5].replace('"json": "', '"json": "0')], "5", False),
    "no json": (lambda lines: [*lines[:2], lines[2].split(', "json"')[0] + "}", *lines[3:]], "2", False),
    "exchanged": (lambda lines: [lines[1], lines[0], *lines[2:]], "0", False),
    "garbage": (lambda lines: [*lines[:2], "{", *lines[3:]], "2", True),
    "ends early": (lambda lines: lines[:3], "3", True),
    "one too many": (lambda lines: [*lines, "{}"], "6", True),
    "killed before its line": (lambda lines: lines[:5], None, True),
}


@pytest.mark.parametrize("how", INDEX)
def test_the_index_is_compared_with_steps(run: RunDirectory, how: str) -> None:
    change, step, harmless = INDEX[how]
    lines = run.steps.index_path.read_text().splitlines()
    run.steps.index_path.write_text("".join(f"{line}\n" for line in change(lines)))
    found = chain.breaks(run)
    if step is None:
        assert found == []
    else:
        assert f"step {step}: steps/" in str(found[0]) and "BROKEN CHAIN" in shown(run.path)
        assert found[0].harmless is harmless
    if harmless:
        check_chain(run)
        run.steps.repair()
        assert chain.breaks(run) == []
    else:
        with pytest.raises(RecordError, match="Cannot go on with"):
            check_chain(run)
    run.steps.index_path.unlink()  # then readers use the steps' JSON
    assert chain.breaks(run) == []


def test_a_copy_of_a_checkpoint_is_not_in_the_chain(run: RunDirectory) -> None:
    newest = run.checkpoints / f"step-{run.checkpointed()[-1]:06d}"
    before = run.checkpointed(), chain.link(run.steps, 0, None)
    for name in ("step-best", f"{newest.name}-copy", "step-5"):
        shutil.copytree(newest, run.checkpoints / name)
    (run.checkpoints / "step-best" / "checkpoint.json").unlink()  # weights alone, for another program
    assert (run.checkpointed(), chain.link(run.steps, 0, None)) == before and not broken(run)


def test_a_checkpoint_of_another_run_is_named(run: RunDirectory, twin: Path) -> None:
    folder = run.checkpoints / "step-000004"
    shutil.rmtree(folder)
    assert broken(run) == []  # one that was removed breaks nothing
    shutil.copytree(twin / "checkpoints" / "step-000004", folder)
    found = chain.breaks(run)
    name = "checkpoints/step-000004/checkpoint.json"
    assert [(each.step, each.file) for each in found] == [(3, name)]
    assert "follows another step 3 than the one on record" in str(found[0])


def test_the_evaluation_in_a_step_is_compared_with_its_file(folder: Path, tmp_path: Path) -> None:
    evaluated = [f"root={tmp_path}", f"eval.path={folder}/prompts.jsonl", "eval.every_steps=1", "training.steps=2"]
    config = configure(folder, *evaluated)
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert run.steps.read(1)["evaluation"] == run.evals.read(0) and broken(run) == []
    path = run.evals.folder / "version-000000.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | {"pass@1": 0.9}))
    assert broken(run) == ["step 0: evals/version-000000.json"]
    unsealed = {key: said for key, said in json.loads(whole).items() if key != "seal"}
    path.write_bytes(chain.sealed(unsealed | {"pass@1": 0.9}))  # step 0's chain shows it
    assert broken(run) == ["step 0: evals/version-000000.json"]
    path.write_text(whole)
    said = run.steps.read(1)
    said["evaluation"]["pass@1"] = 0.9
    run.steps.json_path(1).write_text(json.dumps(said))
    seal(run)  # no digest shows it now, as in a record of an older format
    assert broken(run) == ["step 1: steps/step-000001.json"] and not again(run.path)
    run.steps.json_path(1).write_text(json.dumps(said | {"evaluation": json.loads(whole)}))
    seal(run)
    rows.write_table(path.with_suffix(".parquet"), rows.read_table(path.with_suffix(".parquet")).slice(0, 1))
    assert broken(run) == ["step 0: evals/version-000000.parquet"]


def test_a_step_whose_json_was_removed_is_not_called_uncommitted(run: RunDirectory) -> None:
    run.steps.json_path(2).unlink()
    for left in (True, False):
        with pytest.raises(RecordError, match=r"Cannot read step 2: .*step-000002\.json is missing, although the step"):
            run.steps.read(2)
        assert "step 2: steps/step-000002.json is missing, although step 3 was committed after it" in str(
            chain.breaks(run)[0]
        )
        with pytest.raises(RecordError, match="Cannot go on with"):
            check_chain(run)
        with pytest.raises(RecordError, match=r"Cannot read step 2: .*step-000002\.json is missing"):
            shown(run.path, "2")
        if left:
            run.steps.index_path.unlink()


def test_files_that_a_run_removes_break_nothing(run: RunDirectory) -> None:
    run.steps.prune(before=3)
    shutil.rmtree(run.checkpoints / "step-000002")
    assert broken(run) == [] and again(run.path, "5")
    check_chain(run)


def test_bundles_and_counterfactuals_fit_together(run: RunDirectory, tmp_path: Path) -> None:
    """Steps before a bundle have only their index line in it, with the digest of their JSON."""
    for stages_only in (True, False):
        bundle = write_bundle(run, 3, stages_only=stages_only, to=tmp_path / f"{stages_only}.zip")
        assert again(bundle) and "BROKEN" not in shown(bundle)
    assert again(bundle, "3", overrides=["training.lr=1e-4", "trial=from-bundle", f"root={tmp_path}/runs"])
    assert again(run.path, "3:5", overrides=["training.lr=1e-4", "trial=from-run"])
    for trial in ("from-bundle", "from-run"):
        new = RunDirectory(run.path.parent / trial)
        assert broken(new) == [] and again(new.path, "3")


def test_a_replaced_step_before_a_bundle_is_named(run: RunDirectory, twin: Path, tmp_path: Path) -> None:
    replace(run, twin, 1, index=True)
    bundle = write_bundle(run, 3, stages_only=False, to=tmp_path / "whole.zip")
    assert "BROKEN CHAIN  step 1: steps/step-000001.json does not fit the commits around it (step 2 and" in shown(
        bundle
    )


def test_a_run_of_an_older_format_is_read_without_a_chain(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    as_format_3(run)
    assert broken(run) == [] and again(run.path)
    output = capsys.readouterr().out
    assert "steps 0 to 5 have no chain, because an older Clew recorded them. Not looked at: " in output
    assert diff(run.path, run.path, ignore=[], plot=None) and "BROKEN" not in shown(run.path)


def test_a_run_that_began_in_an_older_format_goes_on_with_a_chain(folder: Path, tmp_path: Path) -> None:
    options = [f"root={tmp_path}", "training.schedule=constant"]
    learn_inline(configure(folder, *options, "training.steps=2"), lambda step, summary: None)
    config = configure(folder, *options, "training.steps=4")
    run = RunDirectory(config.run_path)
    as_format_3(run)
    learn_inline(config, lambda step, summary: None)
    assert "chain" not in run.steps.read(1) and "steps/step-000001.json" in run.steps.read(2)["chain"]
    assert broken(run) == [] and again(run.path)
    said = run.steps.json_path(1)  # the first step with a chain names the last one without
    said.write_text(said.read_text().replace('"committed_at": ', '"committed_at": 1'))
    assert broken(run) == ["step 1: steps/step-000001.json"]
