"""What the documents say exists.

Owns the comparison of every document with the code: links and anchors, command lines, option names, failure codes, invariants, the example.
Promises that each check was seen to fail on a planted mistake. Refuses to judge prose.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from diag.cli.main import VERBS, verb_parser
from diag.cli.main import parsed as parsed_diag
from diag.cli.retention_run import MODES
from hwr.cli.main import build_parser
from hwr.options import OPTIONS
from hwr.outcomes import NEVER_EMITTED, FailureCode
from hwr.telemetry.events import all_events
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.node_metrics import NODE_METRICS

REPOSITORY = Path(__file__).parents[2]
SKIPPED = frozenset({"node_modules", "build", "dist"})
# Read by telemetry; no options, as docs/host-weight-runtime.md says.
OTHER_VARIABLES = frozenset({"HWR_RUN_ID", "HWR_RANK"})
# What a log record of an event carries; no metrics.
RECORD_ATTRIBUTES = frozenset({"hwr_event", "hwr_attrs"})

FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
# A number is cited in brackets, alone or with others: "(I1)", "(P1, P2)", "(invariant D1)". R-numbers are requirements.
CITED = re.compile(r"\((?:invariants? )?([A-QS-Z]\d{1,2}(?:(?:, | and )[A-QS-Z]\d{1,2})*)\)")
ROW = re.compile(r"^\|\s*\**([A-QS-Z]\d{1,2})\**\s*\|(.*)\|\s*$", re.MULTILINE)


def documents() -> list[Path]:
    """Return every Markdown file of the repository."""
    return sorted(
        path
        for path in REPOSITORY.rglob("*.md")
        if not any(part.startswith(".") or part in SKIPPED or part.endswith(".egg-info") for part in path.relative_to(REPOSITORY).parts)
    )


def prose(text: str) -> str:
    """Return a document without its fenced blocks."""
    return FENCE.sub("", text)


def fences(text: str, language: str) -> Iterator[str]:
    """Yield the content of each fenced block of a language."""
    for match in FENCE.finditer(text):
        if match[2].strip() == language:
            yield match[3]


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    broken = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(text))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not _leads_somewhere(there, anchor, text if there == path else None):
            broken.append(target)
    return broken


def _leads_somewhere(there: Path, anchor: str, text: str | None) -> bool:
    if not there.exists() or not there.is_relative_to(REPOSITORY):
        return False
    return not anchor or (there.suffix == ".md" and anchor in anchors(there.read_text(encoding="utf-8") if text is None else text))


def commands(text: str) -> list[str]:
    """Return the `hwr` and `hwr-diag` command lines that a document shows."""
    lines = "".join(fences(text, "console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"\$ hwr(-diag)?(\s|$)", line)]


def refusal(command: str) -> str | None:
    """Return what a parser says against a command line, None if it takes it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            program, *arguments = shlex.split(command, comments=True)
            if program == "hwr-diag":
                parsed_diag(arguments)
            else:
                build_parser().parse_args(arguments)
    except SystemExit as ended:
        return said.getvalue() if ended.code else None
    return None


def cited_in_code(source: str) -> set[str]:
    """Return the invariants that a module's docstrings and comments cite."""
    texts = [
        ast.get_docstring(node, clean=False) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    texts += [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT]
    return {number for text in texts for group in CITED.findall(text) for number in re.findall(r"[A-Z]\d+", group)}


def tables() -> dict[str, tuple[Path, str]]:
    """Return the row of each invariant: its page and the rest of its line."""
    found: dict[str, tuple[Path, str]] = {}
    for page in sorted((REPOSITORY / "docs" / "internals").glob("*.md")):
        for number, rest in ROW.findall(page.read_text(encoding="utf-8")):
            assert number not in found, f"{number} has a row in {found[number][0].name} and in {page.name}"
            found[number] = (page, rest)
    return found


def between(text: str, name: str) -> str:
    """Return what stands between two markers of the README."""
    return text.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]


