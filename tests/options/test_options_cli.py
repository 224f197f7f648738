"""The command line: full names first, both directions of a flag, two lines for a refusal; and --print-config."""

from __future__ import annotations

import argparse
import io
import json
import os

import pytest

from hwr.cli.arguments import add_options, composed
from hwr.cli.print_config import config_json, config_table, print_config
from hwr.errors import EXIT_USAGE, OptionError
from hwr.options import BY_NAME, OPTIONS, Options, compose
from hwr.usage import HwrParser


def run_parser() -> HwrParser:
    parser = HwrParser(prog="hwr run")
    parser.add_argument("model")
    add_options(parser)
    return parser


def parsed(*argv: str) -> Options:
    return composed(run_parser().parse_args(["model", *argv]), {})


# R1's names, written out: a change of the table's rule must not go unseen.
R1 = {
    "host_weight_runtime_mode": ("--host-weight-runtime-mode", "--mode"),
    "host_weight_runtime_root": ("--host-weight-runtime-root", "--root"),
    "host_weight_runtime_validation": ("--host-weight-runtime-validation", "--validation"),
    "enable_distributed_layerwise_offload": ("--enable-distributed-layerwise-offload", "--dlo"),
    "dlo_use_allgather": ("--dlo-use-allgather", "--allgather"),
    "dlo_host_registration_mode": ("--dlo-host-registration-mode",),
    "dlo_host_registration_limit_gib": ("--dlo-host-registration-limit-gib",),
    "dlo_resident_layers": ("--dlo-resident-layers", "--resident-layers"),
}
OTHER = {"mode": "required", "root": "/r", "validation": "full_checksum", "registration_mode": "disabled", "limit_gib": "80", "layers": "2"}


@pytest.mark.parametrize("name", R1)
def test_r1_full_names_are_primary_and_short_ones_equal(name: str) -> None:
    """R1: each spelling, with a space and with =, leads to the same options; help shows the full one first."""
    row = BY_NAME[name]
    assert row.flags == R1[name]
    value = next((value for end, value in OTHER.items() if name.endswith(end)), None)
    rest = ["--root=/other"] if name == "host_weight_runtime_mode" else []
    if value is None:
        results = [parsed(flag) for flag in row.flags]
        assert results[0].value(name) is True
    else:
        results = [parsed(*rest, f"{flag}={value}") for flag in row.flags] + [parsed(*rest, flag, value) for flag in row.flags]
        assert str(results[0].value(name)) in {value, f"{value}.0"}
    assert all(result == results[0] for result in results)
    assert results[0].origins[name] == "command line"


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("dlo_use_allgather", ["--dlo-no-use-allgather", "--no-allgather"]),
        ("enable_distributed_layerwise_offload", ["--no-enable-distributed-layerwise-offload", "--no-dlo"]),
        ("pin_cpu_memory", ["--no-pin-cpu-memory"]),
        ("telemetry", ["--no-telemetry"]),
    ],
)
def test_r1_flags_go_both_ways(name: str, off: list[str]) -> None:
    """R1: on and off; the last one given counts."""
    for flag in off:
        assert parsed(BY_NAME[name].flag, flag).value(name) is False
        assert parsed(flag, BY_NAME[name].flag).value(name) is True
        assert name in parsed(flag).given


