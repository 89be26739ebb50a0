"""Batches as .pt files, and steps that leave a run as files and come back."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clew.errors import ConfigError, RecordError
from clew.record import Writer, rows
from clew.record.rows import Sequence
from clew.record.run import RunDirectory, _git_revision, open_run
from clew.training.export import choose_steps, export_steps, import_steps
from clew.training.padded import load_padded, load_stages, save_padded
from tests.training.sequences import make_batch

floats32 = st.floats(width=32)
numbers = st.floats(allow_nan=False)
nested = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
int32s = st.integers(-(2**31), 2**31 - 1)


@st.composite
def sequences(draw: st.DrawFn, name: str = "s") -> Sequence:
    """Draw a sequence with anything that a row can hold, except that its first token is never trained on."""
    length = draw(st.integers(0, 6))

    def aligned(dtype: type, elements: st.SearchStrategy) -> np.ndarray:
        return draw(hnp.arrays(dtype, length, elements=elements))

    mask = aligned(np.bool_, st.booleans())
    mask[:1] = False
    return Sequence(
        id=name,
        group_id=draw(st.text()),
        episode_id=draw(st.text()),
        input_ids=aligned(np.int32, int32s),
        loss_mask=mask,
        logprobs=aligned(np.float32, floats32),
        versions=aligned(np.int32, int32s),
        turn_ids=aligned(np.int32, int32s),
        temperatures=aligned(np.float32, floats32),
        reward=draw(st.floats()),
        rewards=draw(st.dictionaries(st.text(), numbers, max_size=3)),
        finish_reason=draw(st.text()),
        data=draw(st.dictionaries(st.text(), nested, max_size=3)),
        interactions=draw(st.lists(st.dictionaries(st.text(), nested, max_size=2), max_size=2)),
        images=draw(st.lists(st.from_regex(r"[0-9a-f]{32}\.(png|jpg|gif|webp|bin)", fullmatch=True), max_size=2)),
        error=draw(st.none() | st.text(st.characters())),
        admitted_version=draw(int32s),
        admitted_at=draw(numbers),
        started_at=draw(numbers),
        finished_at=draw(numbers),
        consumed_at=draw(st.none() | numbers),
    )


def bits(value: Any) -> Any:
    """Return something that is equal for two values exactly if they have the same bits, NaN and -0.0 included."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    return np.float64(value).tobytes() if isinstance(value, float) else value


def same(a: Sequence, b: Sequence) -> bool:
    return all(bits(getattr(a, name)) == bits(getattr(b, name)) for name in rows.SCHEMA.names)


