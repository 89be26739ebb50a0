"""No hang: one request takes minutes, and a thread of the server computes one token after the other for it."""

import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        torch.set_num_threads(1)
        weights, values = torch.randn(800, 800), torch.randn(8, 800)
        for _token in range(10**9):
            values = torch.nn.functional.normalize(values @ weights)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
        print(server.server_port, flush=True)
        server.serve_forever()
    engine = subprocess.Popen([sys.executable, __file__, "engine"], stdout=subprocess.PIPE, text=True)
    assert engine.stdout
    port = int(engine.stdout.readline())
    print("ready", flush=True)
    urllib.request.urlopen(f"http://127.0.0.1:{port}/generate").read()
