"""The command line: a thin front that parses, calls and prints. Each command imports what it needs itself."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clew import __version__
from clew.cli_agent import agent_app
from clew.errors import ClewError, Interrupted
from clew.printing import VisibleFormatter, VisibleRecord, print

if TYPE_CHECKING:
    from clew.config import Config
    from clew.record.run import RunDirectory

app = typer.Typer(
    name="clew",
    help="Reinforcement learning for LLM agents in which every training step leaves a thread back to its cause.",
    epilog="The examples of each command's --help use what `make demo`, and the examples of those above, make. "
    "Exit codes: 0 sound; 1 something was found (a difference, an unfit agent); 2 could not run (bad input, or a run "
    "that ended before its last step); 3 not judged; 70 a defect of Clew; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(agent_app, name="agent")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `clew config --schema` describes it.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Load code of this module where a stranger's record (docs/time_machine.md) names it; repeat it.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to override, such as training.steps=100.")
]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"clew {__version__}")
        raise typer.Exit


@app.callback()
def _clew(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


COULD_NOT_RUN = 2
"""Exit code after a ClewError; Typer's own for a command line that it cannot parse."""

DEFECT = 70
"""Exit code after an error that Clew did not raise on purpose."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, and after SIGTERM where a run can go on later: 128 + SIGINT."""


