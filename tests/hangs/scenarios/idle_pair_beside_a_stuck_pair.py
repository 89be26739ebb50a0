"""One of three workers asks its program without a flush, so both wait; the other workers wait for their next order."""

import json
import multiprocessing as mp
import subprocess
import sys

PROGRAM = "import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)\n"


class Client:
    """A program at a pair of pipes, which answers each line."""

    def __init__(self):
        self.program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, order, flush):
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write(json.dumps(order) + "\n")
        if flush:
            self.program.stdin.flush()
        line = self.program.stdout.readline()
        return json.loads(line)


def work(link, number):
    client = Client()
    while True:
        order = link.recv()
        link.send(client.ask(order, flush=number != 1 or order["step"] < 3))


if __name__ == "__main__":
    links = []
    for number in range(3):
        ours, theirs = mp.Pipe()
        links.append(ours)
        mp.Process(target=work, args=(theirs, number), daemon=True).start()
    for step in range(100):
        for link in links:
            link.send({"step": step})
        if step == 3:
            print("ready", flush=True)
        answers = [link.recv() for link in links]
