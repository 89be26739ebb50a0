"""Commands of `clew agent`: run one episode at a time, run hundreds at once, or replay a recorded episode."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from clew.cli.options import Trust
from clew.printing import print

agent_app = typer.Typer(
    help="Agents: any class with `async def run(self, data, **extra_kwargs)` that talks to a model provider.",
    epilog="The examples use files that `python -m examples.agents.make --out runs/calculator/material` makes. "
    "See docs/agents.md for more.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AgentPath = Annotated[str, typer.Argument(metavar="AGENT", help="Dotted path of the class, such as my_agent.MyAgent.")]
DataFile = Annotated[str, typer.Option("--data", metavar="FILE", help="JSON lines, Parquet, or a hub name.")]
AgentArguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="Argument of the class's constructor. May be repeated."),
]


@agent_app.command("run")
def agent_run(
    agent: AgentPath,
    data: DataFile,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of rows, drawn at random.")] = 1,
    base_url: Annotated[
        str | None, typer.Option(help="URL of the served model or provider. Default: OPENAI_BASE_URL.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for drawing rows and sampling tokens.")] = 1,
    arg: AgentArguments = None,
) -> None:
    """Run an agent on random rows, one at a time, and show who wrote each token and what the trainer would do with it.

    Example: clew agent run examples.agents.calculator.Calculator --data runs/calculator/material/held_out.jsonl --n 2
    """
    import asyncio

    from clew.config import provider
    from clew.console import EscapingConsole
    from clew.data import load_rows
    from clew.diagnose.agent_run import base_url_of, draw_rows, run_agent
    from clew.view.agent import show_ran
    from clew.view.status import branched_share

    async def run() -> bool:
        console, sound = EscapingConsole(), True
        rows = draw_rows(load_rows(data), n, seed)
        key = provider()[1] or "sk-clew"
        episodes = run_agent(agent, _arguments(arg), rows, base_url=base_url_of(base_url), api_key=key, seed=seed)
        number = branched = 0
        async for ran, tokenizer in episodes:
            number += 1
            show_ran(
                console,
                title=f"row {number} of {n}",
                data=ran.data,
                seconds=ran.seconds,
                returned=ran.returned,
                sequences=ran.episode.sequences if ran.episode is not None else [],
                warnings=ran.warnings,
                tokenizer=getattr(tokenizer, "backend_tokenizer", None),
            )
            sound &= not ran.failed
            branched += ran.episode is not None and ran.episode.branched
        if share := branched_share(branched, number):
            console.print(share, style="yellow", soft_wrap=True)
        return sound

    if not asyncio.run(run()):
        raise SystemExit(1)


@agent_app.command("stress")
def agent_stress(
    agent: AgentPath,
    data: DataFile,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in a batch, as in rollout.batch_groups.")] = 256,
    group: Annotated[int, typer.Option(min=1, help="Episodes per prompt, as in rollout.n_samples.")] = 8,
    dp: Annotated[int, typer.Option(min=1, help="Rollout processes that share a batch. This command acts as one.")] = 4,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="URL of a served model or of a provider (key: OPENAI_API_KEY). Every episode sends it requests, so "
            "start small. Default: a stand-in answers, and no model is needed."
        ),
    ] = None,
    latency: Annotated[
        float,
        typer.Option(min=0, help="Minimum seconds before the stand-in answers. It may wait up to 1.5 times as long."),
    ] = 1.0,
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of tokens of a synthetic answer, without reasoning and tool calls. One in eight may "
            "be up to 16 times as long.",
        ),
    ] = 64,
    recorded: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Let the stand-in repeat responses recorded in this run."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a model whose tokenizer and chat template the stand-in uses."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Maximum seconds of an episode, not counting waits for the model or for a busy processor. "
            "Counting them, the limit is 5 times as long.",
        ),
    ] = 120.0,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the report as JSON.")
    ] = None,
    html_to: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", dir_okay=False, help="Write the report as an HTML page.")
    ] = None,
    arg: AgentArguments = None,
) -> None:
    """Run hundreds of episodes at once and judge if the agent is fit to train (exit code 0: yes, 1: no, 3: not judged).

    Example: clew agent stress examples.agents.calculator.Calculator --data runs/calculator/material/held_out.jsonl
    """
    import json

    from clew.console import EscapingConsole
    from clew.data import load_rows
    from clew.record.files import write_bytes
    from clew.rollout.agents import load_agent
    from clew.stress.elsewhere import Source
    from clew.stress.gateway import answerer
    from clew.stress.run import stressed
    from clew.stress.views import page, rendered

    loaded, rows = load_agent(agent, _arguments(arg)), load_rows(data)
    gateway = answerer(base_url, latency_s=latency, tokens=tokens, recorded=recorded, model=model)

    report = stressed(
        loaded,
        rows,
        gateway=gateway,
        batch=batch,
        group=group,
        dp=dp,
        timeout_s=timeout,
        source=Source(path=agent, arguments=_arguments(arg)),
        say=lambda wave: print(wave, file=sys.stderr, flush=True),
    )
    sys.stderr.flush()
    EscapingConsole().print(rendered(report))  # first, so that the verdict is shown even if a file cannot be written
    sys.stdout.flush()
    if json_to is not None:
        write_bytes(json_to, json.dumps(report.as_dict(), indent=1).encode())
    if html_to is not None:
        write_bytes(html_to, page(report).encode())
    # End at once: threads that the agent left behind would delay an ordinary exit, and objects that it left to the
    # garbage collector would print complaints after the verdict.
    os._exit({"fit": 0, "not fit": 1, "not judged": 3}[report.outcome])


@agent_app.command("replay")
def agent_replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    episode: Annotated[str, typer.Option(metavar="ID", help="ID such as g000123.e2. The episode may have failed.")],
    agent: Annotated[str | None, typer.Option(help="Dotted path of an agent to use instead of the run's.")] = None,
    continue_live: Annotated[
        bool,
        typer.Option("--continue-live", help="After the first request that differs, continue with the served model."),
    ] = False,
    base_url: Annotated[str | None, typer.Option(help="URL of that model. Default: OPENAI_BASE_URL.")] = None,
    trust: Trust = None,
) -> None:
    """Run the agent's current code against the recorded responses of an episode; no model is needed.

    Example: clew agent replay runs/calculator/grpo --episode g000000.e1
    """
    from clew.diagnose.agent_replay import print_replay, replay_agent
    from clew.diagnose.agent_run import base_url_of
    from clew.record.bundle import opened
    from clew.view.find_episode import Name, episode_of, find_group

    name, url = Name.parse(episode), base_url_of(base_url) if continue_live else None
    named = [agent.rpartition(".")[0]] if agent else []  # naming an agent here means trusting its module
    with opened(run, [*(trust or []), *named]) as (directory, _):
        rows = episode_of(directory, find_group(directory, name), name)
        replayed = replay_agent(directory, rows, agent=agent, base_url=url)
    print_replay(replayed)
    if not replayed.same:
        raise SystemExit(1)


def _arguments(given: list[str] | None) -> dict[str, object]:
    import yaml

    arguments = dict[str, object]()
    for argument in given or ():
        name, equals, value = argument.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--arg {argument}: expected KEY=VALUE, such as verbose=true")
        try:
            arguments[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
            raise typer.BadParameter(f"--arg {argument}: not YAML: {' '.join(str(error).split())}") from None
    return arguments
