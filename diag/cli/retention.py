"""Measure what stays in memory after a tensor was read again and again, each case in a fresh process.

Owns the sub-verbs and the way to the module of the one that was asked for. Promises that no other one is imported.
Refuses to know what they do.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, Final

from hwr.usage import HwrParser

# A sub-verb's name, its module and its line in the help. The module has `add_arguments(parser)`, as a verb has.
SUB_VERBS: Final = {
    "run": ("diag.cli.retention_run", "measure one case and judge it"),
    "matrix": ("diag.cli.retention_matrix", "measure cases x element counts x offsets x repetitions, or find where a figure changes"),
    "compare": ("diag.cli.retention_compare", "put the runs of two environments side by side"),
    "plot": ("diag.cli.retention_plot", "draw runs in the terminal, or as PNG or SVG"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-verbs."""
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=_SubVerb)
    for name, (module, text) in SUB_VERBS.items():
        verbs.add_parser(name, help=text, module=module)


class _SubVerb(HwrParser):
    """A parser whose module is imported when it is first asked to parse."""

    def __init__(self, *args: Any, module: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module: str | None = module

    def load(self) -> None:
        """Add the sub-verb's arguments, once; for whoever wants to know them without parsing."""
        if self._module is not None:
            module, self._module = import_module(self._module), None
            self.description = (module.__doc__ or "").partition("\n\n")[0]
            module.add_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with the arguments of the sub-verb added."""
        self.load()
        return super().parse_known_args(args, namespace)
