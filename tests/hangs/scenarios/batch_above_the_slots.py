"""A batch of 16 is wanted from workers that have ten slots, given back when a batch is taken; a heartbeat counts on."""

import asyncio
import threading

SLOTS, LATER = 10, 3


class Rollout:
    def __init__(self):
        self.loop, self.done, self.beats = asyncio.new_event_loop(), [], 0
        self.started = threading.Event()
        threading.Thread(target=self.run, name="rollout", daemon=True).start()
        self.started.wait()

    def run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.main())

    async def main(self):
        self.slots, self.grown = asyncio.Semaphore(SLOTS), asyncio.Condition()
        self.started.set()
        await asyncio.gather(self.beat(), *(self.work() for _ in range(12)))

    async def beat(self):
        while True:
            self.beats += 1
            await asyncio.sleep(0.25)

    async def work(self):
        while True:
            await self.slots.acquire()
            await asyncio.sleep(0.02)
            async with self.grown:
                self.done.append(1.0)
                self.grown.notify_all()

    async def take(self, count):
        async with self.grown:
            await self.grown.wait_for(lambda: len(self.done) >= count)
            batch, self.done = self.done[:count], self.done[count:]
        for _ in batch:
            self.slots.release()
        return batch

    def next_batch(self, count):
        return asyncio.run_coroutine_threadsafe(self.take(count), self.loop).result()


rollout = Rollout()
for step in range(100):
    batch = rollout.next_batch(6 if step < LATER else 16)
    print("ready" if step == LATER - 1 else f"step {step}", flush=True)
