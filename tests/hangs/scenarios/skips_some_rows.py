"""No hang: a loop counts the rows that it skips, and trains on each third."""

import itertools
import time


def train(row: int) -> float:
    time.sleep(0.2)
    return 1.0 / row


def main() -> None:
    skipped = 0
    for number, row in enumerate(itertools.count(1)):
        if row % 3:
            skipped += 1
            continue
        loss = train(row)
        if number % 9 == 0:
            print(f"loss {loss}", flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    main()
