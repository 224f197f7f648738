"""A run is told as it was, however its process ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from probes_standins import checked, is_gone, stand_in, until

from diag.probes.child import Child, stoppable
from diag.probes.likeness import From, Likeness
from diag.probes.retention import Request, exit_code_of, measure
from hwr.errors import OptionError

SCHEMA_KEYS = {
    "schema_version", "arguments", "python", "torch", "safetensors", "kernel", "hostname", "pid", "cpu_affinity", "torch_threads",
    "pythonmalloc", "preparation_seconds", "samples",
}  # fmt: skip
SMALL = Request("get_tensor", iterations=2_000, sample_every=500, warmup=100)


def run_of(tmp_path: Path, body: str, **more: Any) -> dict[str, Any]:
    """Measure with a stand-in."""
    return measure(Request("reuse", **more), tmp_path / "x.samples.jsonl", probe=stand_in(tmp_path, body))


def test_a_whole_run_holds_the_probes_object_and_says_how_it_was_made(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    run = measure(SMALL, tmp_path / "x.samples.jsonl", seen.append)
    assert run.keys() >= SCHEMA_KEYS
    assert (run["complete"], run["ending"]["status"], run["ending"]["exit_code"]) == (True, "ended", 0)
    assert [sample["phase"] for sample in run["samples"]] == ["before_file", "baseline", *["loop"] * 4, "closed"]
    assert seen == run["samples"]
    assert run["run"]["command"][:2] == [sys.executable, str(Path(measure.__code__.co_filename).parent / "safetensors_retention.py")]
    assert run["run"]["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert run["run"]["started"].endswith("Z")
    assert run["run"]["seconds"] > 0
    assert run["neighbours"].keys() == {"started", "ended", "unread"}
    checked(run)


def test_a_probe_killed_half_way_leaves_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.jsonl"

    def kill(sample: Mapping[str, Any]) -> None:
        if sample["iterations"] >= 4_000:
            os.kill(json.loads(path.read_text().partition("\n")[0])["begin"]["pid"], signal.SIGKILL)

    run = measure(Request("get_tensor", iterations=2_000_000, sample_every=2_000), path, kill)
    assert run.keys() >= SCHEMA_KEYS
    assert (run["complete"], run["ending"]["status"], run["ending"]["signal"]) == (False, "signal", "SIGKILL")
    assert "did not send" in run["ending"]["message"]
    assert f"{run['samples'][-1]['iterations']:,} of 2,000,000 calls" in run["ending"]["message"]
    assert {"baseline", "loop"} < {sample["phase"] for sample in run["samples"]}
    assert run["torch"]
    assert run["arguments"]["iterations"] == 2_000_000
    assert exit_code_of(run) == 3
    assert path.exists()
    checked(run)


def test_a_killed_probe_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    run = run_of(tmp_path, "facts['hostname'] = os.environ['TMPDIR']; write({'begin': facts}); os.kill(os.getpid(), signal.SIGKILL)")
    assert run["hostname"].startswith("/")
    assert not Path(run["hostname"]).exists()


DEAF = """
deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
left = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
left.stdout.readline()
facts["hostname"] = left.pid
write({"begin": facts})
sample("loop", 7)
"""


@pytest.mark.parametrize(("ending", "status"), [("end()", "ended"), ("sys.exit(1)", "broken"), ("signal.pause()", "timeout")])
def test_nothing_of_the_group_outlives_its_leader(tmp_path: Path, ending: str, status: str) -> None:
    """A descendant that ignores SIGTERM is killed though the leader has ended by itself, or by the SIGTERM of the deadline."""
    run = run_of(tmp_path, DEAF + ending, timeout_seconds=1.0 if status == "timeout" else 60.0)
    assert run["ending"]["status"] == status
    until(lambda: is_gone(run["hostname"]))


def test_a_timeout_says_the_way_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, "signal.pause()", timeout_seconds=0.1)
    assert run["ending"]["message"].splitlines()[1] == "raise --timeout, or lower --iterations or --sample-every"


def test_a_deadline_ends_the_whole_group_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
facts["hostname"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]).pid
write({"begin": facts})
sample("baseline", 0)
sample("loop", 7)
while True:
    signal.pause()
""",
        timeout_seconds=1.0,
    )
    assert (run["complete"], run["ending"]["status"], run["ending"]["signal"]) == (False, "timeout", "SIGKILL")
    assert run["ending"]["message"].startswith("no result within 1 s (7 of 1,000,000 calls were sampled)")
    assert [sample["iterations"] for sample in run["samples"]] == [0, 7]
    assert exit_code_of(run) == 4
    until(lambda: is_gone(run["pid"]) and is_gone(run["hostname"]))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("print('broken measurement: a tensor lives', file=sys.stderr); sys.exit(1)", "broken", 3),
        ("print('cannot measure: no torch', file=sys.stderr); sys.exit(2)", "unusable", 3),
        ("print('noise\\nusage: x [-h]\\nx: error: no', file=sys.stderr); sys.exit(2)", "usage", 2),
        ("print('something else', file=sys.stderr); sys.exit(2)", "broken", 3),
        ("print('{}'); sys.exit(0)", "broken", 3),
        ("print('[1]'); sys.exit(0)", "broken", 3),
        ("sys.exit(77)", "broken", 3),
        ("os.abort()", "signal", 3),
    ],
)
def test_each_way_to_fail_has_its_status(tmp_path: Path, body: str, status: str, code: int) -> None:
    run = run_of(tmp_path, body)
    assert (run["complete"], run["ending"]["status"], exit_code_of(run)) == (False, status, code)
    assert run.keys() >= SCHEMA_KEYS
    assert (run["page_bytes"], run["executable"], run["implementation"]) == (None, None, None)
    assert run["arguments"]["mode"] == "reuse"
    assert run["samples"] == []
    checked(run)