@settings(max_examples=60)
@given(st.integers(0, 4).flatmap(lambda n: st.tuples(*(sequences(f"s{i}") for i in range(n)))), st.data())
def test_a_batch_comes_back_as_it_went(
    tmp_path_factory: pytest.TempPathFactory, batch: tuple[Sequence, ...], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("padded") / "step.pt"
    stage = [data.draw(hnp.arrays(np.float32, len(row.input_ids), elements=floats32)) for row in batch]
    save_padded(path, batch, {"advantages": stage})
    back = load_padded(path)
    assert len(back) == len(batch)
    assert all(same(a, b) for a, b in zip(batch, back, strict=True))
    [name], [read] = zip(*load_stages(path).items(), strict=True)
    assert name == "advantages" and [bits(values) for values in read] == [bits(values) for values in stage]


def areals(path: Path, rows_: int = 4, **changes: Any) -> Path:
    """Write a batch as AReaL's workflows make it, and return its path: up to four rows, of 2, 3, 4 and 5 tokens.

    The first token of each row is its prompt. `changes` replace entries; None removes one.
    """
    lengths = torch.arange(2, 2 + rows_)
    attention_mask = torch.arange(5) < lengths[:, None]
    loss_mask = attention_mask.long()
    loss_mask[:, 0] = 0
    content = {
        "input_ids": torch.arange(5 * rows_).view(rows_, 5) * attention_mask,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "logprobs": -0.5 * loss_mask,
        "versions": torch.where(loss_mask > 0, 3, -1),
        "rewards": torch.arange(rows_).float(),
    }
    torch.save({name: value for name, value in (content | changes).items() if value is not None}, path)
    return path


def test_areals_batch_gets_names_and_defaults(tmp_path: Path) -> None:
    path = areals(tmp_path / "batch.pt", pixel_values=torch.zeros(2, 3))
    batch = load_padded(path, group_size=2, first_group=5)
    assert [row.id for row in batch] == ["g000005.e0.s0", "g000005.e1.s0", "g000006.e0.s0", "g000006.e1.s0"]
    assert {row.group_id for row in load_padded(path)} == {"g000000"}
    row = batch[1]
    assert row.input_ids.tolist() == [5, 6, 7] and row.loss_mask.tolist() == [False, True, True]
    assert row.logprobs.tolist() == [0, -0.5, -0.5] and row.versions.tolist() == [-1, 3, 3]
    assert row.turn_ids.tolist() == [-1, 0, 0] and row.temperatures.tolist() == [1, 1, 1]
    assert row.reward == 1.0 and row.rewards == {"reward": 1.0} and row.admitted_version == 3
    assert load_stages(path) == {}


def test_rows_that_are_padded_on_the_left(tmp_path: Path) -> None:
    path = areals(tmp_path / "a.pt")
    on_right = {name: value for name, value in torch.load(path).items() if value.dim() == 2}
    on_left = {name: value.flip(1) for name, value in on_right.items()}  # this reverses the tokens, too
    for row, length in enumerate(range(2, 6)):
        for name, values in on_left.items():
            values[row, 5 - length :] = on_right[name][row, :length]  # back in their order
    assert not torch.equal(on_right["loss_mask"], on_left["loss_mask"])
    right, left = load_padded(path), load_padded(areals(tmp_path / "b.pt", **on_left))
    assert all(same(a, b) for a, b in zip(right, left, strict=True))


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_a_pickled_object_is_refused_and_not_executed(tmp_path: Path) -> None:
    path = areals(tmp_path / "batch.pt", data=Harmful(tmp_path / "trace"))
    with pytest.raises(RecordError, match=r"batch\.pt holds a pickled object \(posix\.system\).* none of it was exec"):
        load_padded(path)
    assert not (tmp_path / "trace").exists()
    areals(path, rewards=np.ones(4))  # harmless, but how would one know
    with pytest.raises(RecordError, match=r"holds a pickled object \(numpy.* Expected tensors, lists and text only"):
        load_padded(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logprobs": None, "versions": None},
            r"has no logprobs, versions; it holds input_ids, .* Expected the padded",
        ),
        ({"attention_mask": torch.ones(4)}, r"attention_mask is a tensor \[4\]; expected \[B, T\]"),
        ({"rewards": torch.ones(3)}, r"rewards is a tensor \[3\]; expected a tensor \[4\]"),
        ({"turn_ids": torch.ones(4, 6)}, r"turn_ids is a tensor \[4, 6\]; expected a tensor \[4, 5\]"),
        ({"stages": {"loss": torch.ones(4)}}, r"stages\.loss is a tensor \[4\]; expected a tensor \[4, 5\]"),
        ({"stages": ["loss"]}, r"stages is a list of 1; expected a dictionary of tensors"),
        ({"id": ["a"]}, r"id is a list of 1; expected a list of 4 texts"),
        ({"id": list("abca")}, r"batch\.pt: 2 sequences of one step have the ID 'a'"),
        ({"data": ["{"] * 4}, r"is not JSON"),
        ({"clew_format": 5}, r"is of format 5; this Clew reads formats up to 4"),
        ({"loss_mask": torch.ones(4, 5)}, r"batch\.pt: sequence 0 .* its first token is in loss_mask"),
    ],
)
def test_what_is_not_a_batch_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        load_padded(areals(tmp_path / "batch.pt", **changes))


IMAGE = f"{'0' * 32}.png"


@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/passwd", f"../{IMAGE}", f"{IMAGE}\n", IMAGE.upper(), 7])
def test_images_are_named_by_their_hash_and_nothing_else(tmp_path: Path, name: Any) -> None:
    path = areals(tmp_path / "batch.pt", images=[json.dumps([IMAGE, name])] * 4)
    with pytest.raises(RecordError, match=r"batch\.pt: sequence 0: images names .*; expected names of files in media/"):
        load_padded(path)