def unknown_flags(text: str) -> set[str]:
    """Return the flags in code spans and console blocks that no command of ours has."""
    known = {flag for row in OPTIONS for flag in (*row.flags, *row.off)} | {"--help", "--version"}
    for root in (build_parser(), *(verb_parser(verb) for verb in VERBS)):
        for parser in _parsers(root):
            known |= set(parser._option_string_actions)
    shown = [span for span in re.findall(r"`([^`\n]+)`", prose(text)) if re.match(r"(--|hwr |hwr-diag )", span)]
    return {flag for part in (*shown, *commands(text)) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", part)} - known


def _parsers(parser: object) -> Iterator[object]:
    load = getattr(parser, "load", None)  # a sub-verb's arguments are added when they are asked for
    if load is not None:
        load()
    yield parser
    for action in parser._actions:  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_relative_link_and_anchor_leads_somewhere(path: Path) -> None:
    """A page that is moved or a heading that is renamed takes its links along."""
    assert not broken_links(path, path.read_text(encoding="utf-8"))


def test_a_link_to_nothing_is_seen() -> None:
    """The check can fail."""
    page = REPOSITORY / "docs" / "internals" / "store.md"
    good = "# One heading\n[b](#one-heading) [d](../host-weight-runtime.md#why) [e](https://example.org/x)\n"
    bad = "[a](nowhere.md) [c](#two) [e](../host-weight-runtime.md#no)\n"
    assert broken_links(page, good + bad) == ["nowhere.md", "#two", "../host-weight-runtime.md#no"]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_command_line_parses(path: Path) -> None:
    """What a reader copies is accepted by the parser."""
    refused = {command: why for command in commands(path.read_text(encoding="utf-8")) if (why := refusal(command))}
    assert not refused


def test_a_wrong_command_line_is_seen() -> None:
    """The check can fail, and the README has lines to check."""
    assert refusal("hwr run MODEL_DIR --root /x") is None
    assert refusal("hwr run MODEL_DIR --rooot /x")
    assert refusal("hwr store lss")
    assert refusal("hwr-diag --help") is None
    assert refusal("hwr-diag retentoin")
    assert len(commands((REPOSITORY / "README.md").read_text(encoding="utf-8"))) > 8


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_variable_and_flag_exists(path: Path) -> None:
    """No document names an option that is not in the table of options."""
    text = path.read_text(encoding="utf-8")
    variables = set(re.findall(r"\bHWR_[A-Z0-9_]*[A-Z0-9]\b", text))
    assert not variables - {row.variable for row in OPTIONS} - OTHER_VARIABLES
    assert not unknown_flags(text)


def test_an_unknown_flag_is_seen() -> None:
    """The check can fail."""
    assert unknown_flags("`--root` and `--rooot`, `hwr run --mode x --modus y`, `git clone --bare`") == {"--rooot", "--modus"}


def unknown_names(text: str) -> set[str]:
    """Return the metrics and events in code spans that are not declared."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", prose(text)))
    metrics = {metric.name for metric in (*METRICS, *NODE_METRICS)} | {row.name for row in OPTIONS} | RECORD_ATTRIBUTES | set(MODES)
    events = {kind.NAME for kind in all_events()}
    named = set(re.findall(r"\bhwr_[a-z0-9_]*[a-z0-9]\b", spans))
    unknown = {name for name in named if name not in metrics and re.sub(r"_(bucket|sum|count|created)$", "", name) not in metrics}
    for name in re.findall(r"\bhwr(?:\.[a-z0-9_]+){3}(?![\w.(])", spans):
        unknown |= set() if name in events or _is_module(name) else {name}
    for name in re.findall(r"\b(hwr(?:\.[a-z0-9_]+){2}\.)\*", spans):
        unknown |= set() if any(event.startswith(name) for event in events) else {name + "*"}
    return unknown


def _is_module(name: str) -> bool:
    return (REPOSITORY / name.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_metric_and_event_is_declared(path: Path) -> None:
    """What a reader greps for is there to be found."""
    assert not unknown_names(path.read_text(encoding="utf-8"))


def test_an_undeclared_metric_or_event_is_seen() -> None:
    """The check can fail."""
    good = "`hwr_failures_total` `hwr_resolution_seconds_bucket` `hwr.store.lock.*` `hwr.store.miss.explain`"
    assert not unknown_names(good)
    assert unknown_names("`hwr_failure_total` `hwr.store.latch.*` `hwr.store.miss.excuse`") == {
        "hwr_failure_total",
        "hwr.store.latch.*",
        "hwr.store.miss.excuse",
    }


def test_the_table_of_options_has_every_option() -> None:
    """Each option stands in the guide with its variable, its default where it is a word, and its aliases."""
    rows = {}
    text = (REPOSITORY / "docs" / "host-weight-runtime.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if match := re.match(r"\| `([a-z_]+)`(.*)", line):
            rows[match[1]] = line
    names = {row.name for row in OPTIONS}
    assert not names - set(rows)
    for row in OPTIONS:
        assert f"`{row.variable}`" in rows[row.name] or f"{row.variable}`" in rows[row.name]
        assert not [alias for alias in row.aliases if f"`{alias}`" not in rows[row.name]]
    unknown = {name for name, line in rows.items() if "`HWR_" in line} - names
    assert not unknown


def test_the_list_of_failure_codes_is_that_of_the_code() -> None:
    """Each code has a row with what to do, or stands among those that are never emitted; no other word does."""
    text = (REPOSITORY / "docs" / "host-weight-runtime.md").read_text(encoding="utf-8")
    section = text.partition("\n## Failure codes, and what to do\n")[2].partition("\n## ")[0]
    listed, _, never = section.partition("\n### Never emitted\n")
    with_rows = {code for line in listed.splitlines() if line.startswith("| `") for code in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    said_never = set(re.findall(r"`([a-z_]+)`", never))
    assert not with_rows & said_never
    assert with_rows | said_never == {code.value for code in FailureCode}
    assert said_never >= {code.value for code in NEVER_EMITTED}


def test_what_is_called_retryable_is_retryable() -> None:
    """The column R of the failure tables is the attribute of the classes."""
    from hwr import errors

    text = (REPOSITORY / "docs" / "host-weight-runtime.md").read_text(encoding="utf-8")
    told = {}
    for line in text.partition("\n## Failure codes, and what to do\n")[2].partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.split("|")]
            told.update(dict.fromkeys(re.findall(r"`([a-z_]+)`", cells[1]), cells[2] == "R"))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HwrError)]
    abstract = {errors.HwrError, errors.ResolutionFailed, errors.SourceRejected, errors.LeaseError}
    for kind in (kind for kind in kinds if kind not in abstract):
        assert told[kind.code.value] == kind.retryable, kind.__name__


def test_every_invariant_that_the_code_cites_has_a_row_and_the_other_way_round() -> None:
    """A number means one claim, written down once."""
    cited = {
        number
        for room in ("hwr", "diag")
        for path in sorted((REPOSITORY / room).rglob("*.py"))
        for number in cited_in_code(path.read_text(encoding="utf-8"))
    }
    assert cited == set(tables())


def test_every_row_names_a_module_that_cites_it_and_tests_that_exist() -> None:
    """The table leads to the code and to the proof."""
    for number, (page, rest) in tables().items():
        cells = [cell.strip() for cell in rest.split("|")]
        module = next(path for path in re.findall(r"`([^`]+)`", cells[1]))
        assert number in cited_in_code((REPOSITORY / module).read_text(encoding="utf-8")), f"{page.name}: {number}: {module}"
        tests = re.findall(r"`(tests/[^`]+)`", cells[2])
        assert tests, f"{page.name}: {number}"
        assert all(any(_test_files(REPOSITORY / path)) for path in tests), f"{page.name}: {number}: {tests}"


def _test_files(path: Path) -> Iterator[Path]:
    return iter([path]) if path.is_file() else path.glob("test_*.py")


def test_a_citation_is_told_from_a_dtype() -> None:
    """The check reads docstrings and comments, and knows what a citation looks like."""
    source = '"""Promise (I1) and (P2, P3); not I8 (R5)."""\nx = {"(F8)": 1}  # keeps (invariant D1)\n'
    assert cited_in_code(source) == {"I1", "P2", "P3", "D1"}


def test_the_example_of_the_readme_is_the_tested_one() -> None:
    """The server in the README is docs/examples/embedding_server.py, byte for byte."""
    code = list(fences(between((REPOSITORY / "README.md").read_text(encoding="utf-8"), "example"), "python"))
    assert code == [(REPOSITORY / "docs" / "examples" / "embedding_server.py").read_text(encoding="utf-8")]


def test_the_readme_shows_a_table_of_the_demo() -> None:
    """Readers see before they run what they will see after."""
    table = between((REPOSITORY / "README.md").read_text(encoding="utf-8"), "demo")
    assert all(word in table for word in ("canonical_fallback", "local_hit", "bit-identical", "PSS"))


def test_no_document_names_a_place_of_somebody_s_machine() -> None:
    """Paths in documents are examples that any node may have."""
    places = re.compile("|".join(map(re.escape, (f"{REPOSITORY}/", f"{Path.home()}/", "/home/", "/Users/", "/tmp/"))))
    odd = {path.name: places.findall(path.read_text(encoding="utf-8")) for path in documents()}
    assert not {name: found for name, found in odd.items() if found}