def test_the_real_probe_judges_its_arguments(tmp_path: Path) -> None:
    refused = measure(Request("get_tensor", iterations=0), tmp_path / "a")
    assert (refused["ending"]["status"], refused["ending"]["exit_code"]) == ("usage", 2)
    unusable = measure(Request("get_tensor", header_bytes=8), tmp_path / "b")
    assert (unusable["ending"]["status"], unusable["ending"]["exit_code"]) == ("unusable", 2)
    assert "cannot measure: " in unusable["ending"]["message"]
    checked(unusable)


def test_any_amount_of_output_is_read(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, "write({'begin': facts}); facts['hostname'] = 'x' * (8 << 20); sys.stderr.write('e\\x1b[2J' * (1 << 20) + '\\n'); end()"
    )
    assert run["complete"]
    assert len(run["hostname"]) == 8 << 20
    assert "\x1b" not in run["ending"]["message"]


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    body = 'write({"begin": facts}); sample("loop", 5); os.write(stream, b\'{"sample": {"phase": "lo\'); os.kill(os.getpid(), 9)'
    run = run_of(tmp_path, body)
    assert [sample["iterations"] for sample in run["samples"]] == [5]
    assert any("torn" in warning for warning in run["warnings"])


def test_lines_that_are_no_objects_are_left_out_and_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, "write({'begin': facts}); os.write(stream, b'\\0\\xff\\n[1]\\n'); sample('loop', 5); sys.exit(1)")
    assert [sample["iterations"] for sample in run["samples"]] == [5]
    assert sum("no JSON object" in warning for warning in run["warnings"]) == 2


@pytest.mark.parametrize("what", ["os.unlink(given['samples'])", "os.rename(given['samples'], given['samples'] + '.x')"])
def test_a_samples_file_that_vanishes_costs_a_warning_only(tmp_path: Path, what: str) -> None:
    run = run_of(tmp_path, f"write({{'begin': facts}}); {what}; sample('loop', 5); end()")
    assert run["complete"]
    assert any("cannot be read any more: ENOENT" in warning for warning in run["warnings"])


def test_a_samples_file_that_cannot_be_made_starts_nothing(tmp_path: Path) -> None:
    run = measure(SMALL, tmp_path / "absent" / "x.samples.jsonl")
    assert (run["ending"]["status"], run["run"]["command"]) == ("unusable", [])
    assert "ENOENT" in run["ending"]["message"]


