"""Sessions: the conversations of one episode with the model, from request to reply.

Each episode has a session and an API key of its own, so that a client needs to send nothing but the key. A session ends
with its episode, by an explicit call, or at a limit; a request after that gets an error that says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from clew.gateway.constraints import constrain
from clew.gateway.dialect import ModelRequest, Refusal, Reply, Stream
from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.generation import Generation
from clew.gateway.reply_so_far import Speech
from clew.gateway.turns import Prompt, Turns
from clew.http_server import LARGE_TEXT, max_text


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a session; None: no limit."""

    turns: int | None = None
    """Maximum number of requests to the model."""
    tokens: int | None = None
    """Maximum number of generated tokens."""


@dataclass(kw_only=True, eq=False)
class Submission:
    """A request that has arrived, and its replies. A retry of the request gets the same replies."""

    ids: Sequence[str]
    """IDs of the interactions; the first is the response's ID."""
    fingerprint: bytes
    created_at: float
    """Time when generation began, in seconds since the epoch."""
    input_ids: Sequence[int]
    speech: Speech
    """Parts of the replies as they come, if the client wants a stream."""
    replies: asyncio.Task[list[Reply]]
    left: bool = False
    """True if the client left before it had the reply, and no retry has come since."""
    delivered: bool = False
    """True once a client has received the reply.

    A retry may receive it before the server notices that the first connection is broken.
    """

    @property
    def abandoned(self) -> bool:
        return self.left and not self.delivered

    def stream(self) -> Stream:
        """Return a new stream of the replies, from the beginning. Any number of streams may be read side by side."""
        return Stream(
            ids=self.ids,
            created_at=self.created_at,
            input_ids=self.input_ids,
            deltas=self.speech.follow(),
            replies=self.answered,
        )

    async def answered(self) -> list[Reply]:
        """Wait for the replies and return them. Cancelling this wait does not stop them.

        Raises:
            Refusal: The request failed, or the session has ended.
        """
        await asyncio.wait({self.replies})
        if self.replies.cancelled():
            raise Refusal(400, f"session {self.ids[0].rpartition('.i')[0]} has ended.", code="session_ended")
        return self.replies.result()


