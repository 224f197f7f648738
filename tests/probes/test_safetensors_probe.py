"""The probe runs alone and tells the truth or nothing (R22-R24)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diag.analysis.retention import judge

REPOSITORY = Path(__file__).parents[2]
PROBES = REPOSITORY / "diag" / "probes"
PROBE = PROBES / "safetensors_retention.py"
OURS = PROBES / "hwr_retention.py"
SMALL = ("--iterations", "2000", "--sample-every", "500", "--warmup", "200")
FIELD_KEYS = {
    "schema_version", "arguments", "python", "torch", "safetensors", "kernel", "hostname", "pid", "cpu_affinity", "torch_threads",
    "pythonmalloc", "preparation_seconds", "samples",
}  # fmt: skip
FIELD_SAMPLE_KEYS = {"phase", "iterations", "loop_seconds", "rss_bytes", "private_bytes", "anonymous_bytes", "fd_count"}


def started(*arguments: str, probe: Path = PROBE, options: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the probe as a user would, from a directory that has nothing of ours."""
    return subprocess.run(
        [sys.executable, *options, str(probe), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
        env={**os.environ, **environment},
    )


def measured(*arguments: str, probe: Path = PROBE, options: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Return what a run printed, and insist on its success."""
    done = started(*arguments, probe=probe, options=options, **environment)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def read_by_the_field(text: str) -> dict[str, tuple[int, int]]:
    """Read the output with nothing but the keys of schema 1: the growth over the loop, and after everything was closed."""
    told = json.loads(text)
    assert told["schema_version"] == 1
    phases = {sample["phase"]: sample for sample in told["samples"]}
    assert [sample["phase"] for sample in told["samples"] if sample["phase"] != "loop"] == ["before_file", "baseline", "closed"]
    assert phases["loop"]["iterations"] == told["arguments"]["iterations"]
    baseline = phases["baseline"]
    return {
        name: (phases["loop"][name] - baseline[name], phases["closed"][name] - baseline[name])
        for name in ("private_bytes", "anonymous_bytes", "rss_bytes", "fd_count")
    }


def test_it_imports_nothing_of_ours() -> None:
    """R22: the standard library, torch, safetensors; memray and a file beside it only when asked."""
    names = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(PROBE.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names - sys.stdlib_module_names == {"torch", "safetensors"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the probe with nothing beside it."""
    copy = tmp_path_factory.mktemp("alone") / "probe.py"
    copy.write_bytes(PROBE.read_bytes())
    return copy


def test_a_copy_alone_gives_schema_1(alone: Path) -> None:
    """R22-R24: every key, every phase, and the last loop sample at the iterations that were asked for."""
    done = started("--mode", "get_tensor", "--iterations", "2500", "--sample-every", "1000", "--warmup", "100", probe=alone)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() >= FIELD_KEYS
    assert done.stdout == json.dumps(told, indent=2) + "\n", "one indented object, and nothing else"
    assert [(sample["phase"], sample["iterations"]) for sample in told["samples"]] == [
        ("before_file", 0), ("baseline", 0), ("loop", 1000), ("loop", 2000), ("loop", 2500), ("closed", 2500),
    ]  # fmt: skip
    for sample in told["samples"]:
        assert sample.keys() >= FIELD_SAMPLE_KEYS
        assert ("last_tensor_alive" in sample) == (sample["phase"] == "loop")
    assert not any(sample["last_tensor_alive"] for sample in told["samples"] if sample["phase"] == "loop")
    assert told["torch_threads"] == {"intraop": 1, "interop": 1}
    seconds = [sample["loop_seconds"] for sample in told["samples"]]
    assert seconds == sorted(seconds)
    assert read_by_the_field(done.stdout)["fd_count"] == (0, 0) or read_by_the_field(done.stdout)["fd_count"][1] < 0


@pytest.mark.parametrize(("offset", "elements", "per_call"), [(0, 16, 0), (0, 64, 1), (4000, 16, 2)])
def test_safetensors_keeps_an_integer_for_each_end_beyond_256(offset: int, elements: int, per_call: int) -> None:
    """What this version of safetensors does, exactly: one block for each absolute position that CPython has no object for."""
    told = measured("--mode", "get_tensor", "--tensor-elements", str(elements), "--offset-bytes", str(offset), *SMALL)
    classes, calls = told["size_classes"] or {}, told["arguments"]["iterations"]
    grown = {size: count["loop"] - count["baseline"] for size, count in classes.items()}
    assert round(grown.get("32", 0) / calls, 1) == per_call
    assert (told["file"]["begin"] > 256) + (told["file"]["end"] > 256) == per_call
    if per_call == 0 and sys.version_info < (3, 12):
        cached = told["cached_integer_references"]
        assert all(cached[str(told["file"][at])] in range(calls - 2, calls + 3) for at in ("begin", "end")), cached


@pytest.mark.parametrize("mode", ["get_slice", "load_file", "reopen", "reuse"])
def test_every_case_gives_the_payload_and_lets_go_of_it(mode: str) -> None:
    """Reuse alone has a live tensor at its samples; at the end nobody has, and no mapping of the file is left."""
    told = measured("--mode", mode, "--offset-bytes", "4000", *SMALL)
    loops = [sample for sample in told["samples"] if sample["phase"] == "loop"]
    assert all(sample["last_tensor_alive"] is (mode == "reuse") for sample in loops)
    assert told["samples"][-1]["reader_bytes"] == 0
    assert told["file"]["begin"] == 8 + told["file"]["header_bytes"] + 4000
    assert told["file"]["tensors"] == (64 if mode == "reopen" else 1)


def test_the_axes_are_independent() -> None:
    """Neither the element count nor the offset moves the header; --header-bytes does, and alone."""
    files = [
        measured("--mode", "reuse", "--iterations", "1", *more)["file"]
        for more in (["--tensor-elements", "16"], ["--tensor-elements", "4096"], ["--offset-bytes", "4000"], ["--header-bytes", "4096"])
    ]
    assert [file["header_bytes"] for file in files] == [160, 160, 160, 4096]
    assert [file["begin"] for file in files] == [168, 168, 4168, 4104]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--iterations", "10"],
        ["--mode", "nothing"],
        ["--mode", "reuse", "--iterations", "0"],
        ["--mode", "reuse", "--tensor-elements", "-1"],
        ["--mode", "reuse", "--sample-every", "x"],
        ["--mode", "reuse", "--warmup", "0"],
        ["--mode", "reuse", "--offset-bytes", "-8"],
        ["--mode", "reuse", "--header-bytes", "100"],
        ["--mode", "reuse", "--iter", "10"],
        ["--mode", "reuse", "--iterations", "1000000000", "--sample-every", "1"],
    ],
    ids=" ".join,
)
def test_arguments_are_judged_before_torch_is_loaded(arguments: list[str], tmp_path: Path) -> None:
    """R22: exit 2, a message, nothing on stdout; a torch that cannot be imported is not even asked for."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = started(*arguments, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr


def test_without_its_rollup_nothing_is_measured() -> None:
    """R22: exit 2 and the reason, before torch is loaded; here in a mount namespace without /proc."""
    command = f"umount -l /proc && exec {sys.executable} -X importtime {PROBE} --mode reuse"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot measure: /proc/self/smaps_rollup cannot be read" in done.stderr
    assert "torch" not in done.stderr


def test_an_interpreter_without_torch_is_no_finding(tmp_path: Path) -> None:
    """Exit 2: it says which interpreter and what is missing."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = started("--mode", "reuse", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"cannot measure: {sys.executable} has no torch")


