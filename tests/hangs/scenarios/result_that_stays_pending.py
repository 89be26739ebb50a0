"""A client ignores that its job was refused, and asks for the result again and again. The server has nothing to do."""

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

JOBS: dict[str, str] = {}


class Handler(BaseHTTPRequestHandler):
    def answer(self, code: int, value: dict) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_POST(self) -> None:
        name = self.path.rpartition("/")[2]
        refused = name.startswith("3-")
        if not refused:
            threading.Timer(0.2, JOBS.__setitem__, (name, "done")).start()
        self.answer(500 if refused else 200, {})

    def do_GET(self) -> None:
        self.answer(200, {"state": JOBS.get(self.path.rpartition("/")[2], "pending")})

    def log_message(self, *_: object) -> None:
        pass


def serve(connection: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()


class Client:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def submit(self, name: str) -> str:
        with suppress(urllib.error.HTTPError):
            self.open(f"{self.url}/jobs/{name}", data=b"{}")
        return name

    def collect(self, names: list[str]) -> int:
        waiting, done = set(names), {}
        while waiting:
            for name in sorted(waiting):
                reply = json.load(self.open(f"{self.url}/jobs/{name}"))
                if reply["state"] == "done":
                    done[name] = reply
                    waiting.discard(name)
            if waiting:
                time.sleep(0.1)
        return len(done)


if __name__ == "__main__":
    ours, theirs = Pipe()
    Process(target=serve, args=(theirs,), daemon=True).start()
    client = Client(ours.recv())
    for step in range(100):
        if step == 3:
            print("ready", flush=True)
        client.collect([client.submit(f"{step}-{n}") for n in range(4)])
