"""Helpers that the commands share: options, loading the configuration, and starting ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clew.config import Config
    from clew.record.run import RunDirectory

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `clew config --schema` describes it.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Allow a stranger's record (see docs/time_machine.md) to load code from this module. May be repeated.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to override, such as training.steps=100.")
]


def on_ranks(ranks: int, work: Callable[[], None], logs: Path | None = None) -> None:
    """Run `work` if this process is one of the ranks; otherwise start the ranks and wait for them.

    The ranks are started with this process's command line, so each of them gets here again and runs `work`. A single
    rank is this process itself. All ranks but the first write their output to files in `logs`; if that is None, the
    output is deleted at the end.

    Raises:
        ConfigError: A launcher such as torchrun started a different number of ranks.
        LaunchError: A rank failed; see `run_ranks`.
    """
    from clew.launch.ranks import check_world, run_ranks, starts_ranks

    check_world(ranks)
    if starts_ranks(ranks):
        run_ranks(ranks, sys.argv[1:], logs)
    else:
        work()


def load_config(config: Path, overrides: list[str] | None) -> Config:
    from clew import config as configuration

    return configuration.load(config, overrides or ())


def run_path_of(run: Path, overrides: list[str] | None = None) -> Path:
    """Return the run directory that a YAML file names. Return any other path unchanged.

    Raises:
        ConfigError: The YAML file cannot be read, or a field is invalid.
        typer.BadParameter: There are overrides, but `run` is not a YAML file.
    """
    if run.suffix.lower() in (".yaml", ".yml"):
        return load_config(run, overrides).run_path
    if overrides:
        raise typer.BadParameter(f"{overrides[0]} changes nothing: {run} is not a configuration, such as grpo.yaml")
    return run


def open_run_of(config: Path, overrides: list[str] | None) -> tuple[Config, RunDirectory]:
    """Load the configuration, check what it names, and create its run directory if there is none yet.

    Returns:
        The configuration and its run directory.

    Raises:
        ClewError: The configuration is invalid, or `check_named` found that something it names does not exist.
    """
    from clew.launch.preflight import check_named
    from clew.record.run import RunDirectory

    loaded = load_config(config, overrides)
    check_named(loaded)
    return loaded, RunDirectory(loaded.run_path)
