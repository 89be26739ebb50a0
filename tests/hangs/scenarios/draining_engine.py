"""An engine answers 503 forever; its client counts its attempts."""

import http.server
import json
import multiprocessing
import time
import urllib.error
import urllib.request


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({"error": "draining"}).encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def serve(conn):
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    conn.send(httpd.server_port)
    httpd.serve_forever()


class Client:
    def __init__(self, base):
        self.base, self.stats = base, {"retries": 0, "completions": 0}

    def complete(self, prompt):
        delay = 0.05
        while True:
            try:
                req = urllib.request.Request(
                    self.base + "/v1/completions", data=json.dumps({"prompt": prompt}).encode()
                )
                with urllib.request.urlopen(req, timeout=5) as r:
                    self.stats["completions"] += 1
                    return json.load(r)
            except urllib.error.HTTPError:
                self.stats["retries"] += 1
                time.sleep(delay)
                delay = min(delay * 2, 0.4)


if __name__ == "__main__":
    a, b = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=(b,), daemon=True).start()
    c = Client(f"http://127.0.0.1:{a.recv()}")
    print("ready", flush=True)
    for i in range(100):
        c.complete(f"question {i}")
