"""Where a value comes from: call or command line, environment, a stage of a file, the file, the default (R2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hwr.cli.arguments import add_options, composed
from hwr.errors import HwrError, NotImplementedYet, OptionError, OptionTypeError
from hwr.options import BY_NAME, COMMAND_LINE, DEFAULT, OPTIONS, Options, compose, misspelt_variables, refuse_unimplemented
from hwr.usage import HwrParser

# Highest first. Each option with a value a layer, so that the winner shows in the value too.
LAYERS = ("top", "environment", "stage", "file")
SAMPLES: dict[str, tuple[Any, ...]] = {
    "dlo_resident_layers": (1, 2, 3, 4),
    "host_weight_runtime_validation": ("full_checksum", "manifest_and_metadata", "full_checksum", "full_checksum"),
    "dlo_use_allgather": (False, True, False, False),
    "hwr_coordination_timeout_seconds": (1.5, 2.5, 3.5, 4.5),
    "host_weight_runtime_root": ("/top", "/environment", "/stage", "/file"),
}


def toml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_config(directory: Path, file: Mapping[str, object], stage: Mapping[str, object]) -> Path:
    path = directory / "hwr.toml"
    lines = [f"{key} = {toml_value(value)}" for key, value in file.items()]
    lines += ["[stage.dit]", *(f"{key} = {toml_value(value)}" for key, value in stage.items())]
    path.write_text("\n".join(lines))
    return path


def from_argv(*argv: str, environ: Mapping[str, str] | None = None, server: bool = False) -> Options:
    parser = HwrParser(prog="hwr run")
    add_options(parser)
    return composed(parser.parse_args(argv), {} if environ is None else environ, server=server)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("top", ["command line", "call"])
@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=4)), ids=lambda c: "".join("01"[x] for x in c))
def test_r2_the_highest_layer_wins(tmp_path: Path, name: str, top: str, chosen: tuple[bool, ...]) -> None:
    """R2: all 16 combinations of layers; value, origin and `given` agree on the winner."""
    row = BY_NAME[name]
    values = {layer: {name: value} if use else {} for layer, value, use in zip(LAYERS, SAMPLES[name], chosen, strict=True)}
    config = str(write_config(tmp_path, values["file"], values["stage"]))
    environ = {BY_NAME[key].variable: str(value) for key, value in values["environment"].items()}
    if top == COMMAND_LINE:
        argv = [f"{row.flag}={value}" for value in values["top"].values()]
        if row.is_flag:
            argv = [row.flag if value else row.off[0] for value in values["top"].values()]
        options = from_argv(*argv, "--config", config, "--stage=dit", environ=environ)
    else:
        options = compose({**values["top"], "config": config, "stage": "dit"}, environ=environ)
    origins = dict(zip(LAYERS, (top, f"environment {row.variable}", "toml:dit", "toml"), strict=True))
    winner = next((layer for layer, use in zip(LAYERS, chosen, strict=True) if use), None)
    expected = values[winner][name] if winner else row.default
    assert str(options.value(name)) == str(expected)
    assert options.origins[name] == (origins[winner] if winner else DEFAULT)
    assert options.given == {"config", "stage"} | ({name} if winner else set())


def test_r2_values_set_and_values_given_are_both_kept() -> None:
    """R2: a value given equal to its default is given all the same."""
    options = from_argv("--validation", "manifest_and_metadata", "--dlo-host-registration-limit-gib=0")
    assert options.given == {"host_weight_runtime_validation", "dlo_host_registration_limit_gib"}
    assert options.host_weight_runtime == Options.of().host_weight_runtime
    assert options != Options.of()


def test_a_stage_is_taken_only_when_asked_for(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"engine": "file"}, {"engine": "stage"})
    assert compose({"config": config}, environ={}).telemetry.engine == "file"
    assert compose({}, environ={"HWR_CONFIG": str(config), "HWR_STAGE": "dit"}).telemetry.engine == "stage"


def test_an_empty_variable_is_not_set() -> None:
    assert compose(environ={"HWR_HOST_WEIGHT_RUNTIME_MODE": ""}) == Options.of()


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWR_ENGINE", "from-process")
    assert compose().telemetry.engine == "from-process"
    assert Options.of().telemetry.engine == "default"


def test_every_option_has_a_variable_by_one_rule() -> None:
    assert BY_NAME["host_weight_runtime_mode"].variable == "HWR_HOST_WEIGHT_RUNTIME_MODE"
    assert BY_NAME["hwr_stall_after_seconds"].variable == "HWR_STALL_AFTER_SECONDS"
    assert {row.variable for row in OPTIONS} >= {"HWR_RUN_DIR", "HWR_ENGINE", "HWR_CONFIG", "HWR_DLO_USE_ALLGATHER"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("YES", True), ("on", True), ("False", False), ("0", False), ("no", False), (" off ", False)],
)
def test_flags_as_text(text: str, value: bool) -> None:
    assert compose(environ={"HWR_DLO_USE_ALLGATHER": text}).value("dlo_use_allgather") is value


MODE, LIMIT, LAYERS_KEPT = "host_weight_runtime_mode", "dlo_host_registration_limit_gib", "dlo_resident_layers"
WRONG: list[tuple[str, Any, str, type[HwrError]]] = [
    (MODE, "always", "always", OptionError),
    (LIMIT, -1, "-1", OptionError),
    (LAYERS_KEPT, 1.5, "1.5", OptionError),
    ("dlo_use_allgather", "maybe", "maybe", OptionError),
]


@pytest.mark.parametrize(("name", "typed", "text", "kind"), WRONG, ids=[name for name, *_ in WRONG])
def test_r3_a_refusal_names_the_layer_that_gave_the_value(tmp_path: Path, name: str, typed: Any, text: str, kind: type[HwrError]) -> None:
    """R3: the first line begins with what the user wrote: flag, variable, file and key, keyword."""
    row = BY_NAME[name]

    def cause(**layers: Any) -> str:
        with pytest.raises((OptionError, OptionTypeError)) as caught:
            compose(**{"environ": {}, **layers})
        assert caught.value.way_out.startswith("Allowed: ")
        return caught.value.cause

    assert cause(call={name: typed}).startswith(f"{name}: ")
    assert cause(environ={row.variable: text}).startswith(f"{row.variable}: ")
    if not row.is_flag:
        assert cause(call={name: text}, layer=COMMAND_LINE).startswith(f"{row.flag}: ")
    file = write_config(tmp_path, {name: typed}, {})
    assert cause(call={"config": file}).startswith(f"{file}: {name}: ")
    stage = write_config(tmp_path, {}, {name: typed})
    assert cause(call={"config": stage, "stage": "dit"}).startswith(f"{stage}: [stage.dit] {name}: ")


def test_a_contradiction_between_layers_names_both(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        from_argv("--root= ", environ={"HWR_HOST_WEIGHT_RUNTIME_MODE": "required"})
    assert caught.value.cause == "--host-weight-runtime-root: missing or blank, although HWR_HOST_WEIGHT_RUNTIME_MODE is required"
    file = write_config(tmp_path, {"dlo_host_registration_mode": "disabled"}, {})
    with pytest.raises(OptionError) as caught:
        from_argv("--config", str(file), "--dlo", "--mode=preferred", "--root=/x", server=True)
    assert caught.value.cause == f"{file}: dlo_host_registration_mode: disabled has no effect here: --dlo-use-allgather is on"


def test_r3_a_server_is_composed_from_a_command_line_too() -> None:
    """R3: `server` decides, not the layer."""
    with pytest.raises(OptionError, match="--dlo-host-registration-mode"):
        from_argv("--dlo-host-registration-mode=disabled", server=True)
    assert from_argv("--dlo-host-registration-mode=disabled").given == {"dlo_host_registration_mode"}


@pytest.mark.parametrize(
    ("text", "cause", "way_out"),
    [
        ('root = "/x"', "{file}: root: no option has this name", "Did you mean host_weight_runtime_root?"),
        ('host-weight-runtime-mode = "x"', "{file}: host-weight-runtime-mode: no option", "Did you mean host_weight_runtime_mode?"),
        ("zzzzzzzz = 1", "{file}: zzzzzzzz: no option", "--help lists all options."),
        ("[stage.b]\nengin = 1", "{file}: [stage.b] engin: no option", "Did you mean engine?"),
        ('config = "x"', "{file}: config: cannot be set in a file", "Use --config or the variable HWR_CONFIG."),
        ('[stage.b]\nstage = "x"', "{file}: [stage.b] stage: cannot be set in a file", "Use --stage"),
        ('stage = "b"', "{file}: stage: not a table of tables", "Write options under [stage.NAME]."),
        ("engine = ", "config: {file} is not TOML: ", "Correct the file at that place."),
        ("engine = '\udcff'", "config: {file} is not TOML: ", "Correct the file at that place."),
        ("engine = " + "[" * 5000, "config: {file} is not TOML: nested too deeply", "Correct the file at that place."),
        ("engine = " + "1" * 5000, "config: {file} is not TOML: ", "Correct the file at that place."),
        ("engine = 1979-05-27", "{file}: engine: takes text, not date", "Allowed: "),
    ],
)
def test_a_file_is_refused_with_its_place(tmp_path: Path, text: str, cause: str, way_out: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((OptionError, OptionTypeError)) as caught:
        compose({"config": file}, environ={})
    assert caught.value.cause.startswith(cause.format(file=file))
    assert caught.value.way_out.startswith(way_out)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(OptionError) as caught:
        from_argv("--config", str(missing))
    assert caught.value.cause == f"--config: {missing} cannot be read: ENOENT (No such file or directory)"
    with pytest.raises(OptionError, match=r"HWR_CONFIG: .* EISDIR"):
        compose(environ={"HWR_CONFIG": str(tmp_path)})


def test_a_stage_that_is_not_there(tmp_path: Path) -> None:
    file = write_config(tmp_path, {}, {})
    with pytest.raises(OptionError) as caught:
        from_argv("--config", str(file), "--stage", "encoder")
    assert caught.value.cause == f"--stage: {file} has no table [stage.encoder]"
    assert caught.value.way_out == "Stages of this file: dit."
    with pytest.raises(OptionError, match="HWR_STAGE: a stage is a table of a file, and --config names none"):
        from_argv(environ={"HWR_STAGE": "dit"})


def test_a_misspelt_variable_is_noticed() -> None:
    environ = {"HWR_METRICS_PRT": "1", "HWR_RUN_ID": "x", "HWR_SOMETHING_ELSE": "1", "HWR_ENGINE": "e"}
    assert misspelt_variables(environ) == {"HWR_METRICS_PRT": "HWR_METRICS_PORT"}


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--dlo"], "--enable-distributed-layerwise-offload"),
        (["--dlo-resident-layers=0"], "--dlo-resident-layers"),
        (["--no-allgather"], "--dlo-use-allgather"),
        (["--ulysses-mode=strict"], "--ulysses-mode"),
        (["--sp=2"], "--ulysses-degree"),
        (["--ring=1"], "--ring-degree"),
        (
            ["--host-weight-runtime-build-admission=serialized", "--host-weight-runtime-max-store-gib=1"],
            "--host-weight-runtime-build-admission",
        ),
    ],
)
def test_running_with_what_is_not_built_is_refused(argv: list[str], flag: str) -> None:
    """Composing accepts it (R2, --print-config), running names it as the user wrote it (R19: modelled, refused)."""
    options = from_argv(*argv)
    with pytest.raises(NotImplementedYet) as caught:
        refuse_unimplemented(options)
    assert caught.value.cause.startswith(f"{flag} (")
    assert caught.value.cause.endswith("is not implemented in this version.")


def test_running_with_what_is_built_is_not_refused() -> None:
    refuse_unimplemented(Options.of())
    argv = ["--no-dlo", "--mode=required", "--root=/x", "--validation=full_checksum", "--host-weight-runtime-max-store-gib=1"]
    argv += ["--host-weight-runtime-max-artifact-gib=1", "--host-weight-runtime-min-free-gib=0"]
    refuse_unimplemented(from_argv(*argv, "--host-weight-runtime-build-admission=concurrent", "--engine=e", "--no-telemetry"))
    policy = ["--dlo-host-registration-mode=required", "--dlo-host-registration-limit-gib=1.5", "--hwr-registration-deadline-seconds=60"]
    refuse_unimplemented(from_argv(*policy, "--pin-cpu-memory"))


def test_a_refusal_to_run_names_variable_or_file(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedYet, match=r"^HWR_ULYSSES_DEGREE \(sequence parallelism\)"):
        refuse_unimplemented(compose(environ={"HWR_ULYSSES_DEGREE": "2"}))
    file = write_config(tmp_path, {}, {"ulysses_degree": 2})
    with pytest.raises(NotImplementedYet) as caught:
        refuse_unimplemented(compose({"config": file, "stage": "dit"}, environ={}))
    assert caught.value.cause.startswith(f"{file}: [stage.dit] ulysses_degree (")
