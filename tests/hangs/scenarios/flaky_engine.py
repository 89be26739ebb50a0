"""No hang: three of four requests fail, and the client tries again."""

import http.server
import itertools
import threading
import time
import urllib.error
import urllib.request

count = itertools.count()


class Sometimes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = 200 if next(count) % 4 == 3 else 503
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *a):
        return


srv = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sometimes)
threading.Thread(target=srv.serve_forever, daemon=True).start()


def fetch(i):
    attempts = 0
    while 1:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{srv.server_port}/{i}").read()
            return
        except urllib.error.HTTPError:
            attempts += 1
            time.sleep(0.3)


print("ready", flush=True)
for i in range(10000):
    fetch(i)
