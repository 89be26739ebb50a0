"""The chain of commits: each step's JSON holds digests of the files that existed when it was written.

::

    step-000136.json ◄── step-000137.json ◄── step-000138.json ◄── checkpoints/step-000139/checkpoint.json
                               │
                               ├── step-000137.parquet, step-000137/rank-*.parquet    what the step was computed from
                               ├── checkpoints/step-000130/checkpoint.json            the newest checkpoint
                               └── evals/version-000130.json                          the newest evaluation

A replaced step does not match the step after it, its line in index.jsonl, or the checkpoint that follows it. No step
names the newest checkpoint and the newest evaluation yet, so each checkpoint and evaluation ends with a seal: a digest
of its own content. Files that the run itself removes (`record.keep_steps`, `checkpoint.keep`) break nothing, because
digests are compared only for files that exist.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from clew.reading import RESTORE, read_bytes

if TYPE_CHECKING:
    from clew.record.run import RunDirectory
    from clew.record.steps import Steps

SINCE = 4
"""Version of the record's format that introduced the chain."""

INDEXED = ("groups", "versions", "digests")
"""Fields of a step's JSON that its line in index.jsonl repeats."""

_KEPT = ("clew_format", "chain", "committed_at", "json")
"""Fields of a step's JSON that the checks need. Not all are kept, because there may be ten thousand steps."""
_OF_LINE = ("step", "json")
"""Fields of a line of index.jsonl that the checks need after the line was compared with its step's JSON."""
_SEAL = re.compile(rb', "seal": "([0-9a-f]{32})"\}\Z')
_SEALED = (b'"seal": "', b'"rows": "', b'"follows": "', b'"follows": null')
"""Keys of which every sealed file has at least one, and files older than the seal none. A file that has one of them but
no seal was altered."""
_CHECKPOINT = re.compile(r"checkpoints/step-\d{6,}/checkpoint\.json")
_EVALUATION = re.compile(r"evals/version-\d{6,}\.json")
CHECKPOINT_FOLDER = re.compile(r"step-\d{6,}")


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first, without those with other names, such as copies."""
    folders = (path for path in checkpoints.glob("step-*") if CHECKPOINT_FOLDER.fullmatch(path.name))
    return sorted(folders, key=version_of)


def version_of(checkpoint: Path) -> int:
    """Return the version of a checkpoint, given its folder."""
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Break:
    """A file that does not fit the commits around it."""

    step: int
    file: str
    """Its path in the run directory."""
    why: str
    remedy: str = f"{RESTORE.capitalize()}."
    harmless: bool = False
    """True if the file only repeats what other files say and contradicts none of them: the trainer writes it again."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.file} {self.why}. {self.remedy}"


BREAKS_SHOWN = 5
"""Maximum number of breaks that are printed."""


def breaks_in_words(found: list[Break], whose: str = "") -> list[str]:
    """Return lines that name the first breaks and count the others. `whose` begins the names if there are two runs."""
    lines = [f"BROKEN CHAIN  {whose}{each}" for each in found[:BREAKS_SHOWN]]
    if len(found) > BREAKS_SHOWN:
        lines.append(f"{whose}and {len(found) - BREAKS_SHOWN} more places where the record does not fit together")
    return lines


def digest(content: bytes) -> str:
    """Return the digest of a file's content: the first 32 hexadecimal digits of its SHA-256."""
    return sha256(content).hexdigest()[:32]


