"""Output of `clew agent run`: what an agent did, and what the trainer would make of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from clew.printing import counted
from clew.record.rows import Sequence
from clew.view.episode import lengths
from clew.view.text import as_text, visible
from clew.view.tokens import Tokenizer, shown_once, times, token_texts


def show_ran(
    console: Console,
    *,
    title: str,
    data: dict[str, Any],
    seconds: float,
    returned: str,
    sequences: list[Sequence],
    warnings: list[str],
    tokenizer: Tokenizer | None,
) -> None:
    """Print the conversation with its tokens coloured by who wrote them, then reward, time and warnings."""
    console.print(Text(f"{title}: ", style="bold").append(visible(as_text(data), keep=""), style="dim"))
    if sequences and sequences[0].error is not None:
        _show_failed(console, sequences[0])
    trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    for sequence in sequences:
        if not len(sequence.input_ids):
            continue
        turns = counted(len(sequence.interactions), "turn")
        console.print(Text(f"  {sequence.id}: {turns}, {lengths(sequence)}", style="bold"))
        flow = Text()
        texts = token_texts(sequence.input_ids.tolist(), tokenizer)
        generated = sequence.loss_mask.tolist()
        for place, count in shown_once(sequence.input_ids.tolist(), generated):
            flow.append(visible(texts[place]) + times(count), "green underline" if generated[place] else "dim")
        console.print(flow, soft_wrap=True)
    console.print(Text(f"  returned {visible(returned)} after {seconds:.2f} s", style="bold"))
    for warning in warnings:
        console.print(Text(f"  warning: {visible(warning)}", style="yellow"), soft_wrap=True)
    if not sequences:
        console.print(
            Text("  API providers do not return token IDs, so this episode cannot be trained on", style="dim")
        )
    elif sequences[0].error is not None:
        console.print(Text("  the trainer would put this episode into rejected/", style="red"))
    else:
        rewards = ", ".join(dict.fromkeys(f"{sequence.reward:g}" for sequence in sequences))
        console.print(
            Text(
                f"  the trainer would make {counted(len(sequences), 'sequence')} of it, train on "
                f"{trained} tokens, and compare the reward {rewards} with those of the other episodes of the prompt"
            ),
            soft_wrap=True,
        )


def _show_failed(console: Console, sequence: Sequence) -> None:
    """Print how far a failed episode got, and what it raised, with the traceback."""
    for interaction in sequence.interactions:
        prompt = interaction.get("prompt")
        asked = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        console.print(Text(f"  {interaction.get('id')}: {visible(as_text(asked))}", style="dim"), soft_wrap=True)
        said = Text(f"  {visible(as_text(interaction.get('completion')))}", style="green underline")
        console.print(said, soft_wrap=True)
    console.print(Text(visible(sequence.error or ""), style="red"), soft_wrap=True)
