"""A trainer asks its engine to join a store and awaits the answer, but opens that store only afterwards."""

import datetime
import multiprocessing
import socket
import time
import urllib.request

import uvicorn
from fastapi import FastAPI
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

WAIT = datetime.timedelta(seconds=900)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def serve(port):
    app = FastAPI()

    @app.get("/health")
    def health():
        return {}

    @app.post("/init_group")
    def init_group(address: int):
        return {"size": TCPStore("127.0.0.1", address, 2, False, timeout=WAIT).num_keys()}

    uvicorn.run(app, port=port, log_level="error")


def connect(port, address):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/init_group?address={address}", method="POST")
    urllib.request.urlopen(request, timeout=900).read()
    return TCPStore("127.0.0.1", address, 2, True, timeout=WAIT)


if __name__ == "__main__":
    port = free_port()
    multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True).start()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            break
        except OSError:
            time.sleep(0.1)
    print("ready", flush=True)
    connect(port, free_port())
