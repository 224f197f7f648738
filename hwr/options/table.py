"""One row an option: everything that the layers, help and reports need to know about it.

Owns the row and how it is declared, as the default of a dataclass field, so that name, type, default and help stand in
one place. Promises that flag, environment variable and TOML key follow from the name by one rule each.
Refuses to hold values.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal

from hwr.options.kinds import Flag, Kind

Spelling = Callable[[str], str]
"""From an option's name to the way that its user wrote it: a flag, a variable, a key of a file."""

_ROW: Final = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A row of the table; `concern` and `field` say where the value lies in `Options`."""

    name: str  # also the TOML key and the keyword of a call
    kind: Kind
    default: Any
    help: str
    aliases: tuple[str, ...] = ()  # shorter flags
    off: tuple[str, ...] = ()  # the flags that say false
    meaning: Mapping[Any, str] = field(default_factory=dict)  # what a value means that does not speak for itself
    layers: Literal["any", "above_file"] = "any"  # `above_file`: says where the file is, so cannot stand in it
    awaits: str = ""  # the part that will implement it; until then running with it is refused
    refused: Literal["given", "away"] = "given"  # whether giving it is enough, or only a value away from the default
    concern: str = ""
    field: str = ""

    @property
    def flag(self) -> str:
        """The primary flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags that set it (for a bool: to true)."""
        return (self.flag, *self.aliases)

    @property
    def variable(self) -> str:
        """The environment variable: `HWR_` and the name in capitals, in which a leading `hwr_` is not repeated."""
        return "HWR_" + self.name.removeprefix("hwr_").upper()

    def shown(self, value: Any) -> str:
        """Return a value as a report shows it, with its meaning where it does not speak for itself."""
        text = {None: "unset", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
        meaning = None if isinstance(value, bool) else self.meaning.get(value)
        return f"{text} ({meaning})" if meaning else text

    @property
    def is_flag(self) -> bool:
        """Whether it is true or false."""
        return isinstance(self.kind, Flag)


def option(
    name: str,
    kind: Kind,
    default: Any,
    *,
    help: str,
    aliases: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    meaning: Mapping[Any, str] | None = None,
    layers: Literal["any", "above_file"] = "any",
    awaits: str = "",
    refused: Literal["given", "away"] = "given",
) -> Any:
    """Declare an option as the default of a field of a concern."""
    row = Option(
        name=name,
        kind=kind,
        default=default,
        help=help,
        aliases=aliases,
        off=off,
        meaning=meaning or {},
        layers=layers,
        awaits=awaits,
        refused=refused,
    )
    return field(default=default, metadata={_ROW: row})


def rows(concern: str, holder: type[Concern]) -> tuple[Option, ...]:
    """Return the rows that a concern declares, in its order."""
    return tuple(replace(f.metadata[_ROW], concern=concern, field=f.name) for f in fields(holder))


def plain(name: str) -> str:
    """Spell an option as Python does."""
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """Options of one subject, each read by its kind, then compared with each other.

    `spelled` names options in refusals; whoever composes layers passes a spelling that names the layer.

    Raises:
        OptionError: a value is not allowed, or contradicts another.
        OptionTypeError: a value has a type that the option does not take.
    """

    TITLE: ClassVar[str] = ""

    spelled: InitVar[Spelling] = plain

    def __post_init__(self, spelled: Spelling) -> None:
        for f in fields(self):
            row: Option = f.metadata[_ROW]
            # Frozen for everyone else: the normal form replaces what was given before anyone sees the object.
            object.__setattr__(self, f.name, row.kind.read(spelled(row.name), getattr(self, f.name)))
        self.agree(spelled)

    def agree(self, spelled: Spelling) -> None:
        """Refuse values that contradict each other."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that `word` probably stands for."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None
