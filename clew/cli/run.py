"""Commands that make a run or a part of one, or compare its checkpoints; also config and doctor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clew.cli.log_setup import set_up_log
from clew.cli.options import ConfigFile, Overrides, load_config, on_ranks, open_run_of
from clew.printing import counted, print

if TYPE_CHECKING:
    from clew.config import Config
    from clew.record.run import RunDirectory


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train with reinforcement learning: start and supervise server, rollout and trainer; resume a killed run.

    Example: clew train examples/addition/grpo.yaml training.steps=5 trial=try
    """
    loaded, run = open_run_of(config, overrides)
    arguments = [str(config), *(overrides or [])]
    if loaded.debug.replay_rollout_data:  # otherwise `_train` starts `clew learn`, which starts the ranks
        on_ranks(loaded.launch.ranks, lambda: _train(loaded, run, arguments), run.logs)
    else:
        _train(loaded, run, arguments)


def _train(config: Config, run: RunDirectory, arguments: Sequence[str]) -> None:
    """Train and print a summary.

    This is the body of `clew train`. With debug.replay_rollout_data, each rank of `clew train` or `clew learn` runs it.
    """
    from clew.api import train_as_configured

    if config.debug.replay_rollout_data:
        set_up_log()
        print(f"training on the batches in {config.debug.path}; no rollout, no inference.", flush=True)
    elif config.launch.mode == "inline":
        set_up_log()
        print("launch.mode=inline: one process; time limits are off; breakpoint() works everywhere.", flush=True)
    before = run.steps.count()
    train_as_configured(config, arguments, live=True)
    if config.devices.training is not None:
        _say_trained(config, run, before)


def _learn(config: Config, run: RunDirectory) -> None:
    from clew.api import drawing_curve
    from clew.loop.trainer_process import learn

    with drawing_curve(run):
        learn(config)


def _say_trained(config: Config, run: RunDirectory, before: int) -> None:
    """Print how many steps a complete run has trained, what it rejected, and where its weights and its curve are.

    before: Number of steps when this command began.
    """
    from clew.record.rejected import count_rejected

    done, wanted = run.steps.count(), config.training.steps
    outcome = f"trained {counted(done, 'step')}."
    if before >= wanted:
        outcome = (
            f"{counted(done, 'step')} had been trained before, and training.steps is {wanted}: nothing was left to do. "
            f"Raise training.steps, or begin another run with trial=NAME."
        )
    for line in count_rejected(run).lines():
        print(line)
    weights = f"{run.checkpoints / 'latest'}{run.best_in_words()}"
    print(f"{outcome} Weights: {weights}  Curve: {run.reports / 'learning_curve.png'}")


