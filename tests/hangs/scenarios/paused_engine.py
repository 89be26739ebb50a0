"""An HTTP engine stays paused, and its client waits for an answer."""

import http.server
import multiprocessing as mp
import threading
import urllib.request

RESUMED = threading.Event()


class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        RESUMED.wait()
        self.send_response(200)
        self.end_headers()


def serve(ports):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    ports.put(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    ports = mp.Queue()
    mp.Process(target=serve, args=(ports,), daemon=True).start()
    port = ports.get()
    print("ready", flush=True)
    urllib.request.urlopen(f"http://127.0.0.1:{port}/generate").read()
