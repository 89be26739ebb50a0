"""Conversations as rows of `clew sft`: which tokens are trained on, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clew.errors import DataError
from clew.loop.sft import sft
from clew.models.loading import load_tokenizer
from clew.record.run import RunDirectory
from clew.training.conversations import encode_conversation
from clew.training.demonstrations import Demonstrations
from examples.agents.make import make
from tests.models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.training.sequences import make_config

SYSTEM = {"role": "system", "content": "S"}
ASK, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
AGAIN, SECOND = {"role": "user", "content": "3?"}, {"role": "assistant", "content": "no"}

MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_NEWLINES = CHAT_TEMPLATE.replace("<eos>", "<eos>\n")
WITHOUT_END = CHAT_TEMPLATE.replace("<eos>", "{{ '\\n\\n' }}")  # no token ends a turn
# Shows the reasoning of the last message only, so that an earlier turn is rendered otherwise once another one follows.
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content and loop.last %}({{ message.reasoning_content }}){% endif %}"
    "{{ message['content'] }}",
)


@pytest.fixture
def tokenizer(tmp_path: Path):
    tiny_tokenizer(tmp_path / "model")
    return load_tokenizer(str(tmp_path / "model"))


@pytest.fixture
def settings(tmp_path: Path):
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", scale=0.05)
    return {
        "model": tmp_path / "model",
        "root": str(tmp_path / "runs"),
        "data": {"path": str(tmp_path / "data.jsonl")},
        "training": {"steps": 15, "batch_size": 8, "lr": 1e-2, "warmup_steps": 3},
        "launch": {"threads": 1},
    }


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def marked(tokenizer, messages, tools=None):
    """Return the text of the conversation, with [ and ] around what is trained on."""
    ids, mask = encode_conversation(messages, tools, tokenizer, "here")
    text, inside = "", False
    for token, trained in zip(ids, mask.tolist(), strict=True):
        text += "[" * (trained and not inside) + "]" * (inside and not trained) + tokenizer.decode([token])
        inside = trained
    return text + "]" * bool(inside)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHAT_TEMPLATE, [ASK, ANSWER], "<|user|>1+1=<|assistant|>[2<eos>]"),
        (
            CHAT_TEMPLATE,
            [SYSTEM, ASK, ANSWER, AGAIN, SECOND],
            "<|system|>S<|user|>1+1=<|assistant|>[2<eos>]<|user|>3?<|assistant|>[no<eos>]",
        ),
        (CHAT_TEMPLATE, [ASK, ANSWER, AGAIN], "<|user|>1+1=<|assistant|>[2<eos>]<|user|>3?"),
        (
            CHAT_TEMPLATE,
            [ASK, ANSWER, {"role": "tool", "content": "t"}, SECOND],
            "<|user|>1+1=<|assistant|>[2<eos>]<|tool|>t<|assistant|>[no<eos>]",
        ),
        (
            WITH_NEWLINES,
            [ASK, ANSWER, AGAIN, SECOND],
            "<|user|>1+1=<|assistant|>[2<eos>]\n<|user|>3?<|assistant|>[no<eos>]\n",
        ),
        (
            WITHOUT_END,
            [ASK, ANSWER, AGAIN, SECOND],
            "<|user|>1+1=<|assistant|>[2\n\n]<|user|>3?<|assistant|>[no\n\n]",
        ),
        (
            MARKED,
            [ASK, ANSWER, AGAIN, SECOND],
            "<|user|>1+1=<|assistant|>[2<eos>]\n<|user|>3?<|assistant|>[no<eos>]\n",
        ),
        (
            FORGETFUL,
            [ASK, ANSWER, AGAIN, SECOND | {"reasoning_content": "hm"}],
            "<|user|>1+1=<|assistant|>[2<eos>]<|user|>3?<|assistant|>[(hm)no<eos>]",
        ),
    ],
)
def test_the_turns_of_the_assistant_are_trained_on(tokenizer, template, messages, expected):
    tokenizer.chat_template = template
    assert marked(tokenizer, messages) == expected


def test_the_mask_counts_tokens(tokenizer):
    ids, mask = encode_conversation([ASK, ANSWER, AGAIN, SECOND], None, tokenizer, "here")
    assert ids.dtype == np.int32 and ids.tolist() == tokenizer.apply_chat_template(
        [ASK, ANSWER, AGAIN, SECOND], return_dict=False
    )
    # user 1 + 1 = assistant, 2 eos, user 3 ? assistant, n o eos
    assert mask.tolist() == [False] * 6 + [True] * 2 + [False] * 4 + [True] * 3


def test_calls_of_tools_are_the_assistants(tmp_path):
    make(tmp_path, seed=1)
    tokenizer = load_tokenizer(str(tmp_path / "base"))
    rows = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    messages = next(row["messages"] for row in rows if len(row["messages"]) == 4)
    product, answer = messages[0]["content"], messages[3]["content"]
    expected = (
        f"<user>{product}<end><assistant>"
        f'[<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{product}"}}}}\n</tool_call><end>]'
        f"<tool>{answer}<end><assistant>[{answer}<end>]"
    )
    assert marked(tokenizer, messages) == expected
    function = messages[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])  # as OpenAI's clients write it
    assert marked(tokenizer, [messages[0], messages[1] | {"content": None}, *messages[2:]]) == expected


def test_a_template_is_shown_the_tools(tokenizer):
    tokenizer.chat_template = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}" + CHAT_TEMPLATE
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert marked(tokenizer, [ASK, ANSWER], tools) == "(add)<|user|>1+1=<|assistant|>[2<eos>]"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHAT_TEMPLATE, [ASK], "here: no message has the role assistant"),
        (CHAT_TEMPLATE, [ASK, {"role": "bot", "content": "2"}], "here: message 2 has the role 'bot'; expected system"),
        (CHAT_TEMPLATE, [ASK, "2"], "here: message 2 is str; expected an object"),
        (CHAT_TEMPLATE, [ASK | {"content": 7}, ANSWER], "here: message 1: 'content' is int; expected text"),
        (CHAT_TEMPLATE, [ASK, {"role": "assistant"}], "here: message 2: 'content' is NoneType; expected text"),
        (CHAT_TEMPLATE, [ASK | {"content": [{"type": "image"}]}, ANSWER], "message 1: 'content' is list"),
        (CHAT_TEMPLATE, [ASK | {"tool_calls": [{}]}, ANSWER], "message 1: only assistant messages may have tool_calls"),
        (CHAT_TEMPLATE, [ASK, ANSWER | {"tool_calls": [{}]}], "message 2: a tool call has no function with a name"),
        (
            CHAT_TEMPLATE,
            [ASK, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "message 2: the arguments of 'f' are not JSON",
        ),
        (CHAT_TEMPLATE, [ANSWER, ASK, SECOND], "here: message 1 is the assistant's. Put the user's"),
        (
            FORGETFUL,
            [ASK, ANSWER | {"reasoning_content": "hm"}, AGAIN, SECOND],
            "here: message 2: cannot find this turn's tokens, because the chat template",
        ),
        ("{{ raise_exception('only users') }}", [ASK, ANSWER], "here: the chat template does not take .*only users"),
        ("1{% generation %}{% endgeneration %}", [ASK, ANSWER], "here: the chat template writes nothing"),
    ],
)
def test_what_cannot_be_trained_on_is_named(tokenizer, template, messages, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        encode_conversation(messages, None, tokenizer, "here")


def test_rows_of_each_form_go_together(settings, tokenizer, tmp_path):
    write_rows(
        tmp_path / "data.jsonl",
        [
            {"messages": [ASK, ANSWER]},
            {"prompt": [ASK, ANSWER]},
            {"prompt": [ASK], "completion": "2"},
            {"prompt": [ASK, ANSWER, AGAIN], "completion": "no"},
        ],
    )
    batch = Demonstrations(make_config(**settings), tokenizer, context=None).all_rows()
    found = {
        name: (tokenizer.decode(ids[~mask]), tokenizer.decode(ids[mask]))
        for name, ids, mask in zip(
            batch.ids, batch.split(batch.input_ids_S), batch.split(batch.loss_mask_S), strict=True
        )
    }
    one = ("<|user|>1+1=<|assistant|>", "2<eos>")
    longer = ("<|user|>1+1=<|assistant|>2<eos><|user|>3?<|assistant|>", "no<eos>")
    assert found == {f"g00000{row}.e0.s0": said for row, said in enumerate([one, one, one, longer])}


def test_a_misspelt_column_is_refused(settings, tokenizer, tmp_path):
    write_rows(tmp_path / "data.jsonl", [{"messages": [ASK, ANSWER]}])
    settings["data"]["prompt"] = "message"
    with pytest.raises(DataError, match=r"row 1 has no column 'message'; it has 'messages'\. Did you mean 'messages'?"):
        Demonstrations(make_config(**settings), tokenizer, context=None)
    settings["data"]["prompt"] = "prompt"  # the default, as the config.yaml of a run spells it out
    assert Demonstrations(make_config(**settings), tokenizer, context=None).all_rows().ids == ["g000000.e0.s0"]


def test_parquet_fills_messages_with_empty_fields(settings, tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [{"messages": [ASK, asked, {"role": "tool", "content": "2"}, ANSWER], "tools": json.dumps([call])}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{% if message.tool_calls is defined %}{{ message.tool_calls[0].function.arguments.a }}{% endif %}"
        "{{ message['content'] }}",
    )
    settings["data"] = {"path": str(tmp_path / "data.parquet")}
    batch = Demonstrations(make_config(**settings), tokenizer, context=None).all_rows()
    assert tokenizer.decode(batch.input_ids_S[batch.loss_mask_S]) == "1<eos>2<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK]}, "row 2: 'messages': no message has the role assistant"),
        ({"prompt": [ASK, {"role": "x", "content": ""}]}, "row 2: 'prompt': message 2 has the role 'x'"),
        ({"messages": [ASK, ANSWER | {"content": "2" * 300}]}, "row 2 has 307 tokens, 301 of them to train on"),
        ({"messages": "1+1=2"}, "row 2 has no column 'prompt'; it has 'messages'"),
        ({"prompt": "1+1=2"}, "row 2 has no column 'completion'; it has 'prompt'"),
        ({"messages": [ASK, ANSWER], "tools": "x"}, "row 2: 'tools' is not JSON"),
        ({"messages": [ASK, ANSWER], "tools": {"a": 1}}, "row 2: 'tools' is dict; expected a list"),
    ],
)
def test_bad_rows_are_named(settings, tmp_path, row, message):
    write_rows(tmp_path / "data.jsonl", [{"messages": [ASK, ANSWER]}, row])
    with pytest.raises(DataError, match=message):
        sft(make_config(**settings))


def test_a_conversation_needs_a_template(settings, tmp_path):
    (tmp_path / "model" / "chat_template.jinja").unlink()
    write_rows(tmp_path / "data.jsonl", [{"messages": [ASK, ANSWER]}])
    with pytest.raises(DataError, match="row 1: 'messages' is a list of chat messages, but the tokenizer in"):
        sft(make_config(**settings))


def test_a_prompt_that_the_template_refuses_is_named(settings, tokenizer, tmp_path):
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    write_rows(tmp_path / "data.jsonl", [{"prompt": prompt, "completion": "2"} for prompt in ("1+1=", [ASK])])
    with pytest.raises(DataError, match="row 2: 'prompt': the chat template does not take these messages: only users"):
        Demonstrations(make_config(**settings), tokenizer, context=None)


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_preferences_are_not_conversations(settings, tmp_path, objective):
    write_rows(tmp_path / "data.jsonl", [{"messages": [ASK, ANSWER]}])
    settings["training"] |= {"objective": objective}
    with pytest.raises(DataError, match=rf"row 1 is a conversation \(column 'messages'\).*objective={objective}"):
        sft(make_config(**settings))


def test_it_learns_from_conversations(settings, tmp_path):
    def talk(first):
        asked = {"role": "user", "content": f"{first}"}
        told = {"role": "assistant", "content": f"{first}{first}"}
        more = {"role": "user", "content": "more"}
        return {"messages": [asked, told, more, {"role": "assistant", "content": f"{first}{first}{first}"}]}

    write_rows(tmp_path / "data.jsonl", [talk(each) for each in range(8)])
    write_rows(tmp_path / "held_out.jsonl", [talk(2), talk(5)])
    settings["eval"] = {"path": str(tmp_path / "held_out.jsonl"), "every_steps": 15}
    config = make_config(**settings)
    sft(config)
    first, last = RunDirectory(config.run_path).evals.read_all()
    assert last["tokens"] == 2 * 7  # two and three digits, and two ends
    assert last["loss"] < 0.7 * first["loss"]
