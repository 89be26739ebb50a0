"""Bundles and names out of records that somebody made by hand."""

from __future__ import annotations

import json
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

from clew.errors import RecordError
from clew.record import bundle as bundles
from clew.record import chain
from clew.record.bundle import opened, write_bundle
from clew.record.media import media_name
from clew.record.run import RunDirectory, open_run
from clew.record.writer import Writer

PICTURE = b"\x89PNG and so on"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Run of another trainer, with a picture."""
    with Writer(tmp_path / "run") as writer:
        name = writer.run.media.put(PICTURE)
        row = {"group_id": "g0", "input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -1], "reward": 1.0}
        writer.step([row | {"images": [name]}])
    return writer.run


def altered(path: Path, **changes: str) -> Path:
    """A copy of a bundle with members added."""
    with zipfile.ZipFile(path, "a") as archive:
        for name, content in changes.items():
            archive.writestr(name, content)
    return path


def test_a_bundle_takes_the_picture_along(run: RunDirectory, tmp_path: Path) -> None:
    path = write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")
    with opened(path) as (there, _):
        assert there.media.read(media_name(PICTURE)) == PICTURE


@pytest.mark.parametrize(
    "name",
    ["../outside", "/tmp/outside", "steps/../../outside", "./a", "a//b", "C:\\\\a", "a\\\\..\\\\b", "..", "logs/.."],
)
def test_members_that_point_elsewhere_are_refused(run: RunDirectory, tmp_path: Path, name: str) -> None:
    path = altered(write_bundle(run, 0, stages_only=True, to=tmp_path / "in" / "a.zip"), **{name: "owned"})
    with pytest.raises(RecordError, match="is not a plain path within it"), opened(path):
        pass
    assert not (tmp_path / "outside").exists()


def test_links_and_members_that_come_twice_are_refused(run: RunDirectory, tmp_path: Path) -> None:
    path = write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")
    link = zipfile.ZipInfo("checkpoints/latest")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc")
    with pytest.raises(RecordError, match="latest' is a link or a device"), opened(path):
        pass
    path = write_bundle(run, 0, stages_only=True, to=tmp_path / "b.zip")
    with pytest.warns(UserWarning, match="Duplicate"):
        altered(path, **{"run.json": "{}"})
    with pytest.raises(RecordError, match=r"it holds 'run\.json' twice"), opened(path):
        pass


def test_a_bundle_that_unpacks_to_much_is_refused_before_anything_is_written(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("logs/zeros", "w") as zeros:
        for _ in range(300):
            zeros.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    monkeypatch.setattr(zipfile.ZipFile, "extractall", None)  # it does not come to that
    said = r"bytes unpack to 31\d{7}, and a bundle of this size has at most 268435456"
    with pytest.raises(RecordError, match=said), opened(path):
        pass
    monkeypatch.setattr(bundles, "MEMBERS", 3)
    with pytest.raises(RecordError, match=r"it holds \d+ files, and a bundle has at most 3"), opened(path):
        pass


def test_a_member_that_is_longer_than_it_says_ends_there(run: RunDirectory, tmp_path: Path) -> None:
    path = altered(write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip"), **{"logs/x": "y" * 10_000})
    content = path.read_bytes()
    said = (10_000).to_bytes(4, "little")
    path.write_bytes(content.replace(said, (10).to_bytes(4, "little")))
    with pytest.raises(RecordError, match="neither a run directory nor a bundle"), opened(path):
        pass


def test_pictures_that_are_not_what_their_name_says_leave_no_run(run: RunDirectory, tmp_path: Path) -> None:
    other = run.media.put(b"\x89PNG another")
    run.media.path(media_name(PICTURE)).write_bytes(b"\x89PNG another")
    with pytest.raises(
        RecordError, match=rf"has other content .*that of {other}, which it may have changed places with"
    ):
        run.media.read(media_name(PICTURE))
    run.media.path(media_name(PICTURE)).write_bytes(b"\x89PNG a third")
    with pytest.raises(RecordError, match="has other content than when it was written"):
        write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")
    with pytest.raises(RecordError, match=r"Cannot look for the image '\.\./run\.json'"):
        run.media.read("../run.json")


def test_a_bundle_in_a_folder_is_named_after_the_run_and_the_step(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{run.path.parent.name}-{run.path.name}-step-000000.stages.clew.zip"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(run.path)
    for path in (run.path, Path()):
        bundle = write_bundle(open_run(path), 0, stages_only=True, to=tmp_path / "here")
        assert bundle == tmp_path / "here" / name


def test_a_bundle_follows_no_link_out_of_the_run(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps({}))
    run.steps.stage_path(0, 0).rename(tmp_path / "elsewhere")
    run.steps.stage_path(0, 0).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match=r"rank-0\.parquet is a link to .*elsewhere, which is not in the run"):
        write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")


def test_a_bundle_that_cannot_be_read_is_not_said_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.zip").symlink_to("a.zip")
    said = r"Cannot read .*/a\.zip: Too many levels of symbolic links"
    with pytest.raises(RecordError, match=said), opened(tmp_path / "a.zip"):
        pass


def test_an_altered_description_is_named_by_its_place_in_the_bundle(run: RunDirectory, tmp_path: Path) -> None:
    path = write_bundle(run, 0, stages_only=True, to=tmp_path / "a.zip")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, b"{}" if name == "bundle.json" else content)
    with pytest.raises(RecordError, match=f"Cannot read {path}/bundle.json: "), opened(path):
        pass


def test_a_run_directory_without_steps_has_none(run: RunDirectory) -> None:
    shutil.rmtree(run.steps.folder)
    with opened(run.path) as (there, _):
        assert there.steps.count() == 0 and chain.breaks(there) == []


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "\0"])
def test_ids_of_groups_are_no_paths(run: RunDirectory, name: str) -> None:
    with pytest.raises(RecordError, match="not a group's ID"):
        run.inbox.remove([name])
