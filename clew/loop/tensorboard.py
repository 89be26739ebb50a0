"""TensorBoard's files of a run, derived from the record."""

from __future__ import annotations

import logging
from typing import Any

from clew.record.files import only_shown
from clew.record.run import RunDirectory

log = logging.getLogger("clew.trainer")


class Tensorboard:
    """Writer of reports/tensorboard: each metric of each step, and each evaluation, as a scalar."""

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        """Open the files, and hide what an earlier, killed trainer wrote from `first_step` on."""
        self._run = run
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            log.warning("No files for TensorBoard are written: %s is not installed. Nothing else needs it.", error.name)
            return
        self._evaluated = set[int]()
        with only_shown("TensorBoard's files"):
            self._writer = SummaryWriter(str(run.reports / "tensorboard"), purge_step=first_step, flush_secs=10)
            self._evaluated = {each["version"] for each in run.evals.read_all() if each["version"] < first_step - 1}

    def add(self, step: int, summary: dict[str, Any]) -> None:
        if self._writer is None:
            return
        with only_shown("TensorBoard's files"):
            for name, value in summary["metrics"].items():
                self._writer.add_scalar(name, value, step)
            for name, value in summary["timings"].items():
                self._writer.add_scalar(f"seconds/{name}", value, step)
            self._add_evaluations()

    def _add_evaluations(self) -> None:
        """Add the evaluations that are complete by now, each of them once."""
        for evaluation in self._run.evals.read_all():
            version = evaluation["version"]
            if version in self._evaluated:
                continue
            self._evaluated.add(version)
            for name, value in evaluation.items():
                if isinstance(value, (int, float)) and name != "version":
                    self._writer.add_scalar(f"eval/{name}", value, version)

    def close(self) -> None:
        if self._writer is None:
            return
        with only_shown("TensorBoard's files"):
            self._add_evaluations()  # the last version is evaluated after the last step
        with only_shown("TensorBoard's files"):
            self._writer.close()