def sealed(facts: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text that ends with its seal."""
    content = json.dumps(dict(facts)).encode()[:-1]
    return content + f', "seal": "{digest(content)}"}}'.encode()


def seal_broken(content: bytes) -> bool:
    """Return whether a file was changed after `sealed` made it. A file older than the seal has none, and passes."""
    if found := _SEAL.search(content):
        return digest(content[: found.start()]) != found[1].decode()
    return any(key in content for key in _SEALED)


def link(steps: Steps, step: int, evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the digests of the files that `step` is committed with, by their paths in the run directory.

    Args:
        step: Step that is about to be committed. Its data and its stages are already written.
        evaluation: Newest evaluation, as the step's JSON will hold it; None if there is none.
    """
    run = steps.folder.parent
    files = [steps.data_path(step), *steps.stage_paths(step)]
    files += [folder / "checkpoint.json" for folder in checkpoint_folders(run / "checkpoints")[-1:]]
    if evaluation is not None:
        files.append(run / "evals" / f"version-{evaluation['version']:06d}.json")
    before = {_name(step - 1): committed_digest(steps, step - 1)} if step else {}
    own = {path.relative_to(run).as_posix(): digest(read_bytes(path)) for path in files if path.exists()}
    return {name: known for name, known in (before | own).items() if known is not None}


def committed_digest(steps: Steps, step: int) -> str | None:
    """Return the digest of a committed step's JSON; None if the step is not on record."""
    path = steps.json_path(step)
    if not path.exists():
        return None
    content = read_bytes(path)
    return _digest_of(content, _object(content) or {})


def breaks(
    run: RunDirectory, files_of: range = range(0), *, see: Callable[[int, dict[str, Any]], None] | None = None
) -> list[Break]:
    """Return the files that do not fit into the chain of commits, in the order of the steps; empty if all of them fit.

    Reads index.jsonl, the JSON of every step and that of each checkpoint and evaluation. Steps of a format before
    `SINCE` have no chain, so they are only compared with the index.

    Args:
        files_of: Steps whose files are read in full, too: their data and stages, and the sequences of the evaluations
            before, between and after them, are compared with their digests.
        see: Called with each step's number and unchecked JSON, in order, so that the caller need not read ten thousand
            files a second time.
    """
    found = list(_Chain(run, see).breaks())
    reported = {one.file for one in found}
    for step in files_of:
        found += [*_files(run, step), *_evaluation(run, step, reported)]
    found += _rows_of_evaluations(run, files_of)
    return sorted(found, key=lambda one: one.step)


def not_checked(run: RunDirectory, steps: Iterable[int]) -> str:
    """Return a sentence about what cannot be checked in these steps; empty if everything can.

    An older Clew recorded steps without digests of their files.
    """
    older = [step for step in steps if not _parsed(run.steps.json_path(step)).get("chain")]
    if not older:
        return ""
    which = f"step {older[0]} has" if len(older) == 1 else f"steps {older[0]} to {older[-1]} have"
    return (
        f"{which} no chain, because an older Clew recorded them. Not looked at: whether a step was replaced as a "
        f"whole, and the columns admitted_version, error, sampled_by, routed_experts and the times."
    )


class _Chain:
    """The commits of a run, read from their files, and the checks that compare them."""

    def __init__(self, run: RunDirectory, see: Callable[[int, dict[str, Any]], None] | None) -> None:
        self.run = run
        self.steps = run.steps
        self.commits: dict[int, dict[str, Any]] = {}
        """The fields `_KEPT` of each step's JSON."""
        self.own: dict[int, str | None] = {}
        """Digest of each step's JSON; None if it is unknown because a bundle left the step out."""
        self.differing: dict[int, list[str]] = {}
        """Keys whose values in the index differ from those in the step's JSON, by step."""
        self.strange: list[Break] = []
        self.reported: set[str] = set()
        """Files that have already been reported as not fitting."""
        self.indexed = self.steps.index_path.is_file()
        # text after the last line break is a line that a kill cut short
        *raw, torn = read_bytes(self.steps.index_path).split(b"\n") if self.indexed else [b""]
        self.torn = bool(torn)
        self.lines: list[dict[str, Any] | None] = [None] * len(raw)
        """The fields `_OF_LINE` of each line of index.jsonl; None for a line that is not a JSON object."""
        # Each line is parsed together with its step: to hold a million group names at once takes twice as long.
        for step, content in _contents(self.steps.folder):
            commit, line = _object(content), _object(raw[step]) if step < len(raw) else None
            if commit is None:
                self.strange.append(Break(step=step, file=_name(step), why="is not a JSON object"))
                commit = {}
            elif line is not None:
                self.differing[step] = [key for key in INDEXED if line.get(key) != commit.get(key)]
            if see is not None:
                see(step, commit)
            if line is not None:
                self.lines[step] = {key: line[key] for key in _OF_LINE if key in line}
            self.commits[step] = {key: commit[key] for key in _KEPT if key in commit}
            self.own[step] = _digest_of(content, commit)
        for step in {*range(len(raw))} - {*self.commits}:  # their JSON is gone
            self.lines[step] = _object(raw[step])

    def breaks(self) -> Iterator[Break]:
        """Yield the files that do not fit, each of them once."""
        checks = [
            self.strange,
            self._missing(),
            self._index(),
            self._unchained(),
            self._replaced(),
            self._sealed(),
            self._named(_CHECKPOINT, "newest checkpoint"),
            self._named(_EVALUATION, "newest evaluation"),
        ]
        for found in itertools.chain.from_iterable(checks):
            # each line of the index is a place of its own
            if found.file not in self.reported or found.file.endswith("index.jsonl"):
                self.reported.add(found.file)
                yield found

    def _missing(self) -> Iterator[Break]:
        """Yield the steps that were committed but whose JSON is gone."""
        indexed = (step for step, line in enumerate(self.lines) if line is not None and line.get("step") == step)
        last = max([*self.commits, *indexed], default=-1)
        missing: list[Break] = []
        witness = "index.jsonl has its line"
        for step in reversed(range(last + 1)):
            if step in self.commits:
                witness = f"step {step} was committed after it"
            else:
                missing.append(Break(step=step, file=_name(step), why=f"is missing, although {witness}"))
        yield from reversed(missing)

    def _index(self) -> Iterator[Break]:
        """Yield the lines of the index that differ from the steps' JSON."""
        for step, line in enumerate(self.lines):
            if step not in self.commits:
                continue
            if line is None:
                yield self._in_index(step, "has a line for this step that is not a JSON object", harmless=True)
            elif line.get("step") != step:
                yield self._in_index(step, f"has a line of step {line.get('step')!r:.20} in its place")
            elif differing := self.differing.get(step):
                yield self._in_index(step, f"has other {differing[0]} than {_name(step)}")
            elif "json" not in line and self._chain_of(step) is not None:
                yield self._in_index(step, "has no digest of the step's JSON")
        lacking = len(self.commits) - len(self.lines)
        if self.indexed and lacking > 1:  # a kill leaves out the last line at most
            yield self._in_index(len(self.lines), "ends before this step", harmless=True)
        end = max(self.commits, default=-1) + 1
        # A line that names its step is the witness of a step that is gone, see `_missing`.
        beyond = [line for step, line in enumerate(self.lines[end:], end) if line is None or line.get("step") != step]
        if beyond or (self.torn and len(self.lines) == end):
            yield self._in_index(end, "goes on after the last step", harmless=True)

    def _in_index(self, step: int, why: str, *, harmless: bool = False) -> Break:
        remedy = f"Remove {self.steps.index_path}: it only repeats what the steps say, and is made again from them."
        return Break(step=step, file="steps/index.jsonl", why=why, remedy=remedy, harmless=harmless)

    def _unchained(self) -> Iterator[Break]:
        """Yield the steps that have no chain although they should, or whose chain does not name the step before."""
        for step, commit in self.commits.items():
            chain, name, before = self._chain_of(step), _name(step), _name(step - 1)
            if chain is not None:
                if step - 1 in self.commits and before not in chain:
                    yield Break(step=step, file=name, why=f"does not name the commit before it ({before})")
            elif "chain" in commit or not is_unknown(commit):
                form = commit.get("clew_format")
                if self._chain_of(step - 1) is not None or (isinstance(form, int) and form >= SINCE):
                    yield Break(step=step, file=name, why="has no chain, which every step has since format 4")

    def _replaced(self) -> Iterator[Break]:
        """Yield the commits, lines of the index and checkpoints whose digests of one another do not match.

        A replaced step disagrees with everything around it. So the file with the most disagreements is reported, and
        what it explains is not reported again.
        """
        agree: Counter[tuple[str, int]] = Counter()
        against: list[tuple[tuple[str, int], tuple[str, int]]] = []
        for commit, witness, then in self._names():
            own = self.own.get(commit[1])
            if own == then:
                agree.update((commit, witness))
            elif own is not None:
                against.append((commit, witness))
        while against:
            count = Counter(file for pair in against for file in pair)
            # on a tie: the file that fewer others agree with, then the newest, then the step itself
            worst = max(count, key=lambda file: (count[file], -agree[file], file[1], file[0] == "step"))
            others = [other for pair in against if worst in pair for other in pair if other != worst]
            against = [pair for pair in against if worst not in pair]
            yield self._misfit(worst, others)

    def _names(self) -> Iterator[tuple[tuple[str, int], tuple[str, int], Any]]:
        """Yield, for each file that names a commit: the commit, that file, and the digest that the file gives."""
        for step, line in enumerate(self.lines):
            if line is not None and "json" in line:
                yield ("step", step), ("index", step), line["json"]
        for step in self.commits:
            named = (self._chain_of(step) or {}).get(_name(step - 1))
            if named is not None:
                yield ("step", step - 1), ("step", step), named
        for folder in checkpoint_folders(self.run.checkpoints):
            manifest, version = _parsed(folder / "checkpoint.json"), version_of(folder)
            if isinstance(manifest.get("follows"), str):
                yield ("step", version - 1), ("checkpoint", version), manifest["follows"]

    def _misfit(self, file: tuple[str, int], others: list[tuple[str, int]]) -> Break:
        kind, number = file
        if kind == "index":
            return self._in_index(number, f"names another commit than {_name(number)}")
        if kind == "checkpoint":
            why = f"follows another step {number - 1} than the one on record: it comes from another run"
            name = f"checkpoints/step-{number:06d}/checkpoint.json"
            remedy = f"{RESTORE.capitalize()}, or remove the folder."
            return Break(step=number - 1, file=name, why=why, remedy=remedy)
        naming = [_called(other) for other in others if other != ("step", number - 1)]
        reasons = [f"{_listed(naming)} {'name' if naming[1:] else 'names'} another"] if naming else []
        if ("step", number - 1) in others:
            reasons.append(f"it follows another step {number - 1} than the one on record")
        why = f"does not fit the commits around it ({'; '.join(reasons)}): it was altered, or comes from another run"
        return Break(step=number, file=_name(number), why=why)

    def _sealed(self) -> Iterator[Break]:
        """Yield the checkpoints and evaluations that are missing or were changed after they were written."""
        folders = checkpoint_folders(self.run.checkpoints)  # each appears whole
        evaluations = sorted(self.run.evals.folder.glob("version-*.json"))
        for path in [*(folder / "checkpoint.json" for folder in folders), *evaluations]:
            name = path.relative_to(self.run.path).as_posix()
            version = re.search(r"-(\d+)", name)
            why = "was altered: its seal does not fit"
            if not path.is_file():
                why = "is not a file" if path.exists() else "is missing"
            elif not seal_broken(read_bytes(path)):
                continue
            yield Break(step=int(version[1]) if version else 0, file=name, why=why)

    def _named(self, pattern: re.Pattern[str], what: str) -> Iterator[Break]:
        """Yield the checkpoints or evaluations that differ from the digests in later steps, each of them once."""
        now: dict[str, str | None] = {}
        for step in self.commits:
            if _name(step) in self.reported:
                continue
            for name, then in (self._chain_of(step) or {}).items():
                if pattern.fullmatch(name) and name not in self.reported:
                    if name not in now:
                        path = self.run.path / name
                        now[name] = digest(read_bytes(path)) if path.is_file() else None
                    if now[name] not in (None, then):
                        yield Break(step=step, file=name, why=f"is not the {what} that this step names")

    def _chain_of(self, step: int) -> dict[str, Any] | None:
        chain = self.commits.get(step, {}).get("chain")
        return chain if isinstance(chain, dict) else None


def _files(run: RunDirectory, step: int) -> Iterator[Break]:
    """Yield the data and stage files of a step that differ from those it was committed with."""
    chain = _parsed(run.steps.json_path(step)).get("chain")
    if not isinstance(chain, dict) or not run.steps.has_data(step):
        return
    mine = (f"steps/step-{step:06d}.parquet", f"steps/step-{step:06d}/")
    then = {name: committed for name, committed in chain.items() if name.startswith(mine)}
    paths = [run.steps.data_path(step), *run.steps.stage_paths(step)]
    now = {path.relative_to(run.path).as_posix(): path for path in paths if path.is_file()}
    for name in sorted({*then, *now}):
        if name not in now:
            why = "is missing"
        elif name not in then:
            why = "is not among the files that the step was committed with"
        elif digest(read_bytes(now[name])) != then[name]:
            why = "is not the file that the step was committed with: it was altered, or comes from another run"
        else:
            continue
        yield Break(step=step, file=name, why=why)


def _evaluation(run: RunDirectory, step: int, reported: set[str]) -> Iterator[Break]:
    """Yield a break if the evaluation in a step's JSON differs from its own file. Files in `reported` are skipped."""
    named = _parsed(run.steps.json_path(step)).get("evaluation")
    version = named.get("version") if isinstance(named, dict) else None
    path = run.evals.folder / f"version-{version:06d}.json" if isinstance(version, int) else None
    if path is None or not path.is_file() or reported & {f"evals/{path.name}", _name(step)}:
        return
    then = _parsed(path)
    if then != named and json.dumps(then) != json.dumps(named):  # NaN is not equal to NaN
        why = f"has another evaluation than evals/{path.name}"
        yield Break(step=step, file=_name(step), why=why)


def _rows_of_evaluations(run: RunDirectory, steps: range) -> Iterator[Break]:
    """Yield the files of evaluated sequences that do not match the digest in their evaluation's JSON.

    Step N starts from version N and makes version N + 1, so both evaluations are checked for it.
    """
    for version in sorted({*steps, *(step + 1 for step in steps)}):
        path = run.evals.folder / f"version-{version:06d}.json"
        evaluation, rows = _parsed(path), path.with_suffix(".parquet")
        if "rows" in evaluation and not (rows.is_file() and digest(read_bytes(rows)) == evaluation["rows"]):
            if rows.is_file():
                why = f"is not the file that {path.name} was written with: it was altered, or comes from another run"
            else:
                why = "is not a file" if rows.exists() else "is missing"
            yield Break(step=version, file=f"evals/{rows.name}", why=why)


def _contents(folder: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the JSON of each step. Paths are plain text, because pathlib takes longer than reading."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():  # noqa: PTH208
        number = name.removeprefix("step-").removesuffix(".json")
        if name == f"step-{number}.json" and number.isdecimal():
            yield int(number), read_bytes(f"{folder}/{name}")


def is_unknown(commit: Mapping[str, Any]) -> bool:
    """Return whether a bundle left this step out, so that only its line in the index is known."""
    return commit.get("committed_at", 0) is None


def _digest_of(content: bytes, commit: Mapping[str, Any]) -> str | None:
    """Return the digest of a step's JSON; for a step that a bundle left out, the digest that the index had."""
    return commit.get("json") if is_unknown(commit) else digest(content)


def _parsed(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or holds no object."""
    return (_object(read_bytes(path)) if path.is_file() else None) or {}


def _object(content: bytes) -> dict[str, Any] | None:
    """Return a parsed JSON object; None if the text is anything else."""
    try:
        parsed = orjson.loads(content)  # fast, but it refuses NaN, which metrics may contain
    except orjson.JSONDecodeError:
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            return None
    return parsed if isinstance(parsed, dict) else None


def _name(step: int) -> str:
    """Return the path of a step's JSON in the run directory. Pathlib would take a third of the time of a check."""
    return f"steps/step-{step:06d}.json"


def _called(file: tuple[str, int]) -> str:
    kind, number = file
    return {"index": "index.jsonl", "step": f"step {number}", "checkpoint": f"checkpoints/step-{number:06d}"}[kind]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
