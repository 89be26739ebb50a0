"""No hang: an idle service. Its forked workers share its socket, and the master waits for one to end."""

import multiprocessing as mp
import os
import socket


def serve(listening):
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(connection.recv(100))


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    workers = [mp.Process(target=serve, args=(listening,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    print("ready", flush=True)
    while True:
        print("a worker has ended:", os.wait(), flush=True)
