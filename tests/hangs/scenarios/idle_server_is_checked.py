"""Nobody asks a reward server for scores yet. Its launcher asks now and then whether it is well: not a hang."""

import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Job:
    def __init__(self, text):
        self.text, self.done, self.score = text, threading.Event(), 0.0


inbox = queue.Queue()


def score_in_batches():
    while True:
        batch = [inbox.get()]
        while len(batch) < 8 and not inbox.empty():
            batch.append(inbox.get())
        for job in batch:
            job.score = float(len(job.text))
            job.done.set()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        job = Job(self.rfile.read(int(self.headers["Content-Length"])).decode())
        inbox.put(job)
        job.done.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(job.score).encode())

    def log_message(self, format, *args):
        pass


def serve(port):
    threading.Thread(target=score_in_batches, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def look_after_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen([sys.executable, __file__, port])
    said = False
    while True:
        time.sleep(2)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            if not said:
                said = True
                print("ready", flush=True)
        except OSError as error:
            print("not well:", error, flush=True)
            if server.poll() is not None:
                server = subprocess.Popen([sys.executable, __file__, port])


if len(sys.argv) > 1:
    serve(int(sys.argv[1]))
else:
    look_after_server()
