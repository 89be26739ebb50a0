"""The rollout's admission waits for a version, and the trainer for a batch."""

import threading
import time

changed = threading.Condition()
state = {"version": 0, "groups": 0}


def rollout():
    while True:
        with changed:
            changed.wait_for(lambda: state["groups"] < 2)
            state["groups"] += 1
            changed.notify_all()


threading.Thread(target=rollout, daemon=True).start()
time.sleep(0.1)
print("ready", flush=True)
with changed:
    changed.wait_for(lambda: state["groups"] >= 4)