def test_a_small_file_cannot_claim_much_memory(tmp_path: Path) -> None:
    """4 rows of 2e9 tokens, of which the file holds one."""
    expanded = torch.ones(1).expand(4, 2 * 10**9)
    path = tmp_path / "batch.pt"
    cases: list[dict[str, Any]] = [{name: expanded for name in ("attention_mask", "logprobs")}]
    for changes in [*cases, {"stages": {"loss": expanded}}]:
        areals(path, **changes)
        assert path.stat().st_size < 10_000
        with pytest.raises(RecordError, match=r"\[4, 2000000000\], its tensors have .* elements.*\.contiguous\(\)"):
            load_padded(path)
    areals(path, rewards=torch.ones(4, device="meta"))
    with pytest.raises(RecordError, match="rewards is not a dense tensor"):
        load_padded(path)
    shared = "x" * 2**20
    areals(path, data=[shared] * 400)
    with pytest.raises(RecordError, match="the texts of data are longer than the whole file"):
        load_padded(path)


def test_a_compressed_file_is_not_unpacked(tmp_path: Path) -> None:
    path, small = areals(tmp_path / "batch.pt", data=["{}" + " " * 10**6] * 4), tmp_path / "small.pt"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in whole.infolist():
            packed.writestr(member.filename, whole.read(member))
    with pytest.raises(RecordError, match=r"small\.pt: its \d+ bytes unpack to 1\d{6}"):
        load_padded(small)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = areals(tmp_path / "batch.pt")
    with pytest.raises(RecordError, match=r"has 4 rows, which is not a multiple of the group size 3"):
        load_padded(path, group_size=3)
    with pytest.raises(RecordError, match=r"none\.pt is missing"):
        load_padded(tmp_path / "none.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(RecordError, match=r"list\.pt holds a list; expected a dictionary"):
        load_padded(tmp_path / "list.pt")
    content = path.read_bytes()
    for share in (0.0, 0.3, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(RecordError, match=r"batch\.pt cannot be read as a \.pt file .* It was truncated"):
            load_padded(path)
    path.write_bytes(b"PAR1 and so on")
    with pytest.raises(RecordError, match=r"batch\.pt cannot be read as a \.pt file"):
        load_padded(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    save_padded(path, make_batch(groups=2, samples=2))
    content = path.read_bytes()
    begin = content.index(b"g1.e0.s0")  # in a text
    for place in (begin, begin + 3):
        altered = bytearray(content)
        altered[place] ^= 1
        path.write_bytes(altered)
        with pytest.raises(RecordError, match=r"step\.pt was altered after it was written: a checksum differs"):
            load_padded(path)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run with three recorded steps."""
    with Writer(tmp_path / "run") as writer:
        for step in range(3):
            batch = make_batch(groups=2, samples=2, seed=step, version=step)
            writer.step(batch, stages={"advantages": [row.logprobs * 2 for row in batch]}, metrics={"loss": step})
    return open_run(tmp_path / "run")


def test_steps_leave_and_come_back(run: RunDirectory, tmp_path: Path) -> None:
    files = export_steps(run, "pt", "1:", tmp_path / "out")
    assert [file.name for file in files] == ["step-000001.pt", "step-000002.pt"]
    import_steps(files, tmp_path / "back", None)
    back = open_run(tmp_path / "back")
    assert back.steps.count() == 2 and back.facts()["trainer"] == "clew import"
    for step in range(2):
        before, after = run.steps.read_data(step + 1), back.steps.read_data(step)
        assert all(same(a, b) for a, b in zip(before, after, strict=True))
        assert back.steps.read(step)["digests"]["data"] == run.steps.read(step + 1)["digests"]["data"]
        assert back.steps.read(step)["metrics"]["reward"] == np.mean([row.reward for row in after])
        stages = back.steps.read_stages(step).arrays["advantages"]
        assert np.array_equal(stages[after[0].id], 2 * after[0].logprobs)
    with pytest.raises(RecordError, match=r"back exists already"):
        import_steps(files, tmp_path / "back", None)


def test_an_import_is_whole_or_nothing(tmp_path: Path) -> None:
    files = [areals(tmp_path / f"{name}.pt") for name in "abc"]
    import_steps(files, tmp_path / "run", 2)
    assert [entry["groups"] for entry in open_run(tmp_path / "run").steps.index()] == [
        ["g000000", "g000001"],
        ["g000002", "g000003"],
        ["g000004", "g000005"],
    ]
    files[2].write_bytes(b"")
    with pytest.raises(RecordError, match=r"c\.pt cannot be read"):
        import_steps(files, tmp_path / "other", 2)
    empty = areals(tmp_path / "empty.pt", rows_=0)
    with pytest.raises(RecordError, match=r"empty\.pt: step 0 has no sequences"):
        import_steps([empty], tmp_path / "other", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c.pt", "empty.pt", "run"]


def test_an_import_runs_nothing_that_a_repository_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder may be a stranger's: git would run a filter or a watcher that its .git/config names."""
    path = areals(tmp_path / "batch.pt")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.chdir(theirs)
    (theirs / "watch").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    (theirs / "watch").chmod(0o755)
    for words in (("init", "-q"), ("config", "core.fsmonitor", f"{theirs}/watch"), ("rev-parse", "--git-dir")):
        subprocess.run(["git", *words], check=True, capture_output=True)
    (theirs / ".gitattributes").write_text("* filter=theirs\n")
    subprocess.run(["git", "-c", "core.fsmonitor=false", "add", "."], check=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.fsmonitor=false")
    subprocess.run(["git", *identity, "commit", "-qm", "theirs"], check=True)
    _git_revision()  # what a training run in this folder asks git
    assert not (tmp_path / "was-run").exists()
    subprocess.run(["git", "config", "filter.theirs.clean", f"{theirs}/watch"], check=True)
    (theirs / ".gitattributes").touch()
    import_steps([path], tmp_path / "imported", None)
    assert not (tmp_path / "was-run").exists()
    subprocess.run(["git", "status"], check=True, capture_output=True)
    assert (tmp_path / "was-run").exists()  # plain git does run it, so the checks above can fail


def test_an_exported_parquet_file_holds_a_step_and_its_stages(run: RunDirectory, tmp_path: Path) -> None:
    [file] = export_steps(run, "parquet", "1", tmp_path / "out")
    batch = run.steps.read_data(1)
    assert all(same(a, b) for a, b in zip(rows.from_table(rows.read_table(file)), batch, strict=True))
    stage = pq.read_table(file).column("stage_advantages").to_pylist()
    assert stage == [(2 * row.logprobs).tolist() for row in batch]
    with pytest.raises(RecordError, match="it lies inside the record"):
        export_steps(run, "parquet", "1", run.steps.folder)


def test_a_line_of_jsonl_is_a_sequence(run: RunDirectory, tmp_path: Path) -> None:
    odd = make_batch(groups=1, samples=2)
    changed = Sequence(**(vars(odd[1]) | {"reward": float("nan"), "data": {"a": [float("inf"), {"b": "\ud83d"}]}}))
    with Writer(run.path) as writer:
        writer.step([odd[0], changed], stages={"loss": [[float("nan")] * len(row.input_ids) for row in odd]})
    files = export_steps(run, "jsonl", "", tmp_path / "out")
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in range(4)]

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    first, second = (json.loads(line, parse_constant=strict) for line in files[3].read_text().splitlines())
    assert first["input_ids"] == odd[0].input_ids.tolist() and first["rewards"] == {"match": odd[0].reward}
    assert second["reward"] is None and second["data"] == {"a": [None, {"b": "\ud83d"}]}
    assert second["stages"] == {"loss": [None if trained else 0.0 for trained in odd[1].loss_mask]}


def test_which_steps_are_meant(run: RunDirectory, tmp_path: Path) -> None:
    assert choose_steps(run, "") == [0, 1, 2]
    assert choose_steps(run, "1") == [1] and choose_steps(run, "-1") == [2] and choose_steps(run, "0") == [0]
    assert choose_steps(run, "1:9") == [1, 2] and choose_steps(run, ":1") == [0] and choose_steps(run, "-2:") == [1, 2]
    for wrong in ("one", "1:2:3", "1-2"):
        with pytest.raises(RecordError, match=rf"--steps {wrong}: expected one step"):
            choose_steps(run, wrong)
    with pytest.raises(RecordError, match="--steps 5:7 names no committed step: there are 3"):
        choose_steps(run, "5:7")
    run.steps.prune(before=2)
    assert choose_steps(run, "") == [2]
    with pytest.raises(RecordError, match=r"sequences of step 1 are gone: .* the next that has its own is step 2\. "):
        choose_steps(run, "1:")
    with pytest.raises(ConfigError, match=r"Cannot export as 'csv': expected parquet, jsonl, pt"):
        export_steps(run, "csv", "", tmp_path / "out")
