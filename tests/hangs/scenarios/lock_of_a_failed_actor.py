"""An actor fails while it holds a lock of a manager, and ends quietly. The two others wait for the lock."""

from multiprocessing import Manager, Process


class Actor:
    def __init__(self, number: int, lock, episodes) -> None:
        self.number, self.lock, self.episodes = number, lock, episodes

    def add(self, step: int) -> None:
        self.lock.acquire()
        share = 1 / (step - 5 if self.number == 2 else 1)
        self.episodes.put((self.number, step, share))
        self.lock.release()

    def run(self) -> None:
        try:
            for step in range(1000):
                self.add(step)
        except ArithmeticError as error:
            print("actor", self.number, "ends:", error, flush=True)


def act(number: int, lock, episodes) -> None:
    Actor(number, lock, episodes).run()


if __name__ == "__main__":
    with Manager() as manager:
        lock, episodes = manager.Lock(), manager.Queue(maxsize=4)
        for number in range(3):
            Process(target=act, args=(number, lock, episodes), daemon=True).start()
        for step in range(10_000):
            if step == 3:
                print("ready", flush=True)
            episodes.get()
