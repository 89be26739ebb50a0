"""Names in the configuration that stand for the user's code, such as `my_project.rewards.exact_match`.

`load` returns the object that such a name stands for, unless `only_trusted` forbids it. The functions take the argument
`field`, the field of the configuration that holds the name, to show it in error messages.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from clew.errors import ConfigError, did_you_mean

BUILT_IN = ("clew.rollout.workflows",)
"""Clew's own modules whose content a configuration may name."""


@dataclass(frozen=True)
class TrustRule:
    """A rule that applies while someone else's record is open: see `only_trusted`."""

    record: str
    """Words that say which record is open, and why it is someone else's."""
    modules: frozenset[str]
    """Modules that the user trusts."""


trust_rules: list[TrustRule] = []
"""Rules that apply now. They must be passed on to any process that resolves names for this one."""


@contextmanager
def only_trusted(record: str | None, modules: Iterable[str] = ()) -> Iterator[None]:
    """Resolve only names in trusted modules for as long as the block runs, in every thread.

    Args:
        record: A description of the record that names the code and why it is someone else's, such as "x.clew.zip is a
            bundle". None if the record is the user's own: then every name is resolved.
        modules: Modules that the user named with --trust. An object counts only if its own `__module__` is named.
    """
    if record is None:
        yield
        return
    rule = TrustRule(record, frozenset(modules))
    trust_rules.append(rule)
    try:
        yield
    finally:
        trust_rules.remove(rule)


def load(path: str, field: str) -> Any:
    """Return the class or function that `path` (module.name) names. Modules in the current folder are found, too.

    Raises:
        ConfigError: There is no such module, or no such name in it; the module raises an error when it is imported; or
            someone else's record is open and the user does not trust the module.
    """
    module_name, _, name = path.rpartition(".")
    module = load_module(module_name, field, path)
    if name not in vars(module) and (trust_rules or not hasattr(module, name)):  # it may define `__getattr__`
        file = getattr(module, "__file__", None) or module_name  # a module in C, such as time, has no file
        raise _lacks(file, path, field, vars(module))
    value = getattr(module, name)
    home = getattr(value, "__module__", None)
    if trust_rules and home != module_name:
        raise ConfigError(
            f"Cannot load {field}={path}: {trust_rules[0].record}, and {name!r} is not {module_name}'s own: it was "
            f"defined in {home}. --trust reaches only what a trusted module defines itself."
        )
    return value


def _lacks(file: object, path: str, field: str, names: Iterable[str]) -> ConfigError:
    """Return the error about a module that has no such name."""
    module, _, name = path.rpartition(".")
    meant = did_you_mean(name, [each for each in names if not each.startswith("_")])
    if name == "py":
        meant = f" Write {module}.NAME: the name of what is meant in the file, without .py."
    return ConfigError(f"{field}={path}: {file} has no {name!r}.{meant}")