def a_safetensors_that(body: str, directory: Path) -> str:
    """Write a package `safetensors` that behaves wrongly, around the real one; return its search path."""
    import safetensors

    package = directory / "safetensors"
    package.mkdir()
    real = Path(safetensors.__file__).parent
    (package / "__init__.py").write_text(
        f"__path__.append({str(real)!r})\nfrom safetensors._safetensors_rust import safe_open as real_open, __version__\n{body}"
    )
    return str(directory)


HOLDS_EVERY_TENSOR = """
kept = []
class safe_open:
    def __init__(self, *a, **k): self.real = real_open(*a, **k)
    def __enter__(self): self.reader = self.real.__enter__(); return self
    def __exit__(self, *raised): return self.real.__exit__(*raised)
    def get_tensor(self, name): kept.append(self.reader.get_tensor(name)); return kept[-1]
"""
GIVES_ANOTHER_PAYLOAD = HOLDS_EVERY_TENSOR.replace(
    "kept.append(self.reader.get_tensor(name)); return kept[-1]", "return self.reader.get_tensor(name) + 1"
)
RAISES = HOLDS_EVERY_TENSOR.replace("kept.append(self.reader.get_tensor(name)); return kept[-1]", "raise ValueError('bad file')")


@pytest.mark.parametrize("options", [(), ("-O",)], ids=["plain", "optimized"])
@pytest.mark.parametrize(
    ("mode", "body", "message"),
    [
        ("get_tensor", HOLDS_EVERY_TENSOR, "is alive after a garbage collection"),
        ("reuse", HOLDS_EVERY_TENSOR, "the last tensor is alive though everything that should hold it was let go of"),
        ("get_tensor", GIVES_ANOTHER_PAYLOAD, "is not the one that was written"),
        ("get_tensor", RAISES, "ValueError: bad file"),
    ],
    ids=["transient alive", "survives closing", "payload", "raises"],
)
def test_a_broken_measurement_gives_no_figures(mode: str, body: str, message: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """R23: exit 1, the message on stderr, stdout empty; by `raise`, so that -O changes nothing."""
    done = started("--mode", mode, *SMALL, options=options, PYTHONPATH=a_safetensors_that(body, tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("broken measurement: ")
    assert message in done.stderr


def test_samples_are_on_disk_as_they_are_taken(tmp_path: Path) -> None:
    """A begin line with all static keys, a line a sample, and the whole object at the end."""
    path = tmp_path / "samples.jsonl"
    told = measured("--mode", "reuse", *SMALL, "--samples", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["begin", *["sample"] * 7, "end"]
    assert lines[0]["begin"].keys() >= FIELD_KEYS
    assert [line["sample"] for line in lines[1:-1]] == told["samples"]
    assert lines[-1]["end"] == told


def test_a_sample_keeps_next_to_no_object() -> None:
    """R25: samples contain small bookkeeping; the control's growth over 100 samples shows how little."""
    told = measured("--mode", "reuse", "--iterations", "100", "--sample-every", "1", "--warmup", "1")
    blocks = [sample["allocated_blocks"] for sample in told["samples"] if sample["phase"] in ("baseline", "loop")]
    assert blocks[-1] - blocks[0] < 500


def test_without_pymalloc_blocks_are_unknown_and_not_zero() -> None:
    """PYTHONMALLOC=malloc: recorded, and None instead of a number that would look flat."""
    told = measured("--mode", "get_tensor", *SMALL, PYTHONMALLOC="malloc")
    assert told["pythonmalloc"] == "malloc"
    assert told["allocator"]["environment"]["PYTHONMALLOC"] == "malloc"
    assert {sample["allocated_blocks"] for sample in told["samples"]} == {None}
    assert told["size_classes"] is None


def test_the_stack_of_what_stays_is_named() -> None:
    """--attribute: where each of the integers was made."""
    told = measured("--mode", "get_tensor", "--iterations", "1000", "--sample-every", "500", "--attribute")
    first = told["attribution"][0]
    assert first["count_per_call"] == pytest.approx(1, abs=0.01)
    assert "PyLong_FromSsize_t" in first["stack"]
    assert any("PySlice::new" in frame for frame in first["stack"])
    assert any("get_tensor" in frame for frame in first["stack"])


def test_our_lease_is_flat() -> None:
    """Acquire, bind, let go, release: neither blocks nor anonymous memory follow the calls."""
    told = measured("--mode", "hwr_lease", "--iterations", "7000", "--sample-every", "700", "--offset-bytes", "4000", probe=OURS)
    found = judge({**told, "complete": True})
    assert found.verdict == "flat", found.basis
    assert told["file"]["offset_bytes"] >= 4000
    assert told["samples"][-1]["reader_bytes"] == 0


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' allocator, built."""
    library = tmp_path_factory.mktemp("allocator") / "retaining.so"
    source = Path(__file__).with_name("retaining.c")
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library


def called(allocator: Path, directory: Path, body: str, calls: int = 20_000) -> Any:
    """Measure a function over the allocator and judge it."""
    script = directory / "function.py"
    script.write_text(f"import ctypes, itertools\nlibrary = ctypes.CDLL({str(allocator)!r})\nnumbers = itertools.count(1)\n{body}")
    told = measured(
        "--mode", "call", "--call", f"{script}:call", "--iterations", str(calls), "--sample-every", str(calls // 10), probe=OURS
    )
    return judge({**told, "complete": True})


@pytest.mark.parametrize("size", [0, 8, 64, 4096])
def test_what_an_allocator_retains_is_found(size: int, allocator: Path, tmp_path: Path) -> None:
    """n bytes a call, no more and no less: the verdict is right and the interval contains n."""
    found = called(allocator, tmp_path, f"def call():\n    if library.retain(ctypes.c_size_t({size})):\n        raise MemoryError\n")
    assert found.verdict == ("retained" if size else "flat"), found.basis
    assert found.bytes_per_call.low <= size <= found.bytes_per_call.high, found.bytes_per_call
    assert found.bytes_per_call.high - found.bytes_per_call.low < max(16, size / 4)
    assert abs(found.classes["other_anonymous"] - size * 20_000) < 64 << 10


def test_what_malloc_hands_out_and_nobody_frees_is_found(allocator: Path, tmp_path: Path) -> None:
    """Small blocks fill free space that malloc had: pages show too little at first, malloc's own count shows all of it."""
    found = called(allocator, tmp_path, "def call():\n    library.hold(ctypes.c_size_t(24))\n")
    assert found.verdict == "retained", found.basis
    assert found.malloc_bytes_per_call.low <= 32 <= found.malloc_bytes_per_call.high, found.malloc_bytes_per_call


RETAIN_THEN = """
def call():
    if next(numbers) == {at}:
        library.{later}()
    elif next(turns) < {at}:
        library.{take}(ctypes.c_size_t({size}))
turns = itertools.count(1)
call.close = library.{later}
"""


@pytest.mark.parametrize(("take", "later"), [("retain", "release"), ("hold", "let_go")])
def test_what_is_freed_later_is_not_retained(take: str, later: str, allocator: Path, tmp_path: Path) -> None:
    """Taken for the first half of the calls and freed then: given back to the kernel, or held free by malloc."""
    found = called(allocator, tmp_path, RETAIN_THEN.format(at=11_000, take=take, later=later, size=256))
    assert found.verdict == "flat", found.basis
    assert found.classes["allocator_free"] > 1 << 20 if take == "hold" else "fell back" in " ".join(found.basis)


def test_what_is_freed_at_close_was_retained_until_then(allocator: Path, tmp_path: Path) -> None:
    """The loop grew to its end; closing gave it back, and the report says how much."""
    found = called(allocator, tmp_path, RETAIN_THEN.format(at=1 << 40, take="retain", later="release", size=256))
    assert found.verdict == "retained"
    assert found.released_at_close_bytes > 256 * 19_000


def test_python_objects_that_are_let_go_of_later_are_not_retained(allocator: Path, tmp_path: Path) -> None:
    """A cache that is cleared: blocks go back to the baseline."""
    body = "kept = []\ndef call():\n    kept.clear() if next(numbers) > 11_000 else kept.append(object())\n"
    found = called(allocator, tmp_path, body)
    assert found.verdict != "retained", found.basis
    assert "fell back" in found.basis[0]
