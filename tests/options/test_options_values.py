"""A value is read once, in one normal form, or refused with the option's name and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwr.errors import EXIT_USAGE, HwrError, OptionError, OptionTypeError
from hwr.options import (
    BY_NAME,
    OPTIONS,
    DistributedLayerwiseOffloadOptions,
    HostWeightRuntimeOptions,
    Options,
    SequenceParallelOptions,
    TelemetryOptions,
    UlyssesMode,
)
from hwr.outcomes import BuildAdmission, RegistrationMode, RuntimeMode, ValidationLevel

GIB = 2**30
MOST_GIB = 2.0**33


def test_r1_defaults() -> None:
    """R1: the defaults, word for word."""
    runtime, dlo = HostWeightRuntimeOptions(), DistributedLayerwiseOffloadOptions()
    assert (runtime.mode, runtime.root, runtime.validation) == (RuntimeMode.DISABLED, None, ValidationLevel.MANIFEST_AND_METADATA)
    assert (dlo.enabled, dlo.use_allgather, dlo.resident_layers, dlo.pin_cpu_memory) == (False, True, 0, True)
    assert (dlo.host_registration_mode, dlo.host_registration_limit_gib) == (RegistrationMode.AUTO, 0.0)
    assert (runtime.coordination_timeout_seconds, runtime.build_admission) == (600.0, BuildAdmission.CONCURRENT)
    assert TelemetryOptions() == TelemetryOptions(enabled=True, run_dir=None, engine="default", metrics_port=None)
    assert SequenceParallelOptions().ulysses_mode is UlyssesMode.STRICT


@pytest.mark.parametrize("bad", ["fs_verity", "unknown", "FULL_CHECKSUM", "", None, 1, True, ["full_checksum"]])
def test_r3_validation_outside_its_set(bad: Any) -> None:
    """R3: an OptionError (ValueError and HwrError) that names the option and what is allowed."""
    with pytest.raises(OptionError) as caught:
        Options.of(host_weight_runtime_validation=bad)
    with pytest.raises(OptionError):
        HostWeightRuntimeOptions(validation=bad)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HwrError)
    assert caught.value.exit_code == EXIT_USAGE
    assert caught.value.cause.startswith("host_weight_runtime_validation: ")
    assert caught.value.way_out == "Allowed: manifest_and_metadata, full_checksum."


@pytest.mark.parametrize("bad", ["on", "off", "Auto", None, False])
def test_r3_registration_mode_outside_its_set(bad: Any) -> None:
    """R3: the same for the registration mode."""
    with pytest.raises(OptionError, match=r"(?s)dlo_host_registration_mode.*Allowed: auto, disabled, required\."):
        Options.of(dlo_host_registration_mode=bad)


ELIGIBLE: dict[str, Any] = {
    "host_weight_runtime_mode": "preferred",
    "host_weight_runtime_root": "/nowhere",
    "enable_distributed_layerwise_offload": True,
    "dlo_use_allgather": False,
}
INELIGIBLE = [
    ({"enable_distributed_layerwise_offload": False}, "enable_distributed_layerwise_offload is off"),
    ({"dlo_use_allgather": True}, "dlo_use_allgather is on"),
    ({"host_weight_runtime_mode": "disabled"}, "host_weight_runtime_mode is disabled"),
]


@pytest.mark.parametrize("mode", ["disabled", "required"])
@pytest.mark.parametrize(("change", "why"), INELIGIBLE, ids=["no-dlo", "allgather", "hwr-disabled"])
def test_r3_r5_registration_policy_of_a_server_needs_its_conditions(mode: str, change: dict[str, Any], why: str) -> None:
    """R3, R5: refused in a server without DLO, with AllGather, or with HWR disabled; a tool may have it."""
    values = ELIGIBLE | change | {"dlo_host_registration_mode": mode}
    with pytest.raises(OptionError) as caught:
        Options.of(**values)
    assert caught.value.cause == f"dlo_host_registration_mode: {mode} has no effect here: {why}"
    assert "allowed: auto, disabled, required" in caught.value.way_out
    assert Options.of(**values, server=False).value("dlo_host_registration_mode") == mode


@pytest.mark.parametrize("mode", list(RegistrationMode))
def test_r3_r5_an_eligible_server_may_choose_any_registration_mode(mode: RegistrationMode) -> None:
    """R3, R5: with DLO, without AllGather and with HWR, all modes are allowed."""
    options = Options.of(**ELIGIBLE, dlo_host_registration_mode=mode)
    assert options.distributed_layerwise_offload.host_registration_mode is mode


@given(st.one_of(st.integers(0, 2**33), st.floats(1 / GIB, MOST_GIB), st.just(0), st.just(-0.0)), st.booleans())
def test_r3_limit_takes_numbers_and_their_text(number: float, as_text: bool) -> None:
    """R3: int, float or numeric text, fractions allowed, one normal form; int(gib x 2^30) bytes, 0 as None."""
    dlo = DistributedLayerwiseOffloadOptions(host_registration_limit_gib=repr(number) if as_text else number)  # type: ignore[arg-type]
    assert type(dlo.host_registration_limit_gib) is float
    assert math.copysign(1, dlo.host_registration_limit_gib) == 1
    assert dlo.host_registration_limit_gib == number
    assert dlo.registration_limit_bytes == (int(float(number) * GIB) if number else None)


@given(st.one_of(st.floats(), st.integers(), st.text(), st.sampled_from(["1_0", "١", "0x1p3", "1e999", "nan", "-inf", " 1.5 ", "1,5"])))
def test_r3_limit_is_a_usable_float_or_an_option_error(value: float | str) -> None:
    """R3: negative, NaN, Inf and what is no number are refused, never clamped and never a crash."""
    try:
        dlo = Options.of(dlo_host_registration_limit_gib=value).distributed_layerwise_offload
    except OptionError as error:
        refusal = error
    else:
        assert dlo.host_registration_limit_gib == float(value)
        assert dlo.registration_limit_bytes is None or dlo.registration_limit_bytes >= 1
        return
    assert refusal.cause.startswith("dlo_host_registration_limit_gib: ")
    assert isinstance(value, str) or not (value == 0 or 1 / GIB <= value <= MOST_GIB)


@pytest.mark.parametrize("bad", [-1, -0.001, math.nan, math.inf, -math.inf, "nan", "inf", "-1", "", "1_0", "١", "two", 10**400])
def test_r3_limit_refuses(bad: Any) -> None:
    """R3: each of these by name; the property above could pass without ever meeting one."""
    with pytest.raises(OptionError, match="dlo_host_registration_limit_gib"):
        Options.of(dlo_host_registration_limit_gib=bad)


@pytest.mark.parametrize("bad", [True, None, b"1", [1], Fraction(1, 2), 1j])
def test_r3_limit_of_another_type_is_a_type_error(bad: Any) -> None:
    """R3: a TypeError that names the option."""
    with pytest.raises(OptionTypeError, match="dlo_host_registration_limit_gib: takes a number, not ") as caught:
        Options.of(dlo_host_registration_limit_gib=bad)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, HwrError)


def test_r3_a_limit_below_a_byte_does_not_become_no_ceiling() -> None:
    """R3: int() would make 0 of it, and 0 means no ceiling."""
    with pytest.raises(OptionError, match="out of range"):
        Options.of(dlo_host_registration_limit_gib=1e-12)


@pytest.mark.parametrize("mode", ["preferred", "required"])
@pytest.mark.parametrize(
    "root", [{}, {"host_weight_runtime_root": ""}, {"host_weight_runtime_root": " \t"}, {"host_weight_runtime_root": None}]
)
def test_r3_an_enabled_mode_needs_a_root(mode: str, root: dict[str, Any]) -> None:
    """R3: an enabled mode needs a non-blank root; a disabled one does not."""
    with pytest.raises(OptionError, match="host_weight_runtime_root: missing or blank"):
        Options.of(host_weight_runtime_mode=mode, **root)
    assert Options.of(host_weight_runtime_mode="disabled", **root).host_weight_runtime.root is None


@pytest.mark.parametrize("name", [row.name for row in OPTIONS if row.default is not None])
def test_r2_an_explicit_none_is_refused(name: str) -> None:
    """R2: None is no value of an option that has a default."""
    nothing: dict[str, Any] = {name: None}
    with pytest.raises((OptionError, OptionTypeError), match=name):
        Options.of(**nothing)


@pytest.mark.parametrize("name", ["dlo_resident_layers", "ulysses_degree", "ring_degree", "metrics_port"])
@pytest.mark.parametrize("bad", [True, False, 1.0, "1"])
def test_whole_numbers_are_no_bools(name: str, bad: Any) -> None:
    with pytest.raises(OptionTypeError, match=f"{name}: takes a whole number"):
        Options.of(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dlo_resident_layers", -1),
        ("ulysses_degree", 0),
        ("metrics_port", 65536),
        ("host_weight_runtime_max_store_gib", 0),
        ("host_weight_runtime_max_artifact_gib", -1),
        ("host_weight_runtime_min_free_gib", -0.5),
        ("hwr_coordination_timeout_seconds", 0),
        ("hwr_registration_deadline_seconds", math.inf),
        ("hwr_stall_after_seconds", "nan"),
        ("engine", ""),
        ("engine", "a b"),
        ("engine", "x" * 65),
        ("engine", "ok\n"),
        ("host_weight_runtime_root", "a\0b"),
        ("run_dir", "\ud800"),
        ("stage", "dit"),
    ],
)
def test_out_of_range(name: str, bad: Any) -> None:
    with pytest.raises(OptionError, match=name):
        Options.of(**{name: bad})


@pytest.mark.parametrize("name", ["enable_distributed_layerwise_offload", "dlo_use_allgather", "pin_cpu_memory", "telemetry"])
@pytest.mark.parametrize("bad", [0, 1, "true", None])
def test_flags_take_bools_only(name: str, bad: Any) -> None:
    with pytest.raises(OptionTypeError, match=f"{name}: takes a bool"):
        Options.of(**{name: bad})


@pytest.mark.parametrize("bad", [1, b"/x", Path])
def test_paths_are_text_or_path(bad: Any) -> None:
    with pytest.raises(OptionTypeError, match="run_dir: takes a path"):
        Options.of(run_dir=bad)


def test_serialized_admission_needs_a_store_limit() -> None:
    with pytest.raises(OptionError, match="serialized needs host_weight_runtime_max_store_gib"):
        Options.of(host_weight_runtime_build_admission="serialized")
    runtime = HostWeightRuntimeOptions(build_admission=BuildAdmission.SERIALIZED, max_store_gib=1.5)
    assert runtime.max_store_bytes == 3 * GIB // 2


def test_capacity_in_bytes() -> None:
    """Unset is no limit for store and artifact, 5 % of the filesystem for free space; 0 free space is a choice."""
    runtime = HostWeightRuntimeOptions()
    assert (runtime.max_store_bytes, runtime.max_artifact_bytes, runtime.min_free_bytes) == (None, None, None)
    assert HostWeightRuntimeOptions(min_free_gib=0.0).min_free_bytes == 0
    assert HostWeightRuntimeOptions(min_free_gib=0.25).min_free_bytes == GIB // 4


def test_values_are_frozen() -> None:
    options = Options.of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.host_weight_runtime.mode = RuntimeMode.REQUIRED  # type: ignore[misc]
    with pytest.raises(TypeError):
        options.origins["engine"] = "call"  # type: ignore[index]


def test_names_flags_and_variables_are_distinct() -> None:
    """One table: no name, flag or variable stands for two options."""
    flags = [flag for row in OPTIONS for flag in (*row.flags, *row.off)]
    assert len(flags) == len(set(flags))
    assert len({row.variable for row in OPTIONS}) == len(OPTIONS) == len(BY_NAME)
    assert all(row.is_flag == bool(row.off) for row in OPTIONS)
    assert all(Options.of().value(row.name) == row.default for row in OPTIONS)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"(?s)no option has this name.*Did you mean host_weight_runtime_root\?"):
        Options.of(root="/x")
