"""Text from outside Clew is escaped before it reaches a terminal or an HTML page."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from clew import config as configuration
from clew.console import EscapingConsole
from clew.printing import VisibleFormatter, VisibleRecord, in_html, print, visible
from clew.reading import read_json
from clew.record.files import write_json
from clew.record.run import RunDirectory
from clew.record.writer import Writer

CLEW = Path(__file__).parent.parent.parent / "clew"

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202egnp.exe\x9b31m\x1b]8;;http://x\x1b\\link\r[/foo][red]\u2066"
ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_nothing_prints_past_the_one_place() -> None:
    """New commands are safe by default: only three files have the real print and Console."""
    for path in CLEW.rglob("*.py"):
        if path.name in ("printing.py", "console.py", "python_layout.py"):  # the last one runs without Clew
            continue
        tree = ast.parse(path.read_text())
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        escaping = any(node.module == "clew.printing" and "print" in [a.name for a in node.names] for node in imported)
        assert not any(node.module == "rich" for node in imported), path
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called != "print" or escaping, f"{path}:{node.lineno}: add `from clew.printing import print`"
            assert called != "Console", f"{path}:{node.lineno}: use clew.console.EscapingConsole"
            assert called not in (
                "sys.stdout.write",
                "sys.stderr.write",
                "typer.echo",
                "typer.secho",
                "traceback.print_exc",
                "html.escape",
            ), f"{path}:{node.lineno}: {called} shows text as it is"


@pytest.mark.parametrize("live", [False, True])
def test_a_console_shows_nothing_that_acts(live: bool) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    file = io.StringIO()
    console = EscapingConsole(file=file, width=200, force_terminal=live, color_system=None)
    console.print(HOSTILE, Text(HOSTILE), Group(table, HOSTILE), [HOSTILE])
    assert not ACTS.search(file.getvalue().replace("\n", ""))
    assert "[/foo][red]" in file.getvalue() and r"\x1b]0;title\x07" in file.getvalue()


def test_print_pages_and_logs_show_nothing_that_acts(capsys: pytest.CaptureFixture[str]) -> None:
    print("a\tb\nc", HOSTILE, 7)
    shown = capsys.readouterr().out
    assert shown.startswith("a\tb\nc \\x1b]0;") and shown.endswith(" 7\n") and not ACTS.search(shown)
    page = in_html(f"<script>{HOSTILE}'\"")
    assert page.startswith("&lt;script&gt;") and not ACTS.search(page) and "'" not in page and '"' not in page
    record = VisibleRecord("x", logging.INFO, "f.py", 1, "said %s", (HOSTILE,), None)
    assert not ACTS.search(record.getMessage())
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, "f.py", 1, "failed", (), sys.exc_info())
    assert not ACTS.search(VisibleFormatter().format(record))


def test_a_configuration_with_such_text_is_shown_and_read_back() -> None:
    model = json.dumps(f"a{HOSTILE}\xa0é")
    said = f"{{experiment: e, model: {{path: {model}}}, data: {{path: d}}}}"
    config = configuration.parse(said, Path("x.yaml"), [])
    text = configuration.dump(config)
    assert not ACTS.search(text) and visible(text) == text
    assert configuration.parse(text, Path("x.yaml"), []) == config


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return two runs that differ, as from a stranger who put control characters wherever a record holds text."""
    for name in ("a", "b"):
        row: dict[str, Any] = {
            "group_id": f"g{HOSTILE}",
            "input_ids": [1, 2],
            "loss_mask": [0, 1],
            "logprobs": [0, -1],
            "reward": 1.0,
            "data": {HOSTILE: HOSTILE + name},
            "finish_reason": HOSTILE,
            "interactions": [{"id": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "turn": 0}],
        }
        with Writer(tmp_path / name, config={HOSTILE: f"{HOSTILE}{name}"}, trainer=HOSTILE) as writer:
            writer.step([row], metrics={"loss": 1.0}, stages={HOSTILE: [[0.0, ord(name)]]})
            facts = read_json(writer.run.run_json)
            write_json(writer.run.run_json, {**facts, "packages": {HOSTILE: HOSTILE + name}, "git": HOSTILE + name})
    waits = [{"what": HOSTILE, "since": 0.0, "numbers": HOSTILE, "unblocks": HOSTILE, "alike": 2}]
    said = {"process": HOSTILE, "doing": HOSTILE, "version": 1, "pid": 1, "updated": time.time(), "waits": waits}
    write_json(RunDirectory(tmp_path / "a").status / "trainer.json", {**said, "warning": HOSTILE})
    write_json(RunDirectory(tmp_path / "b").status / "trainer.json", {**said, "doing": "failed", "error": "[/foo]"})
    return [tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize(
    ("command", "codes", "word"),
    [
        (["status", "{a}"], {0}, "[/foo]"),
        (["status", "{b}"], {0}, "[/foo]"),
        (["diff", "{a}", "{b}"], {1}, "FIRST DIFFERENCE"),
        (["show", "{a}"], {0}, "\\x1b"),
        (["show", "{a}", "0"], {0}, "\\x1b"),
        (["blame", "{a}", "--step", "0"], {0}, "\\x1b"),
        (["replay", "{a}", "--stage", "data"], {0}, "follow from the recorded inputs"),
        (["replay", "{a}"], {2}, "no checkpoint"),
        (["show", f"{{a}}{HOSTILE.replace('/', '')}"], {2}, "\\x1b"),
    ],
    ids=["status", "ended", "diff", "show", "step", "blame", "data", "replay", "none"],
)
def test_commands_on_a_strangers_record(runs: list[Path], command: list[str], codes: set[int], word: str) -> None:
    words = [each.replace("{a}", str(runs[0])).replace("{b}", str(runs[1])).replace("\0", "") for each in command]
    ended = subprocess.run([sys.executable, "-m", "clew", *words], capture_output=True, timeout=300)
    shown = (ended.stdout + ended.stderr).decode()
    assert ended.returncode in codes, shown
    assert word in shown and not ACTS.search(shown), shown


@pytest.mark.parametrize("says", ["pass", "print('here', flush=True)"])
def test_a_command_that_is_silent_for_two_seconds_says_so(says: str) -> None:
    program = (
        f"import time; from clew.console import *; from clew.printing import *; break_silence('starting'); {says}; "
        f"time.sleep(SILENT_S + 1)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ("starting\n" if says == "pass" else "")


def test_a_file_gets_no_blanks_at_the_end_of_a_line() -> None:
    table = Table(box=None)
    for cells in (("group", "prompt"), ("g000001", "1+2="), ("", "")):
        table.add_row(*cells)
    out = io.StringIO()
    EscapingConsole(file=out, width=80).print(table)
    assert "g000001" in out.getvalue() and not re.search(r" $", out.getvalue(), re.MULTILINE)
