"""A server cannot load its model and says 503, and the trainer asks until it says 200."""

import multiprocessing as mp
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503, "the model is not loaded")

    def log_message(self, *args):
        pass


def serve(port):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    port.put(server.server_port)
    server.serve_forever()


def status(url):
    try:
        return urllib.request.urlopen(url).status
    except urllib.error.HTTPError as error:
        return error.code


def wait_until_ready(url):
    while True:
        if status(url) == 200:
            return
        time.sleep(0.5)


if __name__ == "__main__":
    port = mp.Queue()
    mp.Process(target=serve, args=(port,), daemon=True).start()
    print("ready", flush=True)
    wait_until_ready(f"http://127.0.0.1:{port.get()}/health")
