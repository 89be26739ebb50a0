"""Start of `make gpu`: names every package that is missing, then measures. Nothing is installed or downloaded."""

import sys
from importlib.metadata import PackageNotFoundError, version

NEEDED = {
    "torch": (2, 11),
    "transformers": (5, 0),
    **dict.fromkeys(("numpy", "pyarrow", "safetensors", "jinja2", "pillow", "aiohttp"), (0, 0)),
    **dict.fromkeys(("pydantic", "omegaconf", "orjson", "fastapi", "uvicorn"), (0, 0)),
}
"""Packages that the script uses, and their lowest versions."""


def missing() -> list[str]:
    """Return the packages of NEEDED that this Python lacks or has in too old a version."""
    found = [] if sys.version_info >= (3, 11) else [f"python >= 3.11 (this is {sys.version.split()[0]})"]
    for name, lowest in NEEDED.items():
        wanted = f"{name} >= {lowest[0]}.{lowest[1]}" if any(lowest) else name
        try:
            has = version(name)
        except PackageNotFoundError:
            found.append(wanted)
            continue
        if tuple(int(part) for part in has.split(".")[:2]) < lowest:
            found.append(f"{wanted} (this is {has})")
    return found


def message(lacking: list[str]) -> str:
    """Return what is missing, and how to bring it."""
    return (
        f"make gpu cannot run: {sys.executable} lacks {', '.join(lacking)}.\n"
        f"Where there is a network, for the same Python and processor:\n"
        f"  python3 -m pip install --target wheels {' '.join(name.split()[0] for name in lacking)}\n"
        f"Remove torch and nvidia-* from that folder if they came along, bring it here, and run:\n"
        f"  PYTHONPATH=wheels make gpu\n"
        f"Another Python: make gpu PYTHON=.venv/bin/python"
    )


if __name__ == "__main__":
    if lacking := missing():
        sys.exit(message(lacking))
    from bench.gpu.measure import main

    main()