def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on demonstrations, or on preferences (training.objective); resume a killed run.

    Example: clew sft examples/addition/sft.yaml training.steps=5 trial=sft-try
    """
    from clew.launch.no_progress import with_hang_watch
    from clew.launch.preflight import check_named
    from clew.launch.ranks import starts_ranks
    from clew.loop.sft import check_first_row
    from clew.loop.sft import sft as run_sft
    from clew.record.run import RunDirectory

    set_up_log()
    loaded, logs = load_config(config, overrides), None
    check_named(loaded, supervised=True)
    if starts_ranks(loaded.launch.ranks):
        check_first_row(loaded)
        logs = RunDirectory(loaded.run_path).logs
    on_ranks(loaded.launch.ranks, with_hang_watch(loaded)(lambda: run_sft(loaded)), logs)


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record the episodes of the gateway's sessions in this directory."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Serve no model, only the gateway, in front of vLLM, SGLang or a provider at this URL."
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="Key that clients must send. Default: any key on loopback, else a new one that is printed.",
        ),
    ] = "",
    allow_weights: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Also load weights from this folder, not only from the run's. May be repeated."
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(  # with its flag: otherwise Typer 0.27 drops an option whose parameter is called `name`
            "--name",
            metavar="NAME",
            help="Name in status/ and logs/. Default: the first free of server, server-1, server-2.",
        ),
    ] = "",
    attach: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Start no vLLM or SGLang server, but serve the run with the one at this address."
        ),
    ] = "",
) -> None:
    """Serve a model to the run that CONFIG names and to agents, through SGLang's, OpenAI's and Anthropic's APIs.

    Example: clew serve examples/addition/grpo.yaml trial=try
    """
    set_up_log()
    loaded = load_config(config, overrides)
    if engine is not None:
        from clew.gateway.proxy import serve_in_front

        serve_in_front(loaded, engine, record, api_key=api_key)
    else:
        from clew.gateway.standalone import gateway_factory
        from clew.inference.serve import serve as run_server

        beside = gateway_factory(loaded, record)
        run_server(loaded, beside, api_key=api_key, allow_weights=allow_weights or [], name=name, attach=attach)


def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Make this many batches without a trainer, and write them to --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory to write these batches to.")] = None,
) -> None:
    """Run episodes for the run that CONFIG names, on its server; or, with --steps, write batches without a trainer.

    Example: clew rollout examples/addition/grpo.yaml trial=try
    """
    from clew.rollout.process import rollout as run_rollout
    from clew.rollout.without_trainer import roll_out

    if (steps is None) != (out is None):
        raise typer.BadParameter("--steps and --out go together: the number of batches, and the directory for them")
    set_up_log()
    if steps is None or out is None:
        run_rollout(load_config(config, overrides))
    else:
        roll_out(load_config(config, overrides), steps, out)
        batches = "1 batch" if steps == 1 else f"{steps} batches"
        print(f"{out} has {batches}: `clew show {out} 0`; debug.replay_rollout_data trains on them.")


def learn(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on the groups that rollout makes for the run that CONFIG names, and publish weights.

    Example: clew learn examples/addition/grpo.yaml trial=try
    """
    from clew.launch.no_progress import with_hang_watch

    set_up_log()
    loaded, run = open_run_of(config, overrides)

    def work() -> None:
        if loaded.debug.replay_rollout_data:
            _train(loaded, run, [])
        else:
            with_hang_watch(loaded)(_learn)(loaded, run)

    on_ranks(loaded.launch.ranks, work, run.logs)


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|RUN... [KEY=VALUE]...",
            help="Folder or hub name of a model, a run's checkpoint, or a run (its newest checkpoint). Several are "
            "compared. Fields to override follow, such as eval.n_samples=4 eval.temperature=0.6.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Held-out prompts. Default: eval.path of the run.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="Dotted path of the reward. Default: that of the run.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write a row for each episode into this Parquet file."),
    ] = None,
) -> None:
    """Evaluate models without training: pass@k and reward with 95 % intervals, and the prompts that do not pass.

    Example: clew eval runs/addition/sft runs/addition/grpo --data runs/addition/material/held_out.jsonl
    """
    from clew.console import EscapingConsole
    from clew.diagnose.evaluate import behind, best_of, write_episodes
    from clew.diagnose.evaluate import evaluate as evaluate_models
    from clew.errors import ConfigError
    from clew.view.evaluation import show_failed, show_missed, show_models

    # os.path.exists returns False for text that is too long for a path, as an override may be. Path.exists raises.
    names = [each for each in models if "=" not in each or os.path.exists(each)]  # noqa: PTH110
    if not names:
        raise typer.BadParameter("name a model, a checkpoint or a run before the fields to override")
    if to is not None and not os.access(to.absolute().parent, os.W_OK):
        raise ConfigError(f"Cannot write {to}: {to.absolute().parent} is not a writable folder.")
    console = EscapingConsole(wide=200)
    overrides = [each for each in models if each not in names]
    evaluations = evaluate_models(names, data=data, reward=reward, overrides=overrides)
    best = best_of(evaluations)
    differences = [behind(each, best) for each in evaluations]
    show_models(console, names, [each.summary for each in evaluations], differences, evaluations.index(best))
    wanted = best.config.eval
    console.print(
        f"{best.summary['prompts']} prompts, {counted(wanted.n_samples, 'sample')} each at temperature "
        f"{wanted.temperature:g}. An episode passes if its reward is above {wanted.pass_above:g} (eval.pass_above)."
    )
    if wanted.n_samples > 1 and wanted.temperature == 0:
        console.print("At temperature 0 all samples of a prompt are alike. Set eval.temperature=1.", style="yellow")
    for each in evaluations:
        show_failed(console, each.name, each.episodes)
    show_missed(console, best.name, best.episodes, best.config.data.prompt)
    if to is not None:
        write_episodes(evaluations, to)
        console.print(f"\n{to} has a row for each episode.")


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
        loaded = load_config(config, overrides)
        if chosen := configuration.preset_in_words(loaded):
            print(f"# algorithm.preset={loaded.algorithm.preset} sets these options unless you set them: {chosen}")
        print(configuration.dump(loaded), end="")


def doctor() -> None:
    """Check this machine: versions, devices, ports, permission to trace, disk, shared memory; say what to do.

    Example: clew doctor
    """
    from clew.diagnose.doctor import examine

    if not examine():
        raise SystemExit(1)
