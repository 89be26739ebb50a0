"""Names in the configuration that stand for the user's code: `my_project.rewards.exact_match`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from clew.errors import ConfigError


def load(path: str, field: str) -> Any:
    """The class or function that `path` (module.name) names; modules in the current directory are found too.

    field: where the path was configured, for the message.
    Raises ConfigError: no such module, no such name in it, a module that raises when it is imported.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        example = path if path.isidentifier() else "name"
        raise ConfigError(f"{field} is {path!r}; expected a dotted path such as my_module.{example}.")
    module = _import(module_name, path, field)
    if name not in vars(module):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(f"{field}={path}: {module.__file__ or module_name} has no {name!r}.{_nearest(name, public)}")
    return vars(module)[name]


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], field: str) -> None:
    """Raise ConfigError when `function` (or a class's constructor) takes no such arguments, or lacks one."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    label = f"{function.__module__}.{function.__qualname__}"
    for argument in arguments:
        if argument not in names and not takes_any:
            raise ConfigError(
                f"{field}.{argument}: {label} takes no argument {argument!r}; "
                f"it takes {', '.join(names) or 'none'}.{_nearest(argument, names)}"
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise ConfigError(f"{field}: {label} needs the argument {parameter.name!r}; set {field}.{parameter.name}.")


def _import(module_name: str, path: str, field: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise _raised(error, path, field) from error  # the module is there; something that it imports is not
    except (Exception, SystemExit) as error:
        raise _raised(error, path, field) from error
    parent, _, last = missing.rpartition(".")
    if parent and not hasattr(sys.modules[parent], "__path__"):
        raise ConfigError(
            f"{field}={path}: {parent} is a module, not a package, so it holds no module {last!r}."
        ) from None
    folders = list(sys.modules[parent].__path__) if parent else [str(Path.cwd())]
    siblings = [found.name for found in pkgutil.iter_modules(folders)]
    raise ConfigError(
        f"{field}={path}: there is no module {missing!r} in {', '.join(folders)} or in what is "
        f"installed.{_nearest(last, siblings)}"
    ) from None


def _raised(error: BaseException, path: str, field: str) -> ConfigError:
    if isinstance(error, SyntaxError):
        return ConfigError(f"{field}={path}: {error.filename}:{error.lineno} is no Python: {error.msg}.")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"{field}={path}: importing it raised {type(error).__name__} at {frame.filename}:{frame.lineno}: {error}"
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
