"""Commands that read, replay, compare, explain and exchange a record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clew.cli.options import Overrides, Trust, on_ranks, run_path_of
from clew.printing import counted, print


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
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            metavar="ROW",
            help="Follow one prompt over the run: a row of the data file, from 0, or text that the prompt contains.",
        ),
    ] = None,
    off_policy: Annotated[
        bool, typer.Option("--off-policy", help="Show the most off-policy sequences of a run, or of --steps.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Draw reward, length, entropy, k3, lag, clip fraction and time as PNG."
        ),
    ] = None,
) -> None:
    """Show what is recorded of a run, of one of its steps, groups, episodes or tokens, or of all runs in a folder.

    Example: clew show runs/addition/grpo 3
    """
    from clew.console import EscapingConsole
    from clew.view.show import show as show_record

    console = EscapingConsole(wide=200)
    path = run_path_of(run)
    if plot is not None:
        from clew.record.bundle import opened
        from clew.view.learning_curve import draw_curves

        if what is not None or steps is not None or tokens or prompt is not None or off_policy:
            raise typer.BadParameter("--plot draws a whole run: leave out the other options")
        with opened(path) as (directory, _):
            draw_curves(directory, plot)
        print(f"plot: {plot}")
        return
    show_record(path, what, steps=steps, tokens=tokens, prompt=prompt, off_policy=off_policy, console=console)


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or the configuration that names it.")],
    overrides: Overrides = None,
) -> None:
    """Show what each process of a run is doing, what it is waiting for, for how long, and why; and all warnings.

    Example: clew status runs/addition/grpo
    """
    from clew.console import EscapingConsole
    from clew.record.run import open_run
    from clew.view.status import show_status

    found = open_run(run_path_of(run, overrides))
    show_status(EscapingConsole(wide=200), found)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a file that `clew bundle` wrote.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Fields to change: train into a new run directory, and show both runs side by side. "
            "With --stage, on another trainer's record: fields that describe its algorithm.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--step", "--steps", metavar="N|FIRST:END", help="Steps to replay. Default: all.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Compare only these stages, without a model: data,rewards,advantages,loss.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="With --stage or --reward: one group, episode or sequence.")] = None,
    stop: Annotated[
        str | None, typer.Option("--break", help="Stop in a debugger before: advantages, loss, backward or update.")
    ] = None,
    reward: Annotated[
        bool, typer.Option("--reward", help="Run workflow and reward again on the recorded answers.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Compare with the record and stop at the first difference, or only train."
        ),
    ] = True,
    device: Annotated[str | None, typer.Option(help="Device to use instead of the run's: cpu or cuda.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks to train on; it may differ from the run's.")] = 1,
    trust: Trust = None,
) -> None:
    """Train recorded steps again and compare every stage with the record; the first difference is named.

    Example: clew replay runs/addition/grpo --step 3
    """
    from clew.diagnose.rerun import Options, rerun

    options = Options(
        steps=steps,
        stages=stage,
        only=only,
        stop=stop,
        reward=reward,
        device=device,
        ranks=ranks,
        verify=verify,
        overrides=overrides or (),
        trust=trust or (),
    )

    def replay_here() -> None:
        if not rerun(run, options):
            raise SystemExit(1)

    on_ranks(ranks, replay_here)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run directory, or a file that `clew bundle` wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other run directory or bundle.")],
    ignore: Annotated[
        str, typer.Option(help="Fields of the configuration that differ on purpose, such as lr,seed.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw how far they drift, into this PNG file.")
    ] = None,
) -> None:
    """Find where two runs first differ (step, stage, sequence, token), what could explain it, and how far they drift.

    Example: clew diff runs/addition/try runs/addition/grpo
    """
    from clew.diagnose.diff import diff as compare

    if not compare(a, b, ignore=[field.strip() for field in ignore.split(",") if field.strip()], plot=plot):
        raise SystemExit(1)


def blame(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a file that `clew bundle` wrote.")],
    step: Annotated[int, typer.Option(help="The step. It may be one that failed and has only its batch on record.")],
    top: Annotated[int, typer.Option(min=1, help="How many sequences to show.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the worst sequence to show.")] = 8,
    by: Annotated[
        str | None,
        typer.Option(
            help="gradient, loss, kl, behaviour_k3 (mismatch KL), pull, or critic (its gradient). Default: gradient, "
            "or pull if there is no checkpoint."
        ),
    ] = None,
    trust: Trust = None,
) -> None:
    """Find which sequences and tokens caused a spike (of gradient, loss or KL) or a NaN: contributions, worst first.

    Example: clew blame runs/addition/grpo --step 3 --top 5
    """
    from clew.diagnose.blame import blame as assign

    assign(run, step, top=top, tokens=tokens, by=by, trust=trust or [])


def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[int, typer.Option(help="The step.")],
    stages_only: Annotated[
        bool,
        typer.Option(
            "--stages-only",
            help="Leave out the weights: enough for `clew replay --stage`, show and diff.",
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            help="File to write, or a folder. In a folder, the file is named after run and step. "
            "Default: the current folder."
        ),
    ] = None,
) -> None:
    """Write one file that holds what a step needs to be replayed elsewhere.

    Example: clew bundle runs/addition/grpo --step 3 --stages-only
    """
    from clew.record.bundle import write_bundle
    from clew.record.run import open_run

    directory = open_run(run)
    path = write_bundle(directory, step, stages_only=stages_only, to=to)
    summary = directory.steps.read(step)
    usage = f"`clew replay {path}` {'checks its stages' if stages_only else 'runs it'}, on any machine."
    if not directory.steps.by_clew:  # another trainer's record does not say how the loss was computed
        usage = f"`clew replay {path} --stage data` checks it, `clew show {path}` shows it."
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB). {usage}")
    for field in summary.get("code", {}):
        section, name = field.split(".")
        # A replay needs no code of the rollout, and no preset: the record's configuration spells out its fields.
        if section not in summary["config"] or name == "preset":
            continue
        code = summary["config"][section][name]
        print(f"It holds no code: {field}={code} must be importable there.")
        print(f"Replay it with `--trust {code.rpartition('.')[0]}`.")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    form: Annotated[str, typer.Option("--format", metavar="parquet|jsonl|pt", help="What to write.")] = "parquet",
    steps: Annotated[
        str,
        typer.Option("--steps", metavar="FIRST:END", help="Steps: 130:140 means 130 to 139; 137 is one step."),
    ] = "",
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="RUN/exported by default.")] = None,
) -> None:
    """Write steps as portable files, one per step: tokens and what was computed from them.

    Example: clew export runs/addition/grpo --format pt --steps 0:3 --to runs/addition/exported
    """
    from clew.record.run import open_run
    from clew.training.export import export_steps

    files = export_steps(open_run(run), form, steps, to or run / "exported")
    last = f" to {files[-1].name}" if len(files) > 1 else ""
    print(f"exported {counted(len(files), 'step')}: {files[0]}{last}")


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Batches as .pt files, in order of steps.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="The run directory to make.")],
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", min=1, help="Rows per group, for files that do not name groups."),
    ] = None,
) -> None:
    """Make a run directory from batches in .pt files, such as AReaL's or those of `clew export`, one per step.

    Example: clew import runs/addition/exported/step-000000.pt --to runs/addition/imported
    """
    from clew.training.export import import_steps

    import_steps(files, to, group_size)
    print(f"imported {counted(len(files), 'step')}: {to}")
