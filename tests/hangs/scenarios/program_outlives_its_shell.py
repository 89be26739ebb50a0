"""A tool's shell is killed at its deadline, and what it has started keeps its pipe open."""

import subprocess


class Sandbox:
    def run(self, script):
        shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            return shell.communicate(timeout=0.5)[0]
        except subprocess.TimeoutExpired:
            shell.kill()
            return shell.communicate()[0]


sandbox = Sandbox()
print("ready", sandbox.run("echo 4"), flush=True)
sandbox.run("sleep 600 & wait")