def test_what_a_library_prints_does_not_cost_the_result(tmp_path: Path) -> None:
    run = run_of(tmp_path, "print('hello from a library'); write({'begin': facts}); end()")
    assert run["complete"]
    assert any("standard output" in warning for warning in run["warnings"])


def test_the_probe_sees_no_variable_of_ours_and_no_module_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HWR_RUN_DIR": "x", "PYTHONINSPECT": "1", "PYTHONMALLOC": "malloc", "CUDA_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, "import colorsys; facts['hostname'] = dict(os.environ); write({'begin': facts}); end()")
    seen = run["hostname"]
    assert run["complete"], run["ending"]
    assert seen["PYTHONMALLOC"] == "malloc"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert not [name for name in seen if name.startswith("HWR_") or name == "PYTHONINSPECT"]


def test_a_likeness_decides_the_allocator_variables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    worker = Likeness(7, sys.executable, From.ARGV0, (0,), {"PYTHONMALLOC": "pymalloc"})
    body = "facts['hostname'] = dict(os.environ); write({'begin': facts}); end()"
    run = run_of(tmp_path, body, like=worker, environment=worker.environment)
    assert run["hostname"]["PYTHONMALLOC"] == "pymalloc"
    assert "MALLOC_ARENA_MAX" not in run["hostname"]
    assert run["run"]["environment"]["MALLOC_ARENA_MAX"] is None
    assert run["run"]["like"]["python_from"] == "argv0"


def test_the_child_is_bound_from_its_first_instruction_and_we_are_not(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    chosen = max(before)
    body = "facts['cpu_affinity'] = sorted(os.sched_getaffinity(0)); write({'begin': facts}); end()"
    assert run_of(tmp_path, body, cpu=(chosen,))["cpu_affinity"] == [chosen]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(OptionError, match=r"--cpu: this process may not run on 4095\nAllowed here: "):
        run_of(tmp_path, body, cpu=(chosen, 4095))
    assert os.sched_getaffinity(0) == before


def test_a_signal_to_us_ends_the_probe_and_what_came_is_told(tmp_path: Path) -> None:
    def interrupt(sample: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with stoppable() as stop:
        body = "write({'begin': facts}); sample('loop', 5)\nwhile True: signal.pause()"
        run = measure(Request("reuse"), tmp_path / "x", interrupt, stop=stop, probe=stand_in(tmp_path, body))
    assert (stop.exit_code, stop.name) == (128 + signal.SIGTERM, "SIGTERM")
    assert (run["ending"]["status"], run["ending"]["signal"], run["complete"]) == ("signal", "SIGTERM", False)
    assert "hwr-diag was asked to end by SIGTERM" in run["ending"]["message"]
    assert [sample["iterations"] for sample in run["samples"]] == [5]
    assert is_gone(run["pid"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    def interrupt(sample: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with stoppable() as stop:
        body = "signal.signal(15, signal.SIG_IGN); write({'begin': facts}); sample('loop', 5)\nwhile True: signal.pause()"
        run = measure(Request("reuse"), tmp_path / "x", interrupt, stop=stop, probe=stand_in(tmp_path, body))
    assert run["ending"]["signal"] == "SIGKILL"
    assert stop.count == 2
    deaf = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
    with Child(deaf, os.environ) as child:
        until(lambda: int(Path(f"/proc/{child.pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16) & 1 << 14 != 0)
        child.end(stop, grace_s=1e6)
        assert child.returncode == -signal.SIGKILL


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_whatever_the_progress_raises_the_probe_does_not_outlive_it(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail(sample: Mapping[str, Any]) -> None:
        pids.append(sample["rss_bytes"])
        raise RuntimeError("the view is broken")

    body = "write({'begin': facts}); sample('loop', 5, rss_bytes=os.getpid())\nwhile True: signal.pause()"
    with pytest.raises(RuntimeError, match="the view is broken"):
        measure(Request("reuse"), tmp_path / "x", fail, probe=stand_in(tmp_path, body))
    assert is_gone(pids[0])
