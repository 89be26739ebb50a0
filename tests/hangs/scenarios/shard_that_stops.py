"""A store that rank 0 has started sends half a shard, and the data loader of rank 1 waits for the rest."""

import http.client
import multiprocessing as mp
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class Store(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "400")
        self.end_headers()
        self.wfile.write(bytes(200 if self.path == "/1" else 400))
        if self.path == "/1":
            time.sleep(3600)

    def log_message(self, *args):
        pass


def serve(port):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    Thread(target=server.serve_forever, daemon=True).start()
    port.send(server.server_port)
    time.sleep(3600)


class Shards(IterableDataset):
    def __init__(self, port, rank):
        self.port, self.rank = port, rank

    def __iter__(self):
        for _ in range(100):
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", f"/{self.rank}")
            answer = connection.getresponse()
            while rows := answer.read(100):
                yield torch.tensor(len(rows))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    box = [None]
    if dist.get_rank() == 0:
        here, there = mp.Pipe()
        mp.get_context("spawn").Process(target=serve, args=(there,), daemon=True).start()
        box = [here.recv()]
    dist.broadcast_object_list(box, src=0)
    print("ready", flush=True)
    for rows in DataLoader(Shards(box[0], dist.get_rank()), batch_size=1, num_workers=1):
        dist.all_reduce(rows)