def main() -> None:
    """Run the command line. A ClewError exits with 2 and its message; anything else is a defect: 70 and a traceback.

    A command that found something (a difference, an unfit agent) raises SystemExit(1) itself, one that could not judge
    SystemExit(3).
    """
    from clew.launch.ranks import tell
    from clew.processes import die_with_parent

    die_with_parent()
    # OpenMP's threads spin while they wait for one another. Where processes share the cores, as under `clew train`,
    # they then spin on what another process could use: ten times slower. It is read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Imports make a million objects that stay: to look for garbage every 700 of them takes 5 to 15 % of the time.
    gc.set_threshold(10_000)
    logging.setLogRecordFactory(VisibleRecord)  # of every library's log, too
    try:
        app()
    except ClewError as error:
        if not tell(error):
            print(f"clew: {error}", file=sys.stderr)
        raise SystemExit(INTERRUPTED if isinstance(error, Interrupted) else COULD_NOT_RUN) from None
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, KeyboardInterrupt) or ended.code == INTERRUPTED:  # Typer makes one of the other
            said = Interrupted("interrupted; nothing recorded is lost. The same command goes on from here.")
            if not tell(said):
                print(f"clew: {said}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        if ended.code:
            tell(ended)
        raise
    except Exception as error:
        if (explained := _disk_error(error)) is not None:
            if not tell(explained):
                print(f"clew: {explained}", file=sys.stderr)
            raise SystemExit(COULD_NOT_RUN) from None
        tell(error)
        print(traceback.format_exc(), end="", file=sys.stderr)
        print(
            "clew: this is a defect of Clew, not of your configuration. The run directory is intact.", file=sys.stderr
        )
        raise SystemExit(DEFECT) from None
    finally:
        gc.freeze()  # all that is left ends with the process: to look through it once more takes a second, with torch


def _disk_error(error: Exception) -> ClewError | None:
    """Return what to say of a full or read-only disk, which shows wherever a file or folder is made; otherwise None."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str | Path):
        return None
    from clew.record.files import OF_THE_DISK, disk_error

    return disk_error(Path(error.filename), error) if error.errno in OF_THE_DISK else None


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train by reinforcement: starts and supervises server, rollout and trainer; resumes where a run was killed.

    Example: clew train examples/addition/grpo.yaml training.steps=5 trial=try
    """
    from clew.view.terminal import Progress

    loaded, run = _open(config, overrides)
    if loaded.debug.replay_rollout_data:
        _on_ranks(loaded.launch.ranks, lambda: _train_on_record(loaded, run), run.logs)
        return
    inline = loaded.launch.mode == "inline"
    with Progress(run, loaded.training.steps, live=not inline) as progress:
        if inline:
            from clew.loop.learn import learn_inline

            _log()
            print("launch.mode=inline: one process; time limits are off; breakpoint() works everywhere.", flush=True)
            with _drawn(run):
                learn_inline(loaded, progress.refresh)
        else:
            from clew.launch.local import supervise

            supervise(loaded, [str(config), *(overrides or [])], progress.refresh)
    _say_trained(loaded, run)


def _train_on_record(config: Config, run: RunDirectory) -> None:
    """`clew train` or `clew learn` with debug.replay_rollout_data, as one rank."""
    from clew.loop.learn import learn_from_record
    from clew.view.terminal import Progress

    with Progress(run, config.training.steps, live=False) as progress:
        _log()
        print(f"training on the batches in {config.debug.path}; no rollout, no inference.", flush=True)
        with _drawn(run):
            learn_from_record(config, progress.refresh)
    _say_trained(config, run)


@contextmanager
def _drawn(run: RunDirectory) -> Iterator[None]:
    """Draw the learning curve when the block ends, however it ends; on rank 0."""
    from clew.training.ranks import rank_here
    from clew.view.learning_curve import draw_learning_curve

    try:
        yield
    finally:
        if rank_here() == 0:
            draw_learning_curve(run)


def _learn(config: Config, run: RunDirectory) -> None:
    """`clew learn`, as one rank."""
    from clew.loop.learn import learn

    with _drawn(run):
        learn(config)


def _say_trained(config: Config, run: RunDirectory) -> None:
    """Print what a complete run has made, and what it rejected."""
    from clew.record.rejected import count_rejected

    done = run.steps.count()
    said = f"trained {done} steps."
    if done > config.training.steps:
        said = (
            f"{done} steps were trained before, and training.steps is {config.training.steps}: there is nothing to do."
        )
    for line in count_rejected(run).lines():
        print(line)
    print(f"{said} Weights: {run.checkpoints / 'latest'}  Curve: {run.reports / 'learning_curve.png'}")


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on demonstrations, or on preferences (training.objective); resumes where it was killed.

    Example: clew sft examples/addition/sft.yaml training.steps=5 trial=sft-try
    """
    from clew.training.sft import sft as run_sft

    _log()
    loaded, run = _open(config, overrides)
    _on_ranks(loaded.launch.ranks, lambda: run_sft(loaded), run.logs)


@app.command()
def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="File the episodes of the gateway's sessions there.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="No model of its own: the gateway alone, in front of vLLM, SGLang, a provider."
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(metavar="KEY", help="What clients must send. Without it: any key on loopback, else a new one."),
    ] = "",
    allow_weights: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Also load weights from there, not only from the run; may be repeated."),
    ] = None,
) -> None:
    """Keep a model up, for the run that CONFIG names and for agents: SGLang's, OpenAI's and Anthropic's interfaces.

    Example: clew serve examples/addition/grpo.yaml trial=try
    """
    _log()
    loaded = _load(config, overrides)
    if engine is not None:
        from clew.gateway.front import serve_in_front

        serve_in_front(loaded, engine, record, api_key=api_key)
    else:
        from clew.gateway.standalone import gateway_beside
        from clew.inference.serve import serve as run_server

        run_server(loaded, gateway_beside(loaded, record), api_key=api_key, allow_weights=allow_weights or [])


@app.command()
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Without a trainer: make so many batches, into --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A run directory for them.")] = None,
) -> None:
    """Make episodes for the run that CONFIG names, on the server that is up for it; or batches without a trainer.

    Example: clew rollout examples/addition/grpo.yaml trial=try
    """
    from clew.rollout.alone import roll_out
    from clew.rollout.process import rollout as run_rollout

    if (steps is None) != (out is None):
        raise typer.BadParameter("--steps and --out go together: so many batches, into that directory")
    _log()
    if steps is None or out is None:
        run_rollout(_load(config, overrides))
    else:
        roll_out(_load(config, overrides), steps, out)
        print(f"{out} has {steps} batches: `clew show {out} 0`; debug.replay_rollout_data trains on them.")


@app.command()
def learn(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on the groups that rollout makes for the run that CONFIG names, and publish weights.

    Example: clew learn examples/addition/grpo.yaml trial=try
    """
    _log()
    loaded, run = _open(config, overrides)
    work = _train_on_record if loaded.debug.replay_rollout_data else _learn
    _on_ranks(loaded.launch.ranks, lambda: work(loaded, run), run.logs)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or the configuration that names it.")],
    overrides: Overrides = None,
) -> None:
    """Show what each process of a run does, what it waits for, since when, and the numbers that decide it.

    Example: clew status runs/addition/grpo
    """
    from clew.console import EscapingConsole
    from clew.record.run import open_run
    from clew.view.terminal import status_table

    found = open_run(run if run.is_dir() else _load(run, overrides).run_path)
    EscapingConsole(width=None if sys.stdout.isatty() else 200).print(status_table(found))


