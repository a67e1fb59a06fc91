"""Command-line options for the settings of every method, taken from its Config: a new method brings its own."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any

import veloxfn

__all__ = ["add_method_options", "flag_of", "settings_of"]

# Said otherwise on the command line.
_ELSEWHERE = ("budget", "placement", "layers", "scorer")
_FLAGS = {"seed": "--noise-seed"}  # --seed is that of the sampling
_TYPES = {"int": int, "float": float, "str": str}


def flag_of(setting: str) -> str:
    """How a setting is called on the command line."""
    return _FLAGS.get(setting, "--" + setting.replace("_", "-"))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name."""
    return {name: value for name in _settings() if (value := getattr(options, f"method_{name}")) is not None}


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting that some method has, each saying which."""
    group = parser.add_argument_group("settings of the methods", "default: the method's own")
    for name, (kind, meanings) in _settings().items():
        said: dict[str, list[str]] = {}
        for method, meaning in meanings.items():
            said.setdefault(meaning, []).append(method)
        everywhere = len(said) == 1 and len(meanings) == len(veloxfn.METHODS)
        parts = [f"{'all methods' if everywhere else ', '.join(owners)}: {meaning}" for meaning, owners in said.items()]
        text = "; ".join(parts).replace("%", "%%")
        if kind == "bool":
            group.add_argument(
                flag_of(name), dest=f"method_{name}", action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = {"int": "N", "float": "X", "str": "WORD"}[kind]
            group.add_argument(flag_of(name), dest=f"method_{name}", type=_TYPES[kind], metavar=metavar, help=text)


def _settings() -> dict[str, tuple[str, dict[str, str]]]:
    """Setting -> its type, and what it means to each method that has it."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for method, module in veloxfn.METHODS.items():
        for field in dataclasses.fields(module.Config):
            if field.name not in _ELSEWHERE:
                kind = str(field.type).split(" | ")[0]
                _, meanings = found.setdefault(field.name, (kind, {}))
                meanings[method] = _meaning(module.Config, field.name)
    return found


def _meaning(config: type, setting: str) -> str:
    """What the docstring of a Config, or of what it derives from, says about a setting."""
    for kind in config.__mro__:
        arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"^ {4}(?=\w)", arguments, flags=re.MULTILINE):
            name, _, text = entry.partition(": ")
            if name == setting:
                return " ".join(text.split()).rstrip(".")
    return ""
