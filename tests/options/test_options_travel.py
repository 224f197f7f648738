"""Options reach every rank unchanged (R2), and building them touches nothing (R4)."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hwr.cli.arguments import add_options, composed
from hwr.errors import OptionError, OptionTypeError
from hwr.options import OPTIONS, HostWeightRuntimeOptions, Options, SequenceParallelOptions, compose
from hwr.outcomes import RegistrationMode, RuntimeMode, ValidationLevel
from hwr.usage import HwrParser

ALL_AWAY = [
    "--host-weight-runtime-mode=preferred",
    "--host-weight-runtime-root=/srv/weights-that-are-not-there",
    "--host-weight-runtime-validation=full_checksum",
    "--enable-distributed-layerwise-offload",
    "--dlo-no-use-allgather",
    "--dlo-resident-layers=3",
    "--dlo-host-registration-mode=disabled",
    "--dlo-host-registration-limit-gib=80",
    "--no-pin-cpu-memory",
]
DEADLINE_S = 60


def all_away() -> Options:
    parser = HwrParser(prog="hwr run")
    add_options(parser)
    return composed(parser.parse_args(ALL_AWAY), {"HWR_ENGINE": "eight"}, server=True)


def answer_as_rank(pipe: Connection) -> None:
    """Be a rank: take the options as text and pickled, say what arrived."""
    text, pickled = pipe.recv()
    arrived = Options.from_json(text)
    pipe.send((arrived, arrived == pickled, sorted(arrived.given), dict(arrived.origins), arrived.to_json()))
    pipe.close()


def test_r2_every_spawned_rank_holds_equal_options() -> None:
    """R2: all options away from their defaults reach each rank's object, with the set of those given."""
    options = all_away()
    context = multiprocessing.get_context("spawn")
    for _rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=answer_as_rank, args=(theirs,))
        process.start()
        theirs.close()
        ours.send((options.to_json(), options))
        assert ours.poll(DEADLINE_S)
        arrived, equal, given, origins, text = ours.recv()
        process.join(DEADLINE_S)
        assert process.exitcode == 0
        ours.close()
        assert arrived == options
        assert equal
        assert given == sorted(options.given)
        assert origins == dict(options.origins)
        assert text == options.to_json()
    runtime, dlo = options.host_weight_runtime, options.distributed_layerwise_offload
    assert (runtime.mode, runtime.validation) == (RuntimeMode.PREFERRED, ValidationLevel.FULL_CHECKSUM)
    assert runtime.root == Path("/srv/weights-that-are-not-there")
    assert (dlo.host_registration_mode, dlo.host_registration_limit_gib) == (RegistrationMode.DISABLED, 80.0)
    assert dlo.registration_limit_bytes == 80 * 2**30
    assert (dlo.enabled, dlo.use_allgather, dlo.resident_layers, dlo.pin_cpu_memory) == (True, False, 3, False)
    assert len(options.given) == len(ALL_AWAY) + 1
    assert options.origins["engine"] == "environment HWR_ENGINE"


def test_every_copy_is_equal(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xe9-\xff")  # no UTF-8: a path may be any bytes
    options = Options.of(host_weight_runtime_root=tmp_path / name, dlo_host_registration_limit_gib="0.1", metrics_port=0)
    copies = [
        Options.from_json(options.to_json()),
        pickle.loads(pickle.dumps(options)),
        copy.deepcopy(options),
        dataclasses.replace(options),
    ]
    assert all(other == options and hash(other) == hash(options) for other in copies)
    assert options.to_json().isascii()


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"schema_version": 2, "values": {}, "origins": {}}', "[" * 100_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not the options of this version"):
        Options.from_json(text)


def test_options_of_another_version_are_refused() -> None:
    """A rank that lacks an option would run with its default and not know."""
    with pytest.raises(OptionError, match="not the options of this version"):
        Options.from_json(Options.of().to_json().replace('"engine"', '"motor"'))
    with pytest.raises(OptionError, match="is no origin"):
        Options.from_json(Options.of().to_json().replace('"metrics_port":"default"', '"metrics_port":"hearsay"'))


def test_a_value_away_from_its_default_is_the_callers() -> None:
    """Built by hand or replaced, origins stay true."""
    options = Options(host_weight_runtime=HostWeightRuntimeOptions(stall_after_seconds=5.0))
    assert options.given == {"hwr_stall_after_seconds"}
    changed = dataclasses.replace(options, sequence_parallel=SequenceParallelOptions(ring_degree=2))
    assert changed.origins["ring_degree"] == "call"
    with pytest.raises(OptionTypeError, match="host_weight_runtime: takes HostWeightRuntimeOptions"):
        Options(host_weight_runtime=None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no option has this name"):
        Options(origins={"motor": "call"})


BUILD = """
import sys
root = sys.stdin.read()
from hwr.options import CONCERNS, HostWeightRuntimeOptions, Options, compose, refuse_unimplemented
{mark}
for holder in CONCERNS.values():
    holder()
HostWeightRuntimeOptions(mode="required", root=root)
values = dict(host_weight_runtime_mode="required", host_weight_runtime_root=root, run_dir=root,
              enable_distributed_layerwise_offload=True, dlo_use_allgather=False, dlo_host_registration_mode="required")
options = Options.of(**values)
compose(values, environ={{"HWR_RUN_DIR": root}})
assert Options.from_json(options.to_json()) == options
{mark}
print(*sorted(sys.modules))
print(open("/proc/self/maps").read())
"""


def build_apart(root: Path, mark: str = "", prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    # The root goes by stdin: in the arguments it would stand in a trace for another reason.
    command = [*prefix, sys.executable, "-c", BUILD.format(mark=mark)]
    return subprocess.run(command, input=str(root), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_r4_building_options_creates_nothing_and_loads_no_library(tmp_path: Path) -> None:
    """R4: every options object, with a root that does not exist."""
    root = tmp_path / "not" / "there"
    done = build_apart(root)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    modules = set(done.stdout.partition("\n")[0].split())
    assert "hwr.options" in modules
    assert not modules & {"torch", "ctypes", "safetensors", "numpy", "blake3", "orjson", "prometheus_client", "textual", "psutil"}
    assert not any(word in done.stdout.partition("\n")[2] for word in ("libcuda", "libtorch", "libnvidia"))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_r4_as_the_kernel_saw_it(tmp_path: Path) -> None:
    """R4: between two marks, no file is named to the kernel at all, the root least of all."""
    root, trace = tmp_path / "not-there", tmp_path / "trace"
    mark = 'import os; os.access("/mark-of-the-test", 0)'
    done = build_apart(root, mark, ("strace", "-f", "-qq", "-e", "trace=%file", "-o", str(trace)))
    if not trace.exists() or not trace.read_text():
        pytest.skip("this user may not trace")
    assert done.returncode == 0, done.stderr
    calls = trace.read_text().splitlines()
    marks = [number for number, call in enumerate(calls) if "/mark-of-the-test" in call]
    assert len(marks) == 2
    assert calls[marks[0] + 1 : marks[1]] == []
    assert not any(root.name in call for call in calls)


def test_r4_refusals_touch_nothing_either(tmp_path: Path) -> None:
    """R4: a root below a file, or one that cannot be entered, is no matter of the options."""
    file = tmp_path / "file"
    file.touch()
    options = compose({"host_weight_runtime_mode": "required", "host_weight_runtime_root": file / "below"}, environ={})
    assert options.host_weight_runtime.root == file / "below"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert len(options.origins) == len(OPTIONS)
