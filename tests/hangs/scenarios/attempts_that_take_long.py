"""A client waits for its engine to become healthy. The engine accepts connections but never answers."""

import socket
import threading
import time
import urllib.request


class Engine:
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.taken = None

    def run(self):
        while True:
            self.taken = self.listener.accept()


def until_healthy(url):
    tries = 0
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                return answer.status
        except OSError:
            tries += 1
            time.sleep(0.6)


engine = Engine()
threading.Thread(target=engine.run, daemon=True).start()
print("ready", flush=True)
until_healthy(engine.url)
print("healthy", flush=True)
