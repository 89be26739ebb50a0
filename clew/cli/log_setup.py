"""The log of each process: its form, and which libraries only warn."""

from __future__ import annotations

import logging
import os

from clew.printing import VisibleFormatter


def set_up_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("httpx", "matplotlib", "aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
