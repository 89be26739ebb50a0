"""Nobody notifies a producer. The pool that tokenized the rows was closed long before, which ended its workers."""

import multiprocessing
import queue
import threading


def tokenize(row: int) -> list[int]:
    return [row] * 4


def produce(rows: list[list[int]], rollouts: queue.Queue, room: threading.Condition) -> None:
    for number, row in enumerate(rows):
        if number == 20:
            with room:
                room.wait()
        rollouts.put(row)


def main() -> None:
    with multiprocessing.Pool(3) as pool:
        rows = pool.map(tokenize, range(30))
    rollouts: queue.Queue = queue.Queue()
    threading.Thread(target=produce, args=(rows, rollouts, threading.Condition()), daemon=True).start()
    print("ready", flush=True)
    for _ in range(30):
        rollouts.get()


if __name__ == "__main__":
    main()
