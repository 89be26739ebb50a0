"""`clew doctor` where Clew was not installed by pip, and py-spy in a folder of `pip install --target`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from clew.diagnose import doctor
from clew.hang.collect import py_spy


def test_a_clew_that_is_only_on_the_path_is_said_and_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    doctor.examine()
    assert "Clew is not installed, but imported from" in " ".join(capsys.readouterr().out.split())


def test_a_gpu_that_torch_cannot_use_is_said_and_a_broken_one_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: ["NVIDIA H200"])
    doctor.examine()
    assert "cannot use the 1 GPU of this machine" in " ".join(capsys.readouterr().out.split())

    def out_of_memory(device: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", out_of_memory)
    assert not doctor.examine()
    assert "CUDA error: out of memory nvidia-smi shows" in " ".join(capsys.readouterr().out.split())


def test_without_torch_the_other_checks_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not doctor.examine()
    printed = capsys.readouterr().out
    assert "not checked: import of torch halted" in " ".join(printed.split()) and "shared memory" in printed


def test_py_spy_is_found_beside_packages_that_pip_put_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip then writes into RECORD where the program would have been without --target."""
    told = tmp_path / "py_spy-0.4.3.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: py-spy\nVersion: 0.4.3\n")
    (told / "RECORD").write_text("../../bin/py-spy,,\n")
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert py_spy() == str(program)
