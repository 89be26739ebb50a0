"""Progress of `clew train` in the terminal: a row per committed step, and under it the processes with their waits.

It only reads the run directory. So it shows the same for a run that hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from clew.console import EscapingConsole
from clew.errors import RecordError
from clew.printing import print
from clew.record.evaluations import read_evaluation
from clew.record.run import RunDirectory
from clew.record.run_warnings import read_warnings
from clew.record.summary import spent
from clew.view.status import ENDED, read_statuses, status_table
from clew.view.text import MISSING, Rows, number, one_line
from clew.waits import OLD_S

SOON_S = 5.0
"""Age in seconds at which a wait is printed before the first step, when nothing shows yet that the run works."""
COLUMNS = ("step", "reward", "length", "lag", "k3", "rejected", "grad norm", "tok/s", "tok/s trained", "seconds in")
SPARE_COLUMNS = ("seconds in", "tok/s trained", "tok/s", "k3", "lag", "rejected", "grad norm")
"""Columns that a narrow terminal leaves out, in this order. Step, reward and length always stay."""

FRAME_LINES = 6
"""Number of lines in the live picture besides steps and processes: its heading, the steps' heading, a note on columns
that are left out (two lines), a blank line, and the cursor's."""


SPANS = dict(
    waiting="rollout", logprobs="logprobs", training="forward_backward", publishing="publish", recording="record"
)
"""Names that are shown for timings of a step, and the timings."""


def step_cells(summary: dict[str, Any]) -> tuple[str, ...]:
    metrics, seconds = summary["metrics"], summary["timings"]
    spans = {name: spent(seconds, key) for name, key in SPANS.items()}
    spans["other"] = sum(seconds.values()) - sum(spans.values())
    times = "  ".join(f"{name} {took:.2f}" for name, took in spans.items() if took >= 0.005)
    whole = max(sum(seconds.values()), 1e-9)
    trained = metrics.get("tokens_trained", metrics.get("tokens", 0.0))
    training = max(seconds.get("forward_backward", 0.0) + seconds.get("logprobs", 0.0), 1e-9)
    return (
        str(summary["step"]),
        number(metrics.get("reward")),  # a step of `clew sft` has none
        number(metrics.get("response_length"), ".1f"),
        f"{metrics.get('lag_mean', 0.0):.2f}/{metrics.get('lag_max', 0.0):.0f}",
        f"{metrics.get('behaviour_k3', 0.0):.1e}",
        number(metrics.get("rejected_share"), ".1%"),
        f"{metrics['grad_norm']:.2f}",
        f"{trained / whole:,.0f}",
        f"{trained / training:,.0f}",
        times,
    )


