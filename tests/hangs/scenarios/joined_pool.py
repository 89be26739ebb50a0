"""The main thread joins a pool, one of whose workers waits for a connection that never sends."""

import multiprocessing
import socket


def score(number: int) -> int:
    if number == 5:
        ours, theirs = socket.socketpair()
        ours.recv(1)
        theirs.close()
    return number


def main() -> None:
    pool = multiprocessing.Pool(3)
    for number in range(12):
        pool.apply_async(score, (number,))
    pool.close()
    print("ready", flush=True)
    pool.join()


if __name__ == "__main__":
    main()