@app.command()
def show(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run directory, the configuration that names it, a bundle, or a folder of runs."
        ),
    ],
    what: Annotated[
        str | None,
        typer.Argument(metavar="WHAT", help="A step (137), group (g000123), episode (g000123.e2) or sequence."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="FIRST:END", help="Steps of a run; 100:140 are 100 to 139.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token of an episode or a sequence.")] = False,
) -> None:
    """Show a run, one of its steps, groups, episodes or tokens, or the runs of a folder, as the record has them.

    Example: clew show runs/addition/grpo 3
    """
    from clew.console import EscapingConsole
    from clew.record.bundle import is_bundle
    from clew.view.show import show as show_record

    console = EscapingConsole(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, emoji=False)
    path = run if run.is_dir() or is_bundle(run) else _load(run, None).run_path
    show_record(path, what, steps=steps, tokens=tokens, console=console)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a file that `clew bundle` wrote.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="What to do otherwise: into a new run directory, side by side. "
            "With --stage, of another trainer's record: how it computed.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--step", "--steps", metavar="N|FIRST:END", help="Which steps; without it, all.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="These stages alone, without a model: data,rewards,advantages,loss.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="With --stage or --reward: one group, episode or sequence.")] = None,
    stop: Annotated[
        str | None, typer.Option("--break", help="Stop in a debugger before: advantages, loss, backward or update.")
    ] = None,
    reward: Annotated[
        bool, typer.Option("--reward", help="Run workflow and reward again on the recorded answers.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the record, and end at what differs; or go on.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="Another device than the run's: cpu or cuda.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Train on so many ranks, whatever the run had.")] = 1,
    trust: Trust = None,
) -> None:
    """Train recorded steps again and compare every stage with the record; the first difference is named.

    Example: clew replay runs/addition/grpo --step 3
    """
    from clew.diagnose.rerun import rerun

    def replay_here() -> None:
        if not rerun(
            run,
            steps,
            stages=stage,
            only=only,
            stop=stop,
            reward=reward,
            device=device,
            ranks=ranks,
            verify=verify,
            overrides=overrides or [],
            trust=trust or [],
        ):
            raise SystemExit(1)

    _on_ranks(ranks, replay_here)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run directory, or a file that `clew bundle` wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other.")],
    ignore: Annotated[
        str, typer.Option(help="Fields of the configuration that differ on purpose, such as lr,seed.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw how far they drift, into this PNG file.")] = None,
) -> None:
    """Find where two runs part first (step, stage, sequence, token), what could explain it, and how far they drift.

    Example: clew diff runs/addition/try runs/addition/grpo
    """
    from clew.diagnose.diff import diff as compare

    if not compare(a, b, ignore=[each for each in ignore.split(",") if each], plot=plot):
        raise SystemExit(1)


@app.command()
def blame(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a file that `clew bundle` wrote.")],
    step: Annotated[int, typer.Option(help="The step; also one that failed, and has only its batch on record.")],
    top: Annotated[int, typer.Option(min=1, help="How many sequences to show.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the worst to show.")] = 8,
    by: Annotated[
        str | None,
        typer.Option(
            help="gradient, loss, kl, behaviour_k3, pull, or critic (its gradient). Default: gradient; pull where "
            "there is no checkpoint."
        ),
    ] = None,
    trust: Trust = None,
) -> None:
    """Find which sequences and tokens caused a spike (of gradient, loss or KL) or a NaN: each one's part, worst first.

    Example: clew blame runs/addition/grpo --step 3 --top 5
    """
    from clew.diagnose.blame import blame as assign

    assign(run, step, top=top, tokens=tokens, by=by, trust=trust or [])