class Progress:
    """Display that shows each committed step and evaluation once; on a terminal also the processes, live."""

    LINES = 12

    def __init__(
        self,
        run: RunDirectory,
        total_steps: int,
        *,
        live: bool = True,
        warnings: bool = True,
        console: Console | None = None,
    ) -> None:
        """Prepare to show what the run commits from now on.

        Args:
            live: Draw a live picture, if this is a terminal. Turn it off if user code runs in this process: its
                debugger needs the terminal.
            warnings: Show the warnings of the run's processes. Turn it off if this process is the only one: its log
                shows them.
        """
        self._run = run
        self._total = total_steps
        self._console = console or EscapingConsole(soft_wrap=True)
        self._next = self._first = run.steps.count()
        self._recent: list[tuple[str, ...]] = []
        self._evaluated = set(run.evals.folder.glob("version-*.json"))
        draws = live and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, refresh_per_second=4) if draws else None
        self._shown = 0.0
        self._shows_warnings = warnings
        self._warned_to = run.warnings_path.stat().st_size if run.warnings_path.exists() else 0
        self._next_ages: dict[tuple[str, float], float] = {}

    def __enter__(self) -> Progress:
        resuming = f" (resuming at step {self._next})" if self._next else ""
        self._console.print(f"run directory: {self._run.path}{resuming}")
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self.refresh(final=True)
        finally:  # otherwise the terminal's cursor stays hidden
            if self._live:
                self._live.__exit__(*exc)

    def refresh(self, *_: Any, final: bool = False) -> None:
        """Show what is new in the run directory; at most five times a second."""
        if time.monotonic() - self._shown < 0.2 and not final:
            return
        self._shown = time.monotonic()
        while self._run.steps.json_path(self._next).exists():
            self._next += 1
            with self._printing_errors():
                cells = step_cells(self._run.steps.read(self._next - 1))
                self._recent = [*self._recent[1 - self.LINES :], cells]
                if self._live is None:
                    named = zip(COLUMNS[1:-1], cells[1:-1], strict=True)
                    words = "  ".join(f"{name} {cell}" for name, cell in named if cell != MISSING)
                    self._console.print(f"step {cells[0]}/{self._total}  {words}  [{cells[-1]}]", markup=False)
        for path in sorted(set(self._run.evals.folder.glob("version-*.json")) - self._evaluated):
            self._evaluated.add(path)
            with self._printing_errors():
                self._console.print(_evaluation_line(read_evaluation(path)), markup=False)
        if self._shows_warnings:
            self._print_warnings()
        if self._live:
            self._live.update(self._picture())
        else:
            self._print_old_waits()

    @contextmanager
    def _printing_errors(self) -> Iterator[None]:
        """Print the block's RecordError: a training run does not end because of what only people read."""
        try:
            yield
        except RecordError as error:
            self._console.print(str(error), markup=False, style="red")

    def _print_warnings(self) -> None:
        """Write new warnings to stderr, or above the live picture if both are the same terminal."""
        warnings, self._warned_to = read_warnings(self._run.warnings_path, self._warned_to)
        for warning in warnings:
            step = "" if warning.step is None else f", step {warning.step}"
            line = f"warning ({warning.process}{step}): {warning.text}"
            if self._live and sys.__stderr__ is not None and sys.__stderr__.isatty():
                self._live.console.print(line, markup=False, style="yellow")
            else:
                # Rich's live picture replaces sys.stderr, and would draw the line into standard output.
                print(line, file=sys.__stderr__ if self._live else sys.stderr, flush=True)

    def _print_old_waits(self) -> None:
        """Print a line when a process's oldest wait is 20 s old (5 s before the first step), and when its age doubles.

        The live picture shows waits itself.
        """
        try:
            statuses = read_statuses(self._run)
        except RecordError:
            return
        patience = OLD_S if self._next > self._first else SOON_S
        for status in statuses:
            for wait in status["waits"][:1]:
                age = time.time() - wait["since"]
                key = (status["process"], wait["since"])
                if not status["doing"].startswith(ENDED) and age >= self._next_ages.get(key, patience):
                    self._next_ages[key] = 2 * age
                    numbers = f" ({wait['numbers']})" if wait["numbers"] else ""
                    waited = f"{status['process']} has waited {age:.0f} s for {wait['what']}{numbers}"
                    self._console.print(f"{waited}; {wait['unblocks']} unblocks it", markup=False)

    def _picture(self) -> Group:
        try:
            processes = status_table(self._run)
        except RecordError:
            processes = Group(Text(""))
        taken = len(self._console.render_lines(processes)) + FRAME_LINES
        steps = Rows(*COLUMNS, words=("seconds in",), spare=SPARE_COLUMNS)
        for cells in self._recent[-max(3, self._console.height - taken) :]:  # what does not fit is cut off at the end
            steps.add_row(*cells[:-1], one_line(cells[-1]))
        table, *advice = processes.renderables  # advice comes first, so that it is not cut off
        heading = Text(f"step {self._next} of {self._total}", style="bold")
        return Group(heading, steps, Text(""), *advice, table)


def _evaluation_line(evaluation: dict[str, Any]) -> str:
    found = ((name, value) for name, value in evaluation.items() if name.startswith("pass@"))
    passes = "  ".join(f"{name} {'-' if value is None else f'{value:.1%}'}" for name, value in found)
    return f"evaluation of version {evaluation['version']}: {passes}"
