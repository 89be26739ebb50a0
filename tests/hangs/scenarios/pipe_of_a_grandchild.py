"""A thread reads the output of a program that has ended, while a program that it started keeps the pipe open."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

PLAIN = "print(1)"
STARTS = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"


def run(code):
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    program.wait()
    assert program.stdout is not None
    said = program.stdout.read()
    return said.strip()


with ThreadPoolExecutor(2) as pool:
    print(list(pool.map(run, [PLAIN, PLAIN])), flush=True)
    print("ready", flush=True)
    print(list(pool.map(run, [PLAIN, STARTS])), flush=True)
