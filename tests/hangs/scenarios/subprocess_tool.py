"""An agent's tool is a program that never ends."""

import subprocess


def run_tool():
    return subprocess.run(["sleep", "3600"], capture_output=True)


print("ready", flush=True)
run_tool()
