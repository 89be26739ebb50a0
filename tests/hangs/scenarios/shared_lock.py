"""No hang: four threads take turns with a lock that each holds for a second."""

import threading
import time

lock = threading.Lock()


def work(done):
    while True:
        with lock:
            time.sleep(1)
            done.append(1)
        time.sleep(0.01)


threads = [threading.Thread(target=work, args=([],)) for _ in range(4)]
print("ready", flush=True)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
