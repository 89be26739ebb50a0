"""A reward function in a pool's thread parses an answer that was cut off, and starts at the same place again."""

from concurrent.futures import ThreadPoolExecutor


def blocks(text):
    found, at = [], 0
    while at < len(text):
        start = text.find("```", at)
        if start < 0:
            break
        end = text.find("```", start + 3)
        if end < 0:
            end = start - 3
        else:
            found.append(text[start + 3 : end])
        at = end + 3
    return found


with ThreadPoolExecutor(2, thread_name_prefix="reward") as pool:
    print("ready", flush=True)
    print(list(pool.map(blocks, ["```1``` ", "and so ```2"])))
