"""No hang: a server in a thread that nobody calls, idle workers, and a main thread that only logs."""

import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

jobs = queue.Queue()


def work():
    while True:
        print("done", jobs.get(), flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        jobs.put(self.path)
        self.send_response(200)
        self.end_headers()


for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(30)
    print("waiting jobs:", jobs.qsize(), flush=True)
