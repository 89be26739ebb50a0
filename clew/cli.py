"""The command line: a thin front that parses, calls and prints. Each command imports what it needs itself."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clew.errors import ClewError

if TYPE_CHECKING:
    from clew.config import Config
    from clew.record.run import RunDirectory

app = typer.Typer(
    name="clew",
    help="Reinforcement learning for LLM agents in which every training step leaves a thread back to its cause.",
    epilog="The examples of each command's --help use what `make demo` makes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `clew config --schema` describes it.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to override, such as training.steps=100.")
]


INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def main() -> None:
    """Entry point. A ClewError exits with 1 and its message; anything else is a defect: 70 and a traceback."""
    from clew.processes import die_with_parent

    die_with_parent()
    # OpenMP's threads spin while they wait for one another. Where processes share the cores, as under `clew train`,
    # they then spin on what another process could use: ten times slower. It is read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.path.insert(0, str(Path.cwd()))  # dotted paths in a configuration start from here
    try:
        app()
    except ClewError as error:
        print(f"clew: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, KeyboardInterrupt) or ended.code == INTERRUPTED:  # Typer makes one of the other
            print("clew: interrupted; nothing recorded is lost. The same command goes on from here.", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        raise
    except Exception:
        traceback.print_exc()
        print(
            "clew: this is a defect of Clew, not of your configuration. The run directory is intact.", file=sys.stderr
        )
        raise SystemExit(70) from None
    finally:
        gc.freeze()  # all that is left ends with the process: to look through it once more takes a second, with torch


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train by reinforcement: starts and supervises server, rollout and trainer; resumes where a run was killed.

    Example: clew train examples/addition/grpo.yaml training.steps=5 trial=try
    """
    from clew.view.terminal import Progress

    loaded, run = _open(config, overrides)
    inline = loaded.launch.mode == "inline"
    with Progress(run, loaded.training.steps, live=not inline) as progress:
        if inline:
            from clew.trainer.learn import learn_inline

            _log()
            print("launch.mode=inline: one process; time limits are off; breakpoint() works everywhere.", flush=True)
            learn_inline(loaded, progress.refresh)
        else:
            from clew.launch.local import supervise

            supervise(loaded, [str(config), *(overrides or [])], progress.refresh)
    print(
        f"trained {loaded.training.steps} steps. Weights: {run.checkpoints / f'step-{loaded.training.steps:06d}'}  "
        f"Curve: {run.reports / 'learning_curve.png'}"
    )


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on demonstrations (supervised fine-tuning); resumes where it was killed.

    Example: clew sft examples/addition/sft.yaml training.steps=5 trial=sft-try
    """
    from clew.training.sft import sft as run_sft

    _log()
    run_sft(_load(config, overrides))


@app.command()
def serve(config: ConfigFile, overrides: Overrides = None) -> None:
    """Keep one inference server up, with SGLang's native HTTP interface, for the run that CONFIG names.

    Example: clew serve examples/addition/grpo.yaml trial=try
    """
    from clew.inference.server import serve as run_server

    _log()
    run_server(_load(config, overrides))


@app.command()
def rollout(config: ConfigFile, overrides: Overrides = None) -> None:
    """Make episodes for the run that CONFIG names, on the server that is up for it.

    Example: clew rollout examples/addition/grpo.yaml trial=try
    """
    from clew.rollout.process import rollout as run_rollout

    _log()
    run_rollout(_load(config, overrides))


@app.command()
def learn(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on the groups that rollout makes for the run that CONFIG names, and publish weights.

    Example: clew learn examples/addition/grpo.yaml trial=try
    """
    from clew.trainer.learn import learn as run_trainer

    _log()
    run_trainer(_load(config, overrides))


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or the configuration that names it.")],
    overrides: Overrides = None,
) -> None:
    """Show what each process of a run does, what it waits for, since when, and the numbers that decide it.

    Example: clew status runs/addition/grpo
    """
    from rich.console import Console

    from clew.record.run import open_run
    from clew.view.terminal import status_table

    found = open_run(run if run.is_dir() else _load(run, overrides).run_path)
    Console(width=None if sys.stdout.isatty() else 200).print(status_table(found))


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
        print(configuration.dump(_load(config, overrides)), end="")


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, ports, permission to trace, disk, shared memory; say what to do.

    Example: clew doctor
    """
    from clew.diagnose.doctor import examine

    if not examine():
        raise SystemExit(1)


def _load(config: Path, overrides: list[str] | None) -> Config:
    from clew import config as configuration

    return configuration.load(config, overrides or ())


def _open(config: Path, overrides: list[str] | None) -> tuple[Config, RunDirectory]:
    from clew.record.run import RunDirectory

    loaded = _load(config, overrides)
    return loaded, RunDirectory(loaded.run_path)


def _log() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for chatty in ("httpx", "matplotlib", "aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
