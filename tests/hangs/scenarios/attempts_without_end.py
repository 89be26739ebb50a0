"""A client retries a billion times. Its engine, which a shell started, answers every request with 503."""

import http.server
import subprocess
import sys
import time
import urllib.error
import urllib.request


class Busy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503)

    def log_message(self, *args):
        pass


def serve():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    print(server.server_port, flush=True)
    server.serve_forever()


def ask(url, attempts=10**9):
    pause = 0.1
    for _ in range(attempts):
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 1.5)
    raise TimeoutError(url)


if len(sys.argv) > 1:
    serve()
else:
    engine = subprocess.Popen(
        ["sh", "-c", f"'{sys.executable}' '{__file__}' serve; true"], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout
    port = engine.stdout.readline().strip()
    print("ready", flush=True)
    ask(f"http://127.0.0.1:{port}/")