@pytest.mark.parametrize(
    ("argv", "cause", "way_out"),
    [
        (["m", "--mod", "required"], "no such argument: --mod required", "Did you mean --mode? "),
        (["m", "--validtion=full_checksum"], "no such argument: --validtion=full_checksum", "Did you mean --validation? "),
        (["m", "--host-weight-runtime-val", "x"], "no such argument: --host-weight-runtime-val x", "Did you mean --host-weight-runtime-"),
        (["m", "other"], "no such argument: other", "Try: hwr run --help"),
        (["m", ""], "no such argument: ''", "Try: hwr run --help"),
        (["m", "bad\nnews\x1b[31m"], "no such argument: bad news\\x1b[31m", "Try: hwr run --help"),
        (["m", "--mode"], "argument --host-weight-runtime-mode/--mode: expected one argument", "Try: hwr run --help"),
        (["m", "--dlo=yes"], "argument --enable-distributed-layerwise-offload/--dlo: ignored explicit argument 'yes'", "Try: "),
        ([], "the following arguments are required: model", "Try: hwr run --help"),
    ],
)
def test_a_usage_error_is_two_lines_and_status_2(capsys: pytest.CaptureFixture[str], argv: list[str], cause: str, way_out: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run_parser().parse_args(argv)
    assert caught.value.code == EXIT_USAGE
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert first == f"hwr run: {cause}"
    assert second.startswith(way_out)
    assert second.endswith("Try: hwr run --help")


def test_a_parser_of_commands_suggests_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parser = HwrParser(prog="hwr")
    command = parser.add_subparsers().add_parser("run")
    assert isinstance(command, HwrParser)
    add_options(command)
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--rot=/x"])
    assert "Did you mean --root?" in capsys.readouterr().err


def test_r3_a_wrong_choice_is_the_options_refusal() -> None:
    """R3: argparse has no opinion about values."""
    with pytest.raises(OptionError) as caught:
        parsed("--validation", "fs_verity")
    assert caught.value.cause == "--host-weight-runtime-validation: 'fs_verity' is not one of its values"
    assert caught.value.way_out == "Allowed: manifest_and_metadata, full_checksum."


@pytest.mark.parametrize("bad", ["-1", "nan", "x"])
def test_r3_a_negative_limit_reaches_the_options(bad: str) -> None:
    """R3: also where argparse could take it for a flag."""
    with pytest.raises(OptionError, match="--dlo-host-registration-limit-gib"):
        parsed("--dlo-host-registration-limit-gib", bad)


def test_the_namespace_of_a_command_keeps_its_own_arguments() -> None:
    namespace = run_parser().parse_args(["model", "--mode=disabled"])
    assert vars(namespace) == {"model": "model", "host_weight_runtime_mode": "disabled"}


def test_a_command_may_take_some_options_only() -> None:
    parser = HwrParser(prog="hwr store")
    add_options(parser, ["host_weight_runtime_root"])
    assert composed(parser.parse_args(["--root=/x"]), {}).given == {"host_weight_runtime_root"}
    assert "--mode" not in parser.format_help()
    with pytest.raises(KeyError):
        add_options(argparse.ArgumentParser(), ["root"])


def test_r7_r15_help_says_what_must_be_said() -> None:
    """R7, R15: in the help of the options concerned; and each option with its default and variable."""
    text = " ".join(run_parser().format_help().split())
    for phrase in (
        "0 means no ceiling, not off",
        "a checksum at start never protects against a later change",
        "neither authenticates a writer",
        "does not see changed payload bytes",
        "once a start and never per inference",
        "a call in progress cannot be cancelled",
        "avoids the driver's path and does not repair the driver",
    ):
        assert phrase in text
    for row in OPTIONS:
        assert f"{row.flag} " in text
        assert f"{row.variable})" in text


def lines_of(options: Options) -> dict[str, tuple[str, str]]:
    header, *lines = config_table(options).splitlines()
    value_at, origin_at = header.index("value"), header.index("origin")
    assert all(line[value_at - 2 : value_at] == "  " == line[origin_at - 2 : origin_at] for line in lines)
    return {line[:value_at].strip(): (line[value_at:origin_at].strip(), line[origin_at:]) for line in lines}


def test_r2_print_config_shows_each_value_and_origin() -> None:
    """R2: every option, aligned, and what 0 and unset mean; nothing is refused as not implemented."""
    namespace = run_parser().parse_args(["m", "--mode=required", "--root=/x", "--dlo", "--no-allgather"])
    lines = lines_of(composed(namespace, {"HWR_ENGINE": "e"}))
    assert list(lines) == [row.name for row in OPTIONS]
    assert lines["host_weight_runtime_mode"] == ("required", "command line")
    assert lines["dlo_use_allgather"] == ("false", "command line")
    assert lines["engine"] == ("e", "environment HWR_ENGINE")
    assert lines["dlo_host_registration_limit_gib"] == ("0.0 (no ceiling)", "default")
    assert lines["host_weight_runtime_min_free_gib"] == ("unset (5 % of the filesystem)", "default")
    assert lines["dlo_resident_layers"] == ("0", "default")


def test_print_config_survives_strange_paths() -> None:
    options = Options.of(run_dir=os.fsdecode(b"/a\n\xff\x1b[2J"))
    assert lines_of(options)["run_dir"] == ("/a\\x0a\\udcff\\x1b[2J", "call")
    assert json.loads(config_json(options))["options"]["run_dir"]["value"] == str(options.telemetry.run_dir)


def test_print_config_as_json_and_its_notes() -> None:
    """One JSON object on stdout; a misspelt variable is a note beside it."""
    out, notes = io.StringIO(), io.StringIO()
    environ = {"HWR_DLO_RESIDENT_LAYERS": "2", "HWR_METRICS_PRT": "1"}
    print_config(compose(environ=environ), as_json=True, environ=environ, out=out, notes=notes)
    document = json.loads(out.getvalue())
    assert set(document["options"]) == set(BY_NAME)
    assert document["options"]["dlo_resident_layers"] == {"value": 2, "origin": "environment HWR_DLO_RESIDENT_LAYERS", "given": True}
    assert document["options"]["engine"] == {"value": "default", "origin": "default", "given": False}
    assert notes.getvalue() == "note: HWR_METRICS_PRT is no option; did you mean HWR_METRICS_PORT?\n"


def test_print_config_writes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_config(Options.of(), environ={})
    captured = capsys.readouterr()
    assert captured.out == config_table(Options.of()) + "\n"
    assert captured.err == ""
