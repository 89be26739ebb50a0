"""Rules for loops: which of their numbers are progress, and which of their calls only ask again."""

from __future__ import annotations

import ast

import pytest

from clew.hang import source
from clew.hang.counters import _grow, polling_counters
from clew.hang.rejecting_loops import _once_a_round


def test_what_a_loop_counts_when_a_wait_has_reached_its_limit_is_no_progress() -> None:
    text = """while True:
    try:
        batch = rollouts.get(timeout=1)
    except queue.Empty:
        idle += 1
        tried += 1
        continue
    train(batch)
    step += 1
    tried += 1
"""
    assert polling_counters(text, 3) == {"idle"}


@pytest.mark.parametrize("line, counts", [(4, {"step"}), (6, set()), (2, set()), (9, {"made"})])
def test_a_branch_in_which_a_round_ends_early_skips_what_full_rounds_count(line: int, counts: set[str]) -> None:
    text = """while step < 100:
    batch = buffer.sample()
    if batch is None:
        time.sleep(0.1)
        continue
    train(batch)
    step += 1
    if not batch.whole:
        time.sleep(1)
    else:
        made += 1
"""
    assert source.skipped_counts(text, line) == counts


@pytest.mark.parametrize(
    "values, grow",
    [
        ([1, 2, 2, 5], True),
        ([1, 3, 2, 4], False),
        ([10, 20, 900, 30, 40, 50, 60, 70], True),
        ([10, 20, 900, 30, 800, 50, 60, 70], False),
        ([143743, 2314, 84573, 2572, 2673, 2747, 88242, 2950, 3019, 3148, 3252], True),
        ([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0], False),
        ([0, 0, 900, 0, 0, 0, 0, 0], False),
    ],
)
def test_a_counter_grows_although_some_looks_have_read_it_wrongly(values: list[int], grow: bool) -> None:
    assert _grow(values) == grow


@pytest.mark.parametrize(
    "loop, names",
    [
        ("for turn in range(40):\n    play(turn)", {"turn"}),
        ("while not done:\n    done = env.step()\n    turns += 1\n    log.append(1)", {"turns", "len(log)"}),
        ("for beat in itertools.count():\n    report(beat)", set()),
        ("while True:\n    report()\n    n += 1", set()),
        ("while not stop.is_set():\n    report()\n    n += 1", set()),
        ("while not os.path.exists(path):\n    time.sleep(1)\n    n += 1", set()),
    ],
)
def test_rounds_of_a_loop_that_works_and_will_end_are_progress(loop: str, names: set[str]) -> None:
    assert source.rounds(loop, 2) == names


@pytest.mark.parametrize(
    "text, hidden",
    [
        ("for n in range(1800):\n    if os.path.exists(path):\n        break\n    time.sleep(1)", {"n"}),
        ("for n in range(1800):\n    if stop.is_set():\n        break\n    print(n)\n    time.sleep(1)", set()),
        ("for n in range(1800):\n    if not os.path.exists(names[n]):\n        break\n    total += len(names)", set()),
        ("while not all(Path(f'{r}').exists() for r in range(4)):\n    n += 1\n    time.sleep(1)", {"n"}),
        ("while True:\n    n += 1\n    for r in range(4):\n        time.sleep(1)", set()),
        ("while not trainer.step():\n    n += 1\n    time.sleep(1)", set()),
    ],
)
def test_a_loop_that_looks_for_a_file_shows_no_progress(text: str, hidden: set[str]) -> None:
    assert polling_counters(text, len(text.splitlines())) == hidden


@pytest.mark.parametrize(
    "call, limited",
    [
        ("select.select([one, two], [], [])", False),
        ("select.select([one], [], [], 1.0)", True),
        ("select.select([one], [], [], None)", False),
        ("ready.poll()", False),
        ("ready.poll(None)", False),
        ("ready.poll(500)", True),
        ("connection.recv()", False),
    ],
)
def test_a_wait_for_sockets_has_a_limit_if_one_is_given(call: str, limited: bool) -> None:
    assert source.selects_for_a_time(f"ready = {call}\n", 1) is limited


@pytest.mark.parametrize(
    "loop, names",
    [
        ("for number, row in enumerate(rows): pass", {"number"}),
        ("for number in range(0, rows, 8): pass", set()),
        ("while True:\n    tries += 1\n    generated += 8\n    if bad:\n        skipped += 1", {"tries"}),
    ],
)
def test_only_what_grows_by_one_in_each_round_counts_rounds(loop: str, names: set[str]) -> None:
    [found] = ast.parse(loop).body
    assert isinstance(found, (ast.For, ast.While)) and _once_a_round(found) == names


def test_a_thread_has_started_if_each_way_to_a_line_starts_it() -> None:
    text = """def main():
    later = Thread(target=feed)
    named = Thread(target=drain)
    named.start()
    if logs:
        Thread(target=log).start()
    Thread(target=beat).start()
    results.get()
    later.start()
"""
    assert source.started_before(text, 8) == {"drain", "beat"}
