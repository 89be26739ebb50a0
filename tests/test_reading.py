"""Files that someone altered: each ends in an error that names file, field, what was expected and what was found."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clew import config as configuration
from clew.errors import ClewError, ConfigError, RecordError
from clew.reading import Count, FileMissing, read_bytes, read_json, read_yaml
from clew.record import rows
from clew.record.run import RunDirectory, Server
from clew.view.status import read_statuses
from tests.record.test_rows import a_sequence


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(path))  # a socket's path may have 107 characters


def itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (folder, "expected a file, found a folder"),
        (pipe, "expected a file, found a named pipe"),
        (device, "expected a file, found a device"),
        (listening, "No such device or address"),
        (itself, "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "run.json")
    with pytest.raises(RecordError, match=rf"Cannot read .*/run\.json: {words}\. Restore it from a copy"):
        read_bytes(tmp_path / "run.json")


def test_a_file_that_is_longer_than_its_size_is_read_whole() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0, "as of a file that grows between the two calls"
    assert read_bytes(status).startswith(b"Name:") and b"VmPeak:" in read_bytes(status)


def test_a_missing_file_is_both_a_clew_error_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("none", "link"):
        with pytest.raises(FileMissing, match=rf"Cannot read .*/{name}: it is missing\. Restore it"):
            read_json(tmp_path / name)
    assert issubclass(FileMissing, ClewError) and issubclass(FileMissing, FileNotFoundError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected JSON, found 0 bytes that are not"),
        (b"{", "expected JSON, found 1 bytes that are not"),
        (b'{"a": "\xff"}', "expected JSON, .*utf-8"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 100 objects and lists within one another"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "more than 100 objects and lists within one another"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice in one object"),
        (b"[" + b"9" * 5000 + b"]", "expected JSON, .*digits"),
        (b"null", "the document is None; expected fields with values"),
        (b'{"a": "1"}', "a is '1'; expected a whole number"),
        (b'{"a": NaN}', "a is nan; expected"),
    ],
)
def test_json_that_is_not_what_it_should_be(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RecordError, match=rf"Cannot read .*/a\.json: .*{words}.* altered after it was"):
        read_json(tmp_path / "a.json", dict[str, Count])


def test_a_hundred_levels_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100 + "]" * 100)
    assert read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: \xff", "expected UTF-8 text, found the byte 0xff at position 3"),
        (b"a: !!python/object/apply:os.getcwd []", "expected YAML .*python/object"),
        (b"a: !!float x", "expected YAML"),
        (b"[" * 100_000, "expected YAML .*more than 100 mappings"),
        (b"- " * 5000, "expected YAML .*more than 100 mappings"),
        (b"a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]", "expected YAML .*inside a block with an anchor"),
        (b"- a", "expected sections by name, found list"),
        (b"1: 2", "expected sections by name, found a key that is not text"),
        (b"a: 2024-13-45", "expected YAML"),
    ],
)
def test_yaml_that_is_not_what_it_should_be(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RecordError, match=rf"Cannot read .*/config\.yaml: {words}"):
        read_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        configuration.load(tmp_path / "config.yaml")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def read_evals(run: RunDirectory) -> object:
    return run.evals.read_all()


def newest_eval(run: RunDirectory) -> object:
    return run.evals.newest()


STATUS = {"process": "rollout", "pid": 7, "updated": 1e9, "doing": "rolling out", "version": 3, "waits": []}
WAIT = {"what": "a batch", "alike": 1, "unblocks": "rollout", "numbers": "", "since": 1e9}
WEIGHTS = {"version": 1, "path": "w", "digest": "00", "probe_ids": [1, 2], "probe_logprob": -0.5}
SERVER = {"name": "s", "address": "127.0.0.1:1", "pid": 7, "ready": True, "token": ""}


@pytest.mark.parametrize(
    ("file", "content", "words", "read"),
    [
        ("run.json", None, "the document is None; expected", lambda run: RunDirectory(run.path)),
        ("run.json", {"created": "then"}, "created is 'then'; expected", RunDirectory.facts),
        ("run.json", {"packages": {"torch": 2}}, "packages.torch is 2; expected", RunDirectory.facts),
        ("run.json", {"parameters": "all"}, "parameters is 'all'; expected", RunDirectory.facts),
        ("status/rollout.json", {**STATUS, "updated": ...}, "the field updated is missing", read_statuses),
        ("status/rollout.json", {**STATUS, "waits": [{**WAIT, "since": []}]}, r".*since is \[\]", read_statuses),
        ("status/rollout.json", {**STATUS, "waits": 3}, "waits is 3; expected", read_statuses),
        ("evals/version-000002.json", {"pass@1": 1.0}, "the field version is missing", read_evals),
        ("evals/version-000002.json", {"version": "2"}, "version is '2'; expected", newest_eval),
        ("evals/version-000002.json", {"version": 2, "pass@1": "x"}, "pass@1 is 'x'", read_evals),
        ("evals/version-000002.json", {"version": 2, "reward": []}, r"reward is \[\]", read_evals),
        ("weights.json", {**WEIGHTS, "probe_ids": [1, "2"]}, r"probe_ids\.1 is '2'", RunDirectory.newest_weights),
        ("weights.json", {**WEIGHTS, "probe_ids": None}, "probe_ids is None", RunDirectory.newest_weights),
        ("weights.json", {**WEIGHTS, "probe_logprob": "x"}, "probe_logprob is 'x'", RunDirectory.newest_weights),
        ("weights.json", {**WEIGHTS, "probe_logprob": float("nan")}, "probe_logprob is", RunDirectory.newest_weights),
        ("servers.json", {"s": {**SERVER, "ready": "yes"}}, "s.ready is 'yes'; expected", RunDirectory.servers),
        ("servers.json", {"s": {**SERVER, "address": ...}}, "the field s.address is missing", RunDirectory.servers),
        ("inbox/version.json", {"version": -1}, "version is -1; expected", lambda run: run.inbox.published()),
        ("inbox/running.json", {"g000001": "0"}, "g000001 is '0'; expected", lambda run: run.inbox.running()),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(
    run: RunDirectory, file: str, content: object, words: str, read: Callable[[RunDirectory], object]
) -> None:
    """content: `...` stands for no such field."""
    without = json.loads(json.dumps(content, default=lambda _: "..."), object_hook=_without)
    (run.path / file).write_text(json.dumps(without))
    with pytest.raises(RecordError, match=rf"Cannot read .*/{file}: {words}.*It was altered after it was written"):
        read(run)


def _without(found: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in found.items() if value != "..."}


def test_what_clew_writes_is_read(run: RunDirectory) -> None:
    run.register_server(Server(**SERVER))
    run.register_server(Server(**{**SERVER, "name": "t"}))
    assert [server.name for server in run.servers()] == ["s", "t"] and run.servers()[0] == Server(**SERVER)
    run.inbox.set_running({"g000001": 0})
    run.evals.write(2, [a_sequence("g000001.e0.s0")], {"pass@1": None, "reward": 0.5, "rewards": {"right": 0.5}})
    assert run.inbox.running() == {"g000001": 0} and (run.evals.newest() or {})["rewards"] == {"right": 0.5}


def test_a_waiting_group_with_a_right_checksum_and_wrong_content(run: RunDirectory) -> None:
    run.inbox.put("g000004", [a_sequence("g000004.e0.s0")])
    path = run.inbox.path("g000004")
    sound = pa.ipc.open_stream(path.read_bytes()[:-4]).read_all()

    def put(table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        content = sink.getvalue().to_pybytes()
        path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))

    def changed(name: str, values: list) -> pa.Table:
        place = sound.schema.get_field_index(name)
        return sound.set_column(place, sound.schema.field(name), pa.array(values, sound.schema.field(name).type))

    short = [np.zeros(1, np.float32).tolist()]
    for table, words in (
        (sound.drop_columns("logprobs"), "there is no column 'logprobs'"),
        (sound.drop_columns(["group_id", "input_ids"]), "there is no column 'group_id'"),
        (changed("logprobs", short), "has 1 logprobs and"),
        (changed("interactions", ["["]), "interactions of g000004.e0.s0 is no JSON"),
        (changed("data", ['{"a":' * 200 + "1" + "}" * 200]), "data of g000004.e0.s0 has more than 100 objects"),
        (changed("group_id", ["g000005"]), "it holds sequences of g000005"),
        (sound.slice(0, 0), "it holds no row"),
    ):
        put(table)
        with pytest.raises(
            RecordError, match=rf"g000004\.arrows was altered .*{words}.* rollout makes the group again"
        ):
            run.inbox.scan()
    content = b"no table at all"
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    with pytest.raises(RecordError, match=r"g000004\.arrows cannot be read .* rollout makes the group again"):
        run.inbox.read("g000004")


def test_a_table_in_whose_place_is_a_folder(run: RunDirectory) -> None:
    run.steps.data_path(0).mkdir()
    with pytest.raises(RecordError, match=r"step-000000\.parquet: expected a file, found a folder"):
        rows.read_table(run.steps.data_path(0))