@app.command()
def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[int, typer.Option(help="The step.")],
    stages_only: Annotated[
        bool, typer.Option("--stages-only", help="Without weights: for `clew replay --stage`, show and diff.")
    ] = False,
    to: Annotated[Path | None, typer.Option(help="The file; default RUN's names and the step, here.")] = None,
) -> None:
    """Write one file that holds what a step needs to be replayed elsewhere.

    Example: clew bundle runs/addition/grpo --step 3 --stages-only
    """
    from clew.record.bundle import write_bundle
    from clew.record.run import open_run

    directory = open_run(run)
    path = write_bundle(directory, step, stages_only=stages_only, to=to)
    summary = directory.steps.read(step)
    works = f"`clew replay {path}` runs it, on any machine."
    if not directory.steps.by_clew:  # then nothing says how the loss was computed
        works = f"`clew replay {path} --stage data` checks it, `clew show {path}` shows it."
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB). {works}")
    for field in summary.get("code", {}):
        section, name = field.split(".")
        if section not in summary["config"]:  # what made the rollout is not needed
            continue
        print(f"It holds no code: {field}={summary['config'][section][name]} must be importable there.")
        print(f"Whoever replays it says `--trust {summary['config'][section][name].rpartition('.')[0]}`.")


@app.command()
def config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON Schema of all fields, for editors.")] = False,
) -> None:
    """Print what would run: the configuration with overrides, defaults and ${...} resolved.

    Example: clew config examples/addition/grpo.yaml rollout.max_lag=2
    """
    import json

    from clew import config as configuration

    if schema:
        print(json.dumps(configuration.Config.model_json_schema(), indent=2))
    elif config is None:
        raise typer.BadParameter("name a CONFIG file, or ask for --schema")
    else:
        loaded = _load(config, overrides)
        if chosen := configuration.preset_of(loaded):
            print(f"# algorithm.preset={loaded.algorithm.preset} sets, where nothing else does: {chosen}")
        print(configuration.dump(loaded), end="")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    form: Annotated[str, typer.Option("--format", metavar="parquet|jsonl|pt", help="What to write.")] = "parquet",
    steps: Annotated[
        str, typer.Option("--steps", metavar="FIRST:END", help="Steps; 130:140 are 130 to 139, 137 is one.")
    ] = "",
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="RUN/exported by default.")] = None,
) -> None:
    """Write steps of a run, tokens and what was computed from them, as files that work anywhere, one a step.

    Example: clew export runs/addition/grpo --format pt --steps 0:3 --to runs/addition/exported
    """
    from clew.record.run import open_run
    from clew.training.exchange import export_steps

    files = export_steps(open_run(run), form, steps, to or run / "exported")
    print(f"exported {len(files)} steps: {files[0]}" + (f" to {files[-1].name}" if len(files) > 1 else ""))


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Batches as .pt files, in order of steps.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="The run directory to make.")],
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", min=1, help="Rows a group, where a file names none; else one group."),
    ] = None,
) -> None:
    """Make a run directory of batches in .pt files, such as AReaL's or those of `clew export`, one a step.

    Example: clew import runs/addition/exported/step-000000.pt --to runs/addition/imported
    """
    from clew.training.exchange import import_steps

    import_steps(files, to, group_size)
    print(f"imported {len(files)} {'step' if len(files) == 1 else 'steps'}: {to}")


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, ports, permission to trace, disk, shared memory; say what to do.

    Example: clew doctor
    """
    from clew.diagnose.doctor import examine

    if not examine():
        raise SystemExit(1)


def _on_ranks(ranks: int, work: Callable[[], None], logs: Path | None = None) -> None:
    """Run a function in each of several processes, of which this may be one. logs: where all but the first write."""
    from clew.launch.ranks import check_world, place

    check_world(ranks)
    if ranks == 1 or "RANK" in os.environ:
        work()
    else:
        place(ranks, sys.argv[1:], logs)


def _load(config: Path, overrides: list[str] | None) -> Config:
    from clew import config as configuration

    return configuration.load(config, overrides or ())


def _open(config: Path, overrides: list[str] | None) -> tuple[Config, RunDirectory]:
    from clew.record.run import RunDirectory

    loaded = _load(config, overrides)
    return loaded, RunDirectory(loaded.run_path)


def _log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("httpx", "matplotlib", "aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
