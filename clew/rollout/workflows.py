"""Built-in workflows. Yours is a class like these: name it by dotted path in rollout.workflow.

`run_episode(engine, data)` gets an `EpisodeEngine` and its own copy of one row of the data set, and returns a number or
a dict of named numbers, whose sum is trained on. One instance serves all episodes, side by side.
"""

from __future__ import annotations

from typing import Any

from clew.data import without_nulls
from clew.errors import EpisodeError
from clew.gateway.episode_engine import EpisodeEngine
from clew.inference.protocol import RequestTooLong
from clew.rollout.reward_function import Reward, total

_MARKER = "clew:answer"


class SingleTurn:
    """One answer to the prompt, judged by the reward function.

    The prompt is either a list of chat messages, which goes through the tokenizer's chat template, or text, which goes
    to the model as it is.
    """

    def __init__(self, enable_thinking: bool | None = None, chat: bool = False) -> None:
        """Set the options.

        Args:
            enable_thinking: Passed to the chat template; None: the template's own default.
            chat: Send a text as a user's message through the template.
        """
        self.enable_thinking = enable_thinking
        self.chat = chat

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Reward:
        prompt = self.prompt_of(engine, data)
        answer = await engine.generate(self.tokens_of(engine, prompt), prompt=prompt)
        return await engine.reward(answer.text, data)

    def prompt_of(self, engine: EpisodeEngine, data: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Return the prompt of a row: text, or chat messages.

        Raises:
            EpisodeError: It is neither.
        """
        prompt = data[engine.prompt_column]
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}] if self.chat else prompt
        if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
            return without_nulls(prompt)
        raise EpisodeError(
            f"the column {engine.prompt_column!r} holds {type(prompt).__name__}; expected text or a list of chat "
            f"messages."
        )

    def tokens_of(self, engine: EpisodeEngine, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Return the tokens that the model is to continue."""
        if isinstance(prompt, str):
            return _tokens(engine, prompt, special=True)
        return _tokens(engine, self.render(engine, prompt), special=False)

    def render(self, engine: EpisodeEngine, messages: list[dict[str, Any]]) -> str:
        """Return the messages as the chat template writes them, up to where the model begins."""
        if engine.tokenizer.chat_template is None:
            raise EpisodeError(
                "the prompt is a list of chat messages, and the model's tokenizer has no chat template. "
                "Use a model with one, or a column of plain text."
            )
        options: dict[str, Any] = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return str(
            engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        )


class MultiTurnRetry(SingleTurn):
    """Tells the model when its answer is wrong, and lets it try again in the same conversation.

    Each further turn extends the exact tokens of the one before. The reward is that of the last answer. No further
    turn is started if it would not fit into the context.
    """

    def __init__(
        self,
        max_turns: int = 2,
        feedback: str = "That is not right. Try again.",
        threshold: float = 0.5,
        discount: float = 1.0,
        enable_thinking: bool | None = None,
        chat: bool = False,
    ) -> None:
        """Set the options.

        Args:
            max_turns: Maximum number of answers.
            feedback: The user's message after a wrong answer.
            threshold: An answer is wrong when its reward is not above this.
            discount: Factor by which each retry multiplies the reward.
            enable_thinking, chat: See `SingleTurn`.
        """
        super().__init__(enable_thinking, chat)
        self.max_turns = max_turns
        self.feedback = feedback
        self.threshold = threshold
        self.discount = discount

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Reward:
        prompt = self.prompt_of(engine, data)
        answer = await engine.generate(self.tokens_of(engine, prompt), prompt=prompt)
        reward = await engine.reward(answer.text, data)
        retries = 0
        while total(reward) <= self.threshold and retries < self.max_turns - 1:
            tokens = answer.all_ids + self._next_turn(engine, prompt, answer.all_ids[-1])
            if isinstance(prompt, str):
                prompt = prompt + answer.text + self.feedback
            else:
                prompt = self.with_feedback(prompt, answer.text)
            try:
                answer = await engine.generate(tokens, prompt=prompt)
            except RequestTooLong:
                break  # the last answer stands: throwing the episode away would favour short ones
            retries += 1
            reward = await engine.reward(answer.text, data)
        scale = self.discount**retries
        return {name: scale * part for name, part in reward.items()} if isinstance(reward, dict) else scale * reward

    def with_feedback(self, messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
        return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": self.feedback}]

    def _next_turn(self, engine: EpisodeEngine, prompt: str | list[dict[str, Any]], last_token: int) -> list[int]:
        """Return the tokens between the end of an answer and the beginning of the next.

        They are found by rendering the conversation with a marker in the answer's place, so that what the model
        generated is neither decoded nor tokenized again. If the model ended its turn itself, the template's end of turn
        is left out.
        """
        if isinstance(prompt, str):
            return _tokens(engine, self.feedback, special=False)
        marked = self.with_feedback(prompt, _MARKER)
        _, marker, after = self.render(engine, marked).rpartition(_MARKER)
        if not marker:
            raise EpisodeError("the chat template leaves out the model's answer, so it does not show how a turn ends.")
        suffix = _tokens(engine, after, special=False)
        return suffix[1:] if suffix[0] == last_token else suffix


def _tokens(engine: EpisodeEngine, text: str, *, special: bool) -> list[int]:
    """Return the tokens of a text. With `special`, include those that the tokenizer puts around it."""
    encoded: Any = engine.tokenizer(text, add_special_tokens=special)
    return list(encoded["input_ids"])
