"""A producer has ended, and the consumer counts for how many seconds it has waited."""

import queue
import threading


def produce(rollouts: queue.Queue) -> None:
    for number in range(20):
        rollouts.put(number)


def main() -> None:
    rollouts: queue.Queue = queue.Queue()
    threading.Thread(target=produce, args=(rollouts,), daemon=True).start()
    print("ready", flush=True)
    step = idle = 0
    while True:
        try:
            rollout = rollouts.get(timeout=1)
        except queue.Empty:
            idle += 1
            print(f"no rollout for {idle} s", flush=True)
            continue
        step += 1
        print(f"step {step} on rollout {rollout}", flush=True)


if __name__ == "__main__":
    main()
