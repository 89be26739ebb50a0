"""Dotted paths in the configuration that name the user's code, such as `my_project.rewards.exact_match`.

`load` returns the object that such a path names, unless `only_trusted` forbids it. The functions take the argument
`field`, the field of the configuration that holds the path, to show it in error messages.
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
"""Clew's own modules that define objects for a configuration to name. They are always trusted."""


@dataclass(frozen=True)
class TrustRule:
    """A rule that applies while someone else's record is open: see `only_trusted`."""

    record: str
    """Description of the open record that says why it is someone else's, for error messages."""
    modules: frozenset[str]
    """Modules that the user trusts."""


trust_rules: list[TrustRule] = []
"""Rules that apply now. They must be passed on to any process that resolves names for this one."""


@contextmanager
def only_trusted(record: str | None, modules: Iterable[str] = ()) -> Iterator[None]:
    """Restrict `load` to code that trusted modules define, as long as the block runs and in every thread.

    Args:
        record: A description of the record that names the code and why it is someone else's, such as "x.clew.zip is a
            bundle". None if the record is the user's own: then every name is resolved.
        modules: Modules that the user named with --trust. They are trusted with what they define themselves (the
            object's `__module__`), not with what they import.
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
    """Return the object that `path` (module.name) names. The module may also be in the current folder.

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
    """Return the error for a path whose module does not define the name. `names` are those that it defines."""
    module, _, name = path.rpartition(".")
    meant = did_you_mean(name, [each for each in names if not each.startswith("_")])
    if name == "py":
        meant = f" Write {module}.NAME: the name of what is meant in the file, without .py."
    return ConfigError(f"{field}={path}: {file} has no {name!r}.{meant}")


def load_module(module_name: str, field: str, path: str | None = None) -> Any:
    """Import a module and return it.

    Args:
        path: Value of the field, for error messages; None: it is `module_name` itself.

    Raises:
        ConfigError: As for `load`.
    """
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
    """Return the file of the module in `path` (module.name) without importing it.

    Returns None if the module is in `BUILT_IN` or if no file is found.
    """
    module, _, _ = path.rpartition(".")
    return None if module in BUILT_IN else _find(module)


def digest_of(file: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file's current content; "" if there is no such file."""
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
    """Check that the module in `path` (module.name) defines the name, as far as its source tells.

    A module is imported only if no file of it is found. A module that is not a Python file (such as one in C) is not
    checked.

    Raises:
        ConfigError: There is no such module or name, or the module is not valid Python.
    """
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
    """Return the number of arguments that the function at `path` requires, without running its module.

    `*args` counts as one required argument.

    Returns:
        The number; None if the source does not tell it: no Python file is found, or the name is not that of a plain
        function which is defined exactly once, at the top level, and without decorators.

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
    """Return the syntax tree of the module in `path` (module.name); None if no Python file of it is found.

    Raises:
        ConfigError: The file is not valid Python.
    """
    file = _find(path.rpartition(".")[0])
    if file is None or file.suffix != ".py":
        return None
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise _raised(error, path, field) from None


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds at its top level, including within if, try, for and with.

    `from x import *` yields "*".
    """
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.Lambda():
                pass  # their variables are their own
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield from (name, *_bound(child))
            case _:
                yield from _bound(child)


def create(cls: type, arguments: Mapping[str, Any], path: str, field: str) -> Any:
    """Return an instance of a class, created with rollout.workflow_kwargs.

    Args:
        cls: The class that `path` names.
        arguments: Value of rollout.workflow_kwargs.

    Raises:
        ConfigError: An argument is unknown to the class, a required one is missing, or the constructor raises an error.
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
            raise _raised(error, path, field) from error  # the module exists, but a module that it imports does not
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
    """Return the ConfigError for an error that the constructor of `created` raised, or an import if that is None."""
    if isinstance(error, SyntaxError):
        return ConfigError(f"{field}={path}: {error.filename}:{error.lineno} is not valid Python: {error.msg}.")
    frames = traceback.extract_tb(error.__traceback__)
    doing, inside = ("importing it", frames[-1:]) if created is None else (f"{created.__name__}()", frames[1:])
    # The constructor of a dataclass is generated, so its frame names no file.
    where = next((f" at {each.filename}:{each.lineno}" for each in inside if not each.filename.startswith("<")), "")
    return ConfigError(f"{field}={path}: {doing} raised {type(error).__name__}{where}: {error}")
