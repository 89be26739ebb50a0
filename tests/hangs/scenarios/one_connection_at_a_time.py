"""A server without threads waits for the next request on a connection that its client keeps, while another one asks."""

import http.client
import http.server
import multiprocessing


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


def ask(connection):
    connection.request("GET", "/")
    return connection.getresponse().read()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    context.Process(target=serve, args=(port,), daemon=True).start()
    number = port.get()
    trainer, evaluator = (http.client.HTTPConnection("127.0.0.1", number) for _ in range(2))
    ask(trainer)
    print("ready", flush=True)
    ask(evaluator)
