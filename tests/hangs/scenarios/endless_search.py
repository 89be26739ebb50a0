"""A search for a temperature ends only if the error is below 0: its bounds meet, and it goes on."""

import math

logits = [0.1 * i for i in range(50)]


def entropy(t):
    z = [math.exp(x / t) for x in logits]
    s = sum(z)
    return -sum(p / s * math.log(p / s) for p in z)


def find_temperature(target, tol=0.0):
    lo, hi = 0.05, 20.0
    while True:
        mid = (lo + hi) / 2
        h = entropy(mid)
        err = h - target
        if abs(err) <= tol - 1e-300:
            return mid
        if err < 0:
            lo = mid
        else:
            hi = mid


print("ready", flush=True)
print(find_temperature(2.5))