class AgentSession:
    """Conversations of one episode with the model. Use it on the gateway's event loop."""

    def __init__(self, engine: EpisodeEngine, limits: Limits) -> None:
        self.engine = engine
        self.ended: str | None = None
        """Reason why no further request is answered; None while the session is open."""
        self.data: dict[str, Any] = {}
        """Data that the client sent to /rl/start_session; recorded as the episode's data row. Not used in training."""
        self.started_at = time.time()
        self.last_used = time.monotonic()
        self.received_bytes = 0
        """Size in bytes of the requests that are kept: a measure of the memory that they take."""
        self._limits = limits
        self.turns = Turns(engine.tokenizer, engine.resources.context, engine.resources.vision)
        self._submissions: list[Submission] = []
        self._failed: Counter[bytes] = Counter()
        """Number of failed attempts, by request fingerprint. Each of them lets one retry count as a new attempt."""
        self._arriving: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks by request fingerprint. A retry waits until the first request is submitted, and then finds it."""

    @property
    def id(self) -> str:
        return self.engine.episode_id

    @property
    def busy(self) -> bool:
        return any(not submission.replies.done() for submission in self._submissions)

    @property
    def rewards(self) -> dict[str, float]:
        """Return the rewards of single interactions, by interaction ID."""
        return self.engine.turn_rewards

    @property
    def warnings(self) -> list[str]:
        return list(self.engine.warnings)

    async def submit(self, request: ModelRequest, fingerprint: bytes, *, retry: bool, size: int = 0) -> Submission:
        """Start to answer a request. If it is a retry, return the earlier submission instead.

        Args:
            fingerprint: Equal for a request and its retries.
            retry: True if the client says that this is a retry.
            size: Size of the request in bytes.

        Raises:
            Refusal: The session has ended, or the request's messages or parameters cannot be honoured.
        """
        self.last_used = time.monotonic()
        async with self._arriving.setdefault(fingerprint, asyncio.Lock()):
            return self._earlier(fingerprint, retry) or await self._begin(request, fingerprint, size)

    async def count_tokens(self, request: ModelRequest) -> int:
        return len((await self._prompt(request)).input_ids)

    def set_reward(self, reward: float, id: str | None = None) -> None:
        """Set the reward of the interaction with this ID, or of the last one if it is None.

        Raises:
            Refusal: There is no interaction with this ID, or none at all.
        """
        known = [interaction.id for interaction in self.engine.interactions]
        if not known or (id is not None and id not in known):
            has = f"has only {', '.join(known)}" if known else "has no interaction yet"
            raise Refusal(404, f"Cannot reward {id or 'the last interaction'}: session {self.id} {has}.")
        self.rewards[id or known[-1]] = reward

    def end(self, why: str) -> None:
        """End the session: refuse further requests, and drop replies that no client saw and no request continues."""
        self.ended = self.ended or why
        for submission in self._submissions:
            lost: Collection[str] = ()
            if not submission.replies.done():
                submission.replies.cancel()
                lost = submission.ids  # drops those of its n replies that are already complete
            elif submission.abandoned:
                lost = set(submission.ids) - self.turns.followed()
            self._drop(lost)
            if lost and submission.left:
                self.engine.warn(
                    f"the agent left before it had the whole reply {min(lost)}, and no request continues it: it is not "
                    f"trained on",
                    kind="a reply that was left",
                )

    # One request -----------------------------------------------------------------------------------------------------

    def _earlier(self, fingerprint: bytes, retry: bool) -> Submission | None:
        """Return the submission that this request repeats; None if the request is a new attempt."""
        failed_before = retry and self._failed[fingerprint] > 0
        if failed_before:  # its client repeats what failed: a new attempt
            self._failed[fingerprint] -= 1
        # Two equal requests may run side by side. So a request is a retry only if its client says so, or if the client
        # of an earlier equal request left without its reply. The retry then gets that reply rather than another's.
        equal = [each for each in reversed(self._submissions) if each.fingerprint == fingerprint]
        possible = [each for each in equal if each.abandoned or (retry and not failed_before)]
        earlier = max(possible, key=lambda each: (each.abandoned, not each.delivered), default=None)
        if earlier is not None:
            earlier.left = False
        return earlier

    async def _begin(self, request: ModelRequest, fingerprint: bytes, size: int) -> Submission:
        self._refuse_beyond_limits()
        request, begin = constrain(request, self.engine, self.turns)
        prompt = await self._prompt(request, begin)
        self._refuse_beyond_limits()  # the session may have ended while a thread made the prompt
        self._advise(request)
        indices, speech = [self.engine.reserve() for _ in range(request.n)], Speech()
        generation = Generation(
            engine=self.engine, turns=self.turns, request=request, prompt=prompt, indices=indices, speech=speech
        )
        submission = Submission(
            ids=[self.engine.interaction_id(index) for index in indices],
            fingerprint=fingerprint,
            created_at=time.time(),
            input_ids=prompt.input_ids,
            speech=speech,
            replies=asyncio.get_running_loop().create_task(generation.run()),
        )
        self._submissions.append(submission)
        self.received_bytes += size
        submission.replies.add_done_callback(lambda done: self._settle(submission, size, done))
        return submission

    def _refuse_beyond_limits(self) -> None:
        turns = len(self._submissions)
        tokens = sum(len(interaction.output_ids) for interaction in self.engine.interactions)
        if self.ended is None and self._limits.turns is not None and turns >= self._limits.turns:
            self.ended = f"it has used its {self._limits.turns} requests (rollout.max_turns)"
        if self.ended is None and self._limits.tokens is not None and tokens >= self._limits.tokens:
            self.ended = f"it has used its {self._limits.tokens} generated tokens (rollout.max_episode_tokens)"
        if self.ended is not None:
            message = f"Cannot answer: session {self.id} has ended, because {self.ended}."
            raise Refusal(400, message, code="session_ended")

    async def _prompt(self, request: ModelRequest, begin: str = "") -> Prompt:
        """Return the prompt of a request; see `Turns.prompt`.

        A long prompt, or one with images, is made in a thread, so that other sessions do not have to wait for it.
        """
        if request.characters > (limit := max_text(self.engine.resources.context)):
            message = (
                f"Cannot read the messages: they have {request.characters} characters, and the limit for this model's "
                f"context is {limit}. Shorten them."
            )
            raise Refusal(400, message, param="messages", code="context_length_exceeded")
        if request.characters < LARGE_TEXT and not request.images:
            return self.turns.prompt(request, begin)
        return await asyncio.to_thread(self.turns.prompt, request, begin)

    def _advise(self, request: ModelRequest) -> None:
        for note in request.notes:
            self.engine.warn(note, kind=note)
        if request.response_format is not None:
            self.engine.warn(
                "replies follow a JSON schema: their logprobs are computed over only the tokens "
                "that the schema allows, so they are not the policy's own. Do not train on them"
            )
        if "seed" in request.sampling:
            self.engine.warn(
                f"the client sets seed={request.sampling['seed']}: episodes of a group get the same random numbers"
            )

    def _settle(self, submission: Submission, size: int, done: asyncio.Task[list[Reply]]) -> None:
        self.last_used = time.monotonic()
        submission.speech.end()  # also when it was cancelled before it began
        if done.cancelled() or done.exception() is not None:  # a retry is a new attempt
            self._drop(submission.ids)
            self._submissions.remove(submission)
            self.received_bytes -= size
            self._failed[submission.fingerprint] += 1

    def _drop(self, ids: Container[str]) -> None:
        self.engine.interactions[:] = [each for each in self.engine.interactions if each.id not in ids]