def load_module(module_name: str, field: str, path: str | None = None) -> Any:
    """Import a module, under the rules of `load`. `path` is the value of the field; None: it is `module_name`."""
    path = module_name if path is None else path
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        example = path if path.isidentifier() else "name"
        raise ConfigError(f"{field} is {path!r}; expected a dotted path such as my_module.{example}.")
    wary = next((rule for rule in trust_rules if module_name not in (*rule.modules, *BUILT_IN)), None)
    if wary is not None:
        raise ConfigError(
            f"Cannot load {field}={path}: {wary.record}, and whoever wrote it chose this code, which could do anything "
            f"here. Nothing was imported. If you know the module and trust it, add --trust {module_name}."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end, so that no file in this folder shadows an installed package
    return _import(module_name, path, field)


def file_of(path: str) -> Path | None:
    """Return the file of the module in `path` (module.name) without importing it; None for `BUILT_IN`, or if absent."""
    module, _, _ = path.rpartition(".")
    return None if module in BUILT_IN else _find(module)


def digest_of(file: Path) -> str:
    """Return the digest of a file's content as it is now; "" if there is no such file."""
    return sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def _find(module: str) -> Path | None:
    if not module:
        return None
    search: list[str] | None = [*sys.path, str(Path.cwd())]
    spec = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None


def check_defined(path: str, field: str) -> None:
    """Raise ConfigError if `path` (module.name) does not exist. A module is not run if its source file can be read."""
    module, _, name = path.rpartition(".")
    tree = _parse(path, field)
    if tree is None:
        if _find(module) is None:
            load(path, field)  # raises an error that lists what exists, unless an import hook provides the module
        return
    bound = set(_bound(tree))
    if name not in bound and not bound & {"*", "__getattr__"}:  # those may bind any name
        raise _lacks(_find(module), path, field, bound)


def required_parameters(path: str, field: str) -> int | None:
    """Return how many arguments the function that `path` names needs; None if its source alone does not tell.

    The module is not run. `*args` counts as one argument. If the name is decorated, imported or bound more than once,
    the source does not tell what it stands for, so the result is None. It is also None for an async function.

    Raises:
        ConfigError: The module is not valid Python.
    """
    tree, name = _parse(path, field), path.rpartition(".")[2]
    if tree is None or list(_bound(tree)).count(name) != 1:
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
            given = node.args
            positional = len(given.posonlyargs) + len(given.args) - len(given.defaults)
            return positional + given.kw_defaults.count(None) + (given.vararg is not None)
    return None


def _parse(path: str, field: str) -> ast.Module | None:
    """Return the syntax tree of the module in `path` (module.name); None if no Python file of it can be found."""
    file = _find(path.rpartition(".")[0])
    if file is None or file.suffix != ".py":
        return None
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise _raised(error, path, field) from None


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds at its top level, also within if, try, for and with."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case _:
                yield from _bound(child)


def create(cls: type, arguments: Mapping[str, Any], path: str, field: str) -> Any:
    """Return an instance of a class, created with rollout.workflow_kwargs.

    Args:
        cls: The class, which `path` names.
        arguments: Value of rollout.workflow_kwargs.

    Raises:
        ConfigError: The class takes no argument of that name, or lacks one that it needs, or its constructor raises an
            error.
    """
    parameters = inspect.signature(cls).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    label, given = f"{cls.__module__}.{cls.__qualname__}", "rollout.workflow_kwargs"
    for argument in arguments:
        if argument not in names and not takes_any:
            raise ConfigError(
                f"{given}.{argument}: {label} takes no argument {argument!r}; "
                f"it takes {', '.join(names) or 'none'}.{did_you_mean(argument, names)}"
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise ConfigError(f"{given}: {label} needs the argument {parameter.name!r}; set {given}.{parameter.name}.")
    try:
        return cls(**arguments)
    except (Exception, SystemExit) as error:
        raise _raised(error, path, field, cls) from error


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
    siblings = [module.name for module in pkgutil.iter_modules(folders)]
    raise ConfigError(
        f"{field}={path}: there is no module {missing!r} in {', '.join(folders)} or in what is "
        f"installed.{did_you_mean(last, siblings)}"
    ) from None


def _raised(error: BaseException, path: str, field: str, created: type | None = None) -> ConfigError:
    """Return the ConfigError for an error that an import raised, or that the constructor of a class raised."""
    if isinstance(error, SyntaxError):
        return ConfigError(f"{field}={path}: {error.filename}:{error.lineno} is not valid Python: {error.msg}.")
    frames = traceback.extract_tb(error.__traceback__)
    doing, inside = ("importing it", frames[-1:]) if created is None else (f"{created.__name__}()", frames[1:])
    # The constructor of a dataclass is generated, so its frame names no file.
    where = next((f" at {each.filename}:{each.lineno}" for each in inside if not each.filename.startswith("<")), "")
    return ConfigError(f"{field}={path}: {doing} raised {type(error).__name__}{where}: {error}")
