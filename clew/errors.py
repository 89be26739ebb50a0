"""Every error that Clew raises on purpose.

::

    ClewError
    ├── ConfigError        a field, a file or an override that cannot be meant
    ├── DataError          the user's data set: a missing file, a missing column, too few rows
    ├── ModelError         the model folder: no weights, no tokenizer, another architecture
    ├── RecordError        the run directory: truncated, of a newer format, held by another trainer
    │   └── FileMissing    a file that is not there; also a FileNotFoundError (see clew.reading)
    ├── EngineError        the inference side: unreachable, refused a request, loaded the wrong weights
    │   └── ImageError     an image that cannot be read, or is not where its tokens are
    ├── EpisodeError       one episode failed: workflow, agent or reward; it becomes part of the record
    ├── RolloutError       too many episodes failed, or no batch can ever be formed
    ├── TrainingError      the trainer met a number that it cannot go on with
    ├── LaunchError        a process died, a port is in use
    └── Interrupted        somebody asked the process to end before its work is done

A message says what was found, where, what was expected and what to do. The command line prints it without a
traceback and exits with 2, after an Interrupted with 130. A programmer's mistake is an ``assert``.
"""


class ClewError(Exception):
    """Root of the errors that are the user's to mend."""


class ConfigError(ClewError):
    """The configuration contradicts itself, or names what does not exist."""


class DataError(ClewError):
    """The data set cannot be read or does not hold what the configuration asks of it."""


class ModelError(ClewError):
    """The model folder cannot be loaded."""


class RecordError(ClewError):
    """The run directory holds something that cannot be read, or belongs to someone else."""


class EngineError(ClewError):
    """An inference engine cannot be reached, refused a request, or disagrees with the trainer."""


class ImageError(EngineError):
    """An image cannot be shown to the model: it is none, or its tokens are not where it is said to be."""


class EpisodeError(ClewError):
    """An episode failed. It is recorded with this error and does not end the run by itself."""


class RolloutError(ClewError):
    """Rollout cannot go on: too many episodes failed, or no batch can ever be formed."""


class TrainingError(ClewError):
    """Training cannot go on: NaN, infinity, or a replay that departs from the record."""


class LaunchError(ClewError):
    """A process could not be started, or died."""


class Interrupted(ClewError):
    """Somebody asked the trainer to end before its last step."""
