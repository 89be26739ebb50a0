"""Alterations of the files of a run: what a bad disk, a wrong copy, an editor or an enemy could do to them.

Every alteration has a name, such as "steps/step-000001.json: another number 3". The name alone decides what is changed,
so one alteration can be made again without the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Change = Callable[[Path, random.Random], None]
"""Alters one file in place."""


def _rewrite(change: Callable[[bytearray, random.Random], bytes | bytearray]) -> Change:
    """An alteration of a file's bytes."""

    def alter(path: Path, rng: random.Random) -> None:
        path.write_bytes(change(bytearray(path.read_bytes()), rng))

    return alter


# Bytes ----------------------------------------------------------------------------------------------------------------


def flip_a_bit(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def truncate(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def fill_with_zeros(content: bytearray, rng: random.Random) -> bytearray:
    first = rng.randrange(len(content))
    length = min(rng.choice((1, 16, 512)), len(content) - first)
    content[first : first + length] = bytes(length)
    return content


def append_garbage(content: bytearray, rng: random.Random) -> bytearray:
    return content + rng.randbytes(rng.choice((1, 40)))


def cut_out(content: bytearray, rng: random.Random) -> bytearray:
    first = rng.randrange(len(content))
    del content[first : first + rng.choice((1, 7, 100))]
    return content


def insert_no_utf8(content: bytearray, rng: random.Random) -> bytearray:
    place = rng.randrange(len(content))
    return content[:place] + b"\xff\xc0" + content[place:]


# The file itself ------------------------------------------------------------------------------------------------------


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def put_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def put_a_device(path: Path, rng: random.Random) -> None:
    """Reading it never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def put_a_dangling_link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def put_a_link_to_itself(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def put_another(path: Path, rng: random.Random) -> None:
    """The content of another file of the same kind, from anywhere in the run."""
    root = next(parent for parent in path.parents if (parent / "run.json").exists() or (parent / "steps").is_dir())
    content = path.read_bytes()
    others = [
        other
        for other in sorted(root.rglob(f"*{path.suffix}"))
        if other.is_file() and not other.is_symlink() and other.read_bytes() != content
    ]
    path.write_bytes(rng.choice(others).read_bytes() if others else b"another")


# JSON -----------------------------------------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list within a value, with each of its keys or indices."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def of_json(change: Callable[[Any, random.Random], Any]) -> Callable[[bytearray, random.Random], bytes]:
    """An alteration of a JSON document, or of one line of several. change: returns the new document, or the text of
    one."""

    def alter(content: bytearray, rng: random.Random) -> bytes:
        text = content.decode()
        lines = text.splitlines() if text.count("\n{") else [text]
        if lines[0] == "{":  # one document over many lines
            lines = [text]
        chosen = rng.randrange(len(lines))
        changed = change(json.loads(lines[chosen]), rng)
        lines[chosen] = changed if isinstance(changed, str) else json.dumps(changed)
        return "".join(line + "\n" for line in lines).encode(errors="surrogatepass")

    return alter


def _anywhere(value: Any, rng: random.Random, kind: Any = object) -> tuple[Any, Any]:
    found = [(inside, key) for inside, key in places(value) if isinstance(inside[key], kind)]
    return rng.choice(found) if found else ({"nothing": 0}, "nothing")


def remove_a_key(value: Any, rng: random.Random) -> Any:
    inside, key = _anywhere(value, rng)
    del inside[key]
    return value


def add_a_key(value: Any, rng: random.Random) -> Any:
    return {**value, "another": rng.choice((1, None, "text", []))} if isinstance(value, dict) else [value]


ODD = (None, True, 0, -1, 2.5, 10**30, "", "text", "1", [], {}, [None], {"a": 1}, [[[]]], float("nan"), float("inf"))


def another_type(value: Any, rng: random.Random) -> Any:
    inside, key = _anywhere(value, rng)
    inside[key] = rng.choice([odd for odd in ODD if type(odd) is not type(inside[key])])
    return value


def number_as_text(value: Any, rng: random.Random) -> Any:
    inside, key = _anywhere(value, rng, (int, float))
    inside[key] = str(inside[key])
    return value


def another_number(value: Any, rng: random.Random) -> Any:
    inside, key = _anywhere(value, rng, (int, float))
    now = inside[key]
    inside[key] = rng.choice((now + 1, now * 1.001 + 0.001, -now - 1, 0 if now else 1, 2**70, float("nan"), 1e308))
    return value


def another_text(value: Any, rng: random.Random) -> Any:
    inside, key = _anywhere(value, rng, str)
    text = str(inside[key]) or "x"
    place = rng.randrange(len(text))
    other = rng.choice(("0" if text[place] != "0" else "1", "", "\x1b[31m", "\ud800", "é", "x" * 5000))
    inside[key] = text[:place] + other + text[place + 1 :]
    return value


def rename_a_key(value: Any, rng: random.Random) -> Any:
    found = [(inside, key) for inside, key in places(value) if isinstance(inside, dict)] or [({"x": 0}, "x")]
    inside, key = rng.choice(found)
    inside[rng.choice((f"{key}x", "", "clew_format", "../x", "[/x]"))] = inside.pop(key)
    return value


def an_endless_number(value: Any, rng: random.Random) -> str:
    inside, key = _anywhere(value, rng)
    inside[key] = "DIGITS"
    return json.dumps(value).replace('"DIGITS"', rng.choice(("9" * 5000, "1e999", "-1e-999", "NaN", "-Infinity")))


def the_same_key_twice(value: Any, rng: random.Random) -> str:
    if not isinstance(value, dict) or not value:
        return "{}"
    key = rng.choice(sorted(value))
    return json.dumps(value)[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(ODD))}}}"


def deep(value: Any, rng: random.Random) -> str:
    inside, key = _anywhere(value, rng)
    inside[key] = "DEEP"
    bracket = rng.choice(("[]", "{}"))
    many = "[" * 100_000 + "]" * 100_000 if bracket == "[]" else '{"a":' * 100_000 + "1" + "}" * 100_000
    return json.dumps(value).replace('"DEEP"', many)


def another_document(value: Any, rng: random.Random) -> str:
    return rng.choice(("null", "[]", "{}", "3", '"text"', "[null]", "true", "NaN", " ", "[" * 100_000))


# YAML -----------------------------------------------------------------------------------------------------------------


def of_yaml(change: Callable[[list[str], random.Random], None]) -> Callable[[bytearray, random.Random], bytes]:
    def alter(content: bytearray, rng: random.Random) -> bytes:
        lines = content.decode().splitlines()
        change(lines, rng)
        return "\n".join(lines).encode(errors="surrogatepass") + b"\n"

    return alter


def another_value(lines: list[str], rng: random.Random) -> None:
    place = rng.choice([i for i, line in enumerate(lines) if not line.endswith(":")])
    lines[place] = lines[place].split(": ")[0] + ": " + rng.choice(("null", "text", "-1", "[]", "{a: 1}", "1e400", "'"))


def a_tag(lines: list[str], rng: random.Random) -> None:
    place = rng.choice([i for i, line in enumerate(lines) if not line.endswith(":")])
    tag = rng.choice(("!!python/object/apply:os.getcwd []", "!!binary ÿ", "!unknown x", "!!float x", "!!timestamp x"))
    lines[place] = lines[place].split(": ")[0] + ": " + tag


def an_odd_line(lines: list[str], rng: random.Random) -> None:
    odd = ("\t x", "a: b: c", "? [1]: 2", "x: *y", "x: &x [*x]", "<<: 3", "---", "x: ${y}", "x: 2024-13-45", "- 1")
    deep = ("[" * 100_000, "x: " + "{a: " * 2000 + "}" * 2000)
    lines.insert(rng.randrange(len(lines)), rng.choice((*odd, *deep, "\0", "\x85", "1: 2", "null: 1")))


def a_billion_laughs(lines: list[str], rng: random.Random) -> None:
    lines.append("a0: &a0 [x, x, x, x, x, x, x, x, x]")
    lines.extend(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))


# Tables ---------------------------------------------------------------------------------------------------------------


def of_table(change: Callable[[pa.Table, random.Random], pa.Table]) -> Change:
    """An alteration of a Parquet table, or of a waiting group. The file is as sound as one that was written so."""

    def alter(path: Path, rng: random.Random) -> None:
        if path.suffix == ".arrows":
            table = change(pa.ipc.open_stream(path.read_bytes()[:-4]).read_all(), rng)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            content = sink.getvalue().to_pybytes()
            path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
        else:
            table = change(pq.ParquetFile(path).read(), rng)
            pq.write_table(table, path, compression="zstd", write_page_checksum=True)

    return alter


def _set(table: pa.Table, place: int, values: list[Any], kind: Any = None) -> pa.Table:
    kind = kind or table.schema.field(place).type
    return table.set_column(place, pa.field(table.schema.names[place], kind), pa.array(values, kind))


def _column(table: pa.Table, rng: random.Random, *kinds: Any) -> int:
    found = [i for i, column in enumerate(table.schema) if not kinds or any(check(column.type) for check in kinds)]
    return rng.choice(found)


def drop_a_column(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.remove_column(_column(table, rng))


def rename_a_column(table: pa.Table, rng: random.Random) -> pa.Table:
    names = table.column_names
    names[_column(table, rng)] = rng.choice(("another", "", "id", "../x"))
    return table.rename_columns(names)


def add_a_column(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.append_column("another", pa.array([1] * table.num_rows))


def retype_a_column(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _column(table, rng)
    kind, value = rng.choice(((pa.string(), "x"), (pa.int64(), 7), (pa.float64(), 0.5), (pa.list_(pa.int64()), [1])))
    return _set(table, place, [value] * table.num_rows, kind)


def swap_rows(table: pa.Table, rng: random.Random) -> pa.Table:
    order = list(range(table.num_rows))
    a, b = rng.sample(order, 2) if len(order) > 1 else (0, 0)
    order[a], order[b] = order[b], order[a]
    return table.take(order)


def drop_a_row(table: pa.Table, rng: random.Random) -> pa.Table:
    gone = rng.randrange(table.num_rows)
    return table.take([row for row in range(table.num_rows) if row != gone])


def repeat_a_row(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.take([*range(table.num_rows), rng.randrange(table.num_rows)])


def no_rows(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.slice(0, 0)


def empty_a_place(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _column(table, rng)
    values = table.column(place).to_pylist()
    values[rng.randrange(len(values))] = None
    return _set(table, place, values)


def change_a_number(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _column(table, rng, pa.types.is_floating, pa.types.is_integer)
    values = table.column(place).to_pylist()
    row = rng.randrange(len(values))
    now = values[row] or 0
    other = (now + 1, now + 0.25, float("nan"), -float("inf")) if isinstance(now, float) else (now + 1, now ^ 3)
    values[row] = rng.choice(other)
    return _set(table, place, values)


def change_an_entry(table: pa.Table, rng: random.Random) -> pa.Table:
    """One entry of a list: a token, a logprob, a version."""
    place = _column(table, rng, pa.types.is_list)
    values = table.column(place).to_pylist()
    row = rng.choice([i for i, value in enumerate(values) if value] or [0])
    if not values[row]:
        values[row] = [] if values[row] is None else None
        return _set(table, place, values)
    at = rng.randrange(len(values[row]))
    now = values[row][at]
    if isinstance(now, bool):
        values[row][at] = not now
    elif isinstance(now, str):
        values[row][at] = now + "x"
    else:
        values[row][at] = rng.choice(
            (now + 1, None, *((float("nan"), now + 1e-3) if isinstance(now, float) else (-7,)))
        )
    return _set(table, place, values)


def change_a_length(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _column(table, rng, pa.types.is_list)
    values = table.column(place).to_pylist()
    row = rng.randrange(len(values))
    values[row] = rng.choice(((values[row] or [])[:-1], (values[row] or [])[:1] + (values[row] or []), []))
    return _set(table, place, values)


def change_a_text(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _column(table, rng, pa.types.is_string)
    values = table.column(place).to_pylist()
    row = rng.randrange(len(values))
    text = values[row] or ""
    at = rng.randrange(len(text) + 1)
    values[row] = rng.choice((text + "x", text[:at] + "7" + text[at + 1 :], "null", "[]", '"x"', "{", "[" * 100_000))
    return _set(table, place, values)


def change_a_nested_value(table: pa.Table, rng: random.Random) -> pa.Table:
    """Something within a column of JSON."""
    found = [i for i in range(table.num_columns) if _is_json(table.column(i))]
    if not found:
        return change_a_text(table, rng)
    place = rng.choice(found)
    values = table.column(place).to_pylist()
    row = rng.randrange(len(values))
    change = rng.choice((remove_a_key, another_type, another_number, another_text, the_same_key_twice, deep))
    changed = change(json.loads(values[row]), rng)
    values[row] = changed if isinstance(changed, str) else json.dumps(changed)
    return _set(table, place, values)


def _is_json(column: pa.ChunkedArray) -> bool:
    first = column[0].as_py() if len(column) and pa.types.is_string(column.type) else None
    return isinstance(first, str) and first[:1] in ("{", "[")


def another_format(table: pa.Table, rng: random.Random) -> pa.Table:
    odd = rng.choice((b"0", b"1", b"99", b"x", b"", None))
    return table.replace_schema_metadata({} if odd is None else {"clew_format": odd})


# Weights --------------------------------------------------------------------------------------------------------------


def of_header(change: Callable[[dict[str, Any], random.Random], Any]) -> Callable[[bytearray, random.Random], bytes]:
    """An alteration of the header of a safetensors file."""

    def alter(content: bytearray, rng: random.Random) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        changed = change(json.loads(content[8 : 8 + length]), rng)
        header = (changed if isinstance(changed, str) else json.dumps(changed)).encode(errors="surrogatepass")
        return struct.pack("<Q", len(header)) + header + bytes(content[8 + length :])

    return alter


def swap_two_tensors(header: dict[str, Any], rng: random.Random) -> Any:
    names = [name for name in header if name != "__metadata__"]
    if len(names) > 1:
        a, b = rng.sample(names, 2)
        header[a], header[b] = header[b], header[a]
    return header


# All of them ----------------------------------------------------------------------------------------------------------

FILES: tuple[Change, ...] = (
    remove, put_a_folder, put_a_pipe, put_a_device, put_a_dangling_link, put_a_link_to_itself, empty, put_another
)  # fmt: skip
BYTES = (flip_a_bit, truncate, fill_with_zeros, append_garbage, cut_out, insert_no_utf8)
JSON = (
    remove_a_key, add_a_key, another_type, number_as_text, another_number, another_text, rename_a_key,
    an_endless_number, the_same_key_twice, deep, another_document,
)  # fmt: skip
YAML = (another_value, a_tag, an_odd_line, a_billion_laughs)
TABLES = (
    drop_a_column, rename_a_column, add_a_column, retype_a_column, swap_rows, drop_a_row, repeat_a_row, no_rows,
    empty_a_place, change_a_number, change_an_entry, change_a_length, change_a_text, change_a_nested_value,
    another_format,
)  # fmt: skip
HEADERS = (remove_a_key, another_type, another_number, another_text, rename_a_key, deep, swap_two_tensors)


def changes(path: Path) -> dict[str, Change]:
    """Return what can be done to a file, by name."""
    found: dict[str, Change] = {change.__name__: change for change in FILES}
    found |= {change.__name__: _rewrite(change) for change in BYTES}
    if path.suffix in (".json", ".jsonl"):
        found |= {change.__name__: _rewrite(of_json(change)) for change in JSON}
    if path.suffix == ".yaml":
        found |= {change.__name__: _rewrite(of_yaml(change)) for change in YAML}
    if path.suffix in (".parquet", ".arrows"):
        found |= {change.__name__: of_table(change) for change in TABLES}
    if path.suffix == ".safetensors":
        found |= {change.__name__: _rewrite(of_header(change)) for change in HEADERS}
    return {name.replace("_", " "): change for name, change in found.items()}


def alterations(run: Path, each: Callable[[str, str], int]) -> Iterator[str]:
    """The names of the alterations of a run's files. each: how many there are of one kind, by file and kind."""
    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size):
        file = path.relative_to(run).as_posix()
        for kind in changes(path):
            yield from (f"{file}: {kind} {number}" for number in range(each(file, kind)))


def alter(run: Path, name: str) -> bool:
    """Make the alteration of this name; False where it left the file as it was."""
    file, _, what = name.partition(": ")
    path = run / file
    before = path.read_bytes()
    changes(path)[what.rpartition(" ")[0]](path, random.Random(name))
    return not path.is_file() or path.is_symlink() or path.read_bytes() != before


def restore(original: Path, run: Path, name: str) -> None:
    """Undo the alteration of this name, from the original run."""
    path = run / name.partition(": ")[0]
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    shutil.copy2(original / path.relative_to(run), path)
