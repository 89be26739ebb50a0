"""A single-threaded server is stuck on rank 0's idle connection. Rank 1 gets no answer; rank 0 waits for rank 1."""

import http.client
import http.server
import multiprocessing

import torch
import torch.distributed as dist


class Scores(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *args):
        pass


def serve(port):
    server = http.server.HTTPServer(("127.0.0.1", 0), Scores)
    port.put(server.server_port)
    server.serve_forever()


def score(connection):
    connection.request("GET", "/")
    return connection.getresponse().read()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    port = [0]
    if dist.get_rank() == 0:
        context = multiprocessing.get_context("spawn")
        ports = context.Queue()
        context.Process(target=serve, args=(ports,), daemon=True).start()
        port = [ports.get()]
    dist.broadcast_object_list(port, src=0)
    connection = http.client.HTTPConnection("127.0.0.1", port[0])
    if dist.get_rank() == 0:
        score(connection)
    dist.barrier()
    print("ready", flush=True)
    if dist.get_rank() == 1:
        score(connection)
    dist.all_reduce(torch.ones(1))
