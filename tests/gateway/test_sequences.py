"""Token capture: each generated token is trained on once, with what was recorded when it was generated."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.errors import EpisodeError
from clew.gateway.episode_engine import resources
from clew.gateway.interactions import Interaction
from clew.gateway.sequences import aligned, assemble, with_returns
from clew.inference.protocol import SamplingParams
from clew.rollout.workflows import MultiTurnRetry, SingleTurn
from clew.seeds import derive_seed
from tests.models import tiny_tokenizer
from tests.pages import ROOT, blocks
from tests.rollout.scripted import Scripted, config_for


def interaction(index, input_ids, output_ids, *, version=0, temperature=1.0):
    return Interaction(
        id=f"g000000.e0.i{index}", index=index, input_ids=input_ids, output_ids=output_ids,
        logprobs=[-(index + 1 + i / 100) for i in range(len(output_ids))], versions=[version] * len(output_ids),
        finish_reason="stop", text="", params=SamplingParams(temperature=temperature), prompt=None,
        started_at=0.0, finished_at=0.0,
    )  # fmt: skip


def test_a_turn_that_extends_the_exact_tokens_extends_the_sequence():
    first = interaction(0, [1, 2], [3, 4], version=5, temperature=0.0)
    second = interaction(1, [1, 2, 3, 4, 9], [7], version=6, temperature=0.5)
    (sequence,) = assemble([second, first])
    columns = {name: column.tolist() for name, column in aligned(sequence).items()}
    assert columns["input_ids"] == [1, 2, 3, 4, 9, 7]
    assert columns["loss_mask"] == [False, False, True, True, False, True]
    assert columns["versions"] == [-1, -1, 5, 5, -1, 6]
    assert columns["turn_ids"] == [-1, -1, 0, 0, -1, 1]
    assert columns["temperatures"] == [1, 1, 1, 1, 1, 0.5]
    assert columns["logprobs"] == pytest.approx([0, 0, -1, -1.01, 0, -2])


@pytest.mark.parametrize(
    "individual, rows", [(False, [([0, 1, 2], 0.25 + 0.5)]), (True, [([0], 0.75), ([1], 0.5), ([2], 1)])]
)
def test_a_turn_is_worth_the_turns_after_it_whether_or_not_they_are_in_its_row(individual, rows):
    """The reward of the episode is 1, that of the first turn 0.5, and the discount 0.5."""
    turns = [interaction(0, [1], [2]), interaction(1, [1, 2, 3], [4]), interaction(2, [1, 2, 3, 4, 5], [6])]
    own = {"g000000.e0.i0": 0.5}
    resources = SimpleNamespace(individual=individual, turn_discount=0.5)
    engine: Any = SimpleNamespace(interactions=turns, turn_rewards=own, resources=resources)
    found = [([turn.index for turn in chain], value) for chain, value, _ in with_returns(engine, {"reward": 1.0})]
    assert found == rows


def test_a_turn_whose_context_was_rewritten_starts_a_sequence():
    turns = [interaction(0, [1, 2], [3, 4]), interaction(1, [1, 2, 3, 5], [7]), interaction(2, [1, 2, 3, 4], [8])]
    assert [[turn.index for turn in sequence] for sequence in assemble(turns)] == [[0, 2], [1]]


@settings(max_examples=300)
@given(st.data())
def test_every_generated_token_is_trained_on_in_exactly_one_sequence(data):
    """Turns extend an earlier one, branch off, are cut short or start anew. With 3 tokens, some extend by chance."""
    token = st.integers(0, 2)
    turns: list[Interaction] = []
    for index in range(data.draw(st.integers(1, 8))):
        input_ids = data.draw(st.lists(token, min_size=1, max_size=4))
        if turns and data.draw(st.booleans()):
            earlier = data.draw(st.sampled_from(turns)).all_ids
            input_ids = earlier[: data.draw(st.integers(0, len(earlier)))] + input_ids
        output_ids = data.draw(st.lists(token, max_size=3))
        turns.append(interaction(index, input_ids, output_ids, version=index, temperature=0.5 + index))
    sequences = assemble(data.draw(st.permutations(turns)))
    assert sorted(turn.index for sequence in sequences for turn in sequence) == list(range(len(turns)))
    trained: dict[int, list] = {turn.index: [] for turn in turns}
    for sequence in sequences:
        columns = aligned(sequence)
        for place in range(len(columns["input_ids"])):
            row = {name: column[place].item() for name, column in columns.items()}
            if not row["loss_mask"]:
                assert (row["logprobs"], row["versions"], row["turn_ids"], row["temperatures"]) == (0, -1, -1, 1)
                continue
            turn = turns[row["turn_ids"]]
            assert row["versions"] == turn.index and row["temperatures"] == 0.5 + turn.index
            assert columns["input_ids"][:place].tolist() == turn.all_ids[:place], "trained in another context"
            trained[turn.index].append((row["input_ids"], round(row["logprobs"], 4)))
    for turn in turns:
        assert trained[turn.index] == [(i, round(p, 4)) for i, p in zip(turn.output_ids, turn.logprobs, strict=True)]


# Sessions and workflows ----------------------------------------------------------------------------------------------


def session_for(tmp_path, engine, reward=None, **sections):
    from clew.gateway.episode_engine import EpisodeEngine

    config = config_for(tmp_path, **sections)
    return EpisodeEngine(
        resources(config, engine, tiny_tokenizer(tmp_path / "tokenizer"), reward, vision=None), "g000007.e1"
    )


def test_a_session_names_seeds_and_records_each_request(tmp_path):
    engine = Scripted(abort_every=2)
    session = session_for(tmp_path, engine, sampling={"temperature": 0.5, "stop": ["\n"]})

    async def two():
        await session.generate([7, 8], prompt="12")
        return await session.generate([7, 9], temperature=0.0, max_new_tokens=2, stop="x")

    second = asyncio.run(two())
    first = session.interactions[0]
    assert [each.id for each in session.interactions] == ["g000007.e1.i0", "g000007.e1.i1"]
    assert first.params.seed == derive_seed(1, "g000007.e1.i0") != second.params.seed
    assert first.params.stop == ("\n",) and second.params.stop == ("x",)
    assert (first.params.temperature, second.params.temperature, second.params.max_new_tokens) == (0.5, 0.0, 2)
    assert first.text == session.tokenizer.decode(first.output_ids)
    assert first.record_entry()["prompt"] == "12" and first.record_entry()["sampling"]["temperature"] == 0.5
    assert {name for name, _, _ in engine.requests} == {"g000007.e1.i0", "g000007.e1.i1"}


def test_the_seed_is_the_same_on_every_machine():
    assert derive_seed(1, "g000007.e1.i0") == 4787021825430064693
    assert len({derive_seed(seed, f"g{i}") for seed in range(9) for i in range(99)}) == 9 * 99


def test_an_unknown_sampling_parameter_names_the_nearest(tmp_path):
    session = session_for(tmp_path, Scripted())
    with pytest.raises(EpisodeError, match=r"'temprature'. Did you mean 'temperature'"):
        asyncio.run(session.generate([7], temprature=1.0))


CHAT = [{"role": "user", "content": "1+1="}]


def reward_of(*values):
    given = iter(values)

    async def reward(completion, data):
        return next(given)

    return reward


@pytest.mark.parametrize(("prompt", "chat", "text"), [
    ("1+1=", False, "1+1="), ("1+1=", True, None), (CHAT, False, None),
])  # fmt: skip
def test_single_turn_sends_text_as_it_is_and_messages_through_the_template(tmp_path, prompt, chat, text):
    engine = Scripted()
    session = session_for(tmp_path, engine, reward_of(1.0))
    assert asyncio.run(SingleTurn(chat=chat).run_episode(session, {"prompt": prompt})) == 1.0
    rendered = text or session.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert session.tokenizer.decode(engine.requests[0][1]) == rendered


def test_enable_thinking_reaches_the_template(tmp_path):
    engine = Scripted()
    session = session_for(tmp_path, engine, reward_of(1.0, 1.0))
    session.tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% else %}N{% endif %}"
    for enable in (True, False):
        asyncio.run(SingleTurn(enable_thinking=enable).run_episode(session, {"prompt": CHAT}))
    assert [session.tokenizer.decode(ids)[-1] for _, ids, _ in engine.requests] == ["T", "N"]


@pytest.mark.parametrize("prompt", ["1+1=", CHAT])
def test_retry_extends_the_exact_tokens(tmp_path, prompt):
    engine = Scripted()
    session = session_for(tmp_path, engine, reward_of(0.0, {"right": 0.2}, 1.0))
    workflow = MultiTurnRetry(max_turns=3, feedback="no", discount=0.5)
    assert asyncio.run(workflow.run_episode(session, {"prompt": prompt})) == 0.25
    first, second, third = session.interactions
    assert second.input_ids[: len(first.all_ids)] == first.all_ids
    added = session.tokenizer.decode(second.input_ids[len(first.all_ids) :])
    assert added == ("no" if isinstance(prompt, str) else "<eos><|user|>no<|assistant|>")
    assert [len(sequence) for sequence in assemble([first, second, third])] == [3]


@pytest.mark.parametrize("prompt", ["1+1=", CHAT])
def test_the_workflow_of_the_guide(tmp_path, prompt):
    [code] = [
        "\n".join(block.lines)
        for block in blocks(ROOT / "docs/guides/model_and_data.md")
        if block.kind == "python" and "run_episode" in "\n".join(block.lines)
    ]
    names = {}
    exec(code, names)
    session = session_for(tmp_path, Scripted(), reward_of(0.25))
    assert asyncio.run(names["Retry"]().run_episode(session, {"prompt": prompt})) == 0.25
    assert [len(sequence) for sequence in assemble(list(session.interactions))] == [2]


def test_retry_closes_a_turn_once(tmp_path):
    """The model's own end of turn is kept, and the template's left out."""

    class Ends(Scripted):
        async def generate(self, request):
            completion = await super().generate(request)
            completion.output_ids[-1] = 1
            return completion

    session = session_for(tmp_path, Ends(), reward_of(0.0, 0.0))
    assert asyncio.run(MultiTurnRetry(feedback="no").run_episode(session, {"prompt": CHAT})) == 0.0
    first, second = session.interactions
    assert session.tokenizer.decode(second.input_ids[len(first.all_ids) :]) == "<|user|>no<|assistant|>"


def test_a_prompt_that_is_neither_text_nor_messages(tmp_path):
    with pytest.raises(EpisodeError, match="'prompt' holds int; expected text or a list of chat messages"):
        asyncio.run(SingleTurn().run_episode(session_for(tmp_path, Scripted()), {"prompt": 3}))
    session = session_for(tmp_path, Scripted())
    session.tokenizer.chat_template = None
    with pytest.raises(EpisodeError, match="has no chat template"):
        asyncio.run(SingleTurn().run_episode(session, {"prompt": CHAT}))
