"""A coroutine blocks its event loop with the result of another coroutine on the same loop."""

import asyncio


async def price(text: str) -> float:
    await asyncio.sleep(0.01)
    return float(len(text))


def price_now(loop: asyncio.AbstractEventLoop, text: str) -> float:
    return asyncio.run_coroutine_threadsafe(price(text), loop).result()


async def rollout(number: int) -> float:
    loop, total = asyncio.get_running_loop(), 0.0
    for turn in range(1_000):
        total += await asyncio.to_thread(price_now, loop, "a" * turn)
        if number == 3 and turn == 20:
            print("ready", flush=True)
            total += price_now(loop, "last")
        await asyncio.sleep(0.01)
    return total


async def main() -> None:
    await asyncio.gather(*(rollout(number) for number in range(6)))


asyncio.run(main())
