"""A trainer waits for an engine's answer before it broadcasts; the engine answers only after the broadcast."""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ended = threading.Event()


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/update":
            dist.broadcast(torch.zeros(4), src=0)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": 1}).encode())

    def log_message(self, format, *args):
        pass


ports: list = [None] * dist.get_world_size()
server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
dist.all_gather_object(ports, server.server_port)
print("ready", flush=True)
if rank == 0:
    for port in ports[1:]:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/update").read()
    dist.broadcast(torch.ones(4), src=0)
else:
    ended.wait()
