"""The inference server is stopped by a signal, and the trainer waits for its answer."""

import multiprocessing as mp
import os
import signal
import socket


def serve(ports):
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    connection, _ = listener.accept()
    os.kill(os.getpid(), signal.SIGSTOP)
    connection.close()


if __name__ == "__main__":
    ports = mp.Queue()
    mp.Process(target=serve, args=(ports,), daemon=True).start()
    connection = socket.create_connection(("127.0.0.1", ports.get()))
    print("ready", flush=True)
    connection.recv(1)
