"""`hwr-diag retention run`: its report, its files, its statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from probes_standins import checked, is_gone, until

from diag.cli.retention_run import MODES
from diag.probes import hwr_retention, safetensors_retention
from diag.report.retention_text import lines
from hwr.telemetry.reader import JournalReader

REPOSITORY = Path(__file__).parents[2]
SMALL = ("--iterations", "2000", "--sample-every", "200", "--warmup", "200")


def command(*arguments: str) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "diag.cli.main", "retention", "run", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which the command finds what is tested here."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


def ran(*arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment(**more), timeout=120, check=False)


def test_every_case_of_the_probes_can_be_asked_for_and_no_other() -> None:
    assert set(MODES) == {*safetensors_retention.CASES, *hwr_retention.CASES}


def test_json_is_the_whole_run_object_with_its_control(tmp_path: Path) -> None:
    done = ran("--mode", "get_tensor", *SMALL, "--json", HWR_RUN_DIR=str(tmp_path))
    run = checked(json.loads(done.stdout))
    assert run["schema_version"] == 1
    assert run["complete"]
    assert done.returncode == {"retained": 1, "flat": 0, "inconclusive": 3}[run["analysis"]["verdict"]]
    control = run["control"]
    assert control["arguments"]["mode"] == "reuse"
    assert {name: control["arguments"][name] for name in ("tensor_elements", "iterations", "offset_bytes")} == {
        name: run["arguments"][name] for name in ("tensor_elements", "iterations", "offset_bytes")
    }
    assert control["pid"] != run["pid"]
    assert not {"control", "analysis"} & control.keys()
    assert "Traceback" not in done.stderr


def test_files_of_a_directory_are_numbered_and_the_samples_are_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    for number in (1, 2):
        done = ran("--mode", "reuse", *SMALL, "-o", str(out), cwd=tmp_path / "elsewhere", HWR_RUN_DIR=str(tmp_path), GIT_DIR="")
        assert done.returncode in (0, 3), done.stderr
        run = json.loads((out / f"reuse-64-{number}.json").read_text())
        assert (run["complete"], run["control"]) == (True, None)
    (out / "reuse-64-o8-1.samples.jsonl").write_text("")  # another run's, in progress or killed
    ran("--mode", "reuse", *SMALL, "--offset-bytes", "8", "-o", str(out), HWR_RUN_DIR=str(tmp_path))
    assert {path.name for path in out.iterdir()} - {"revision.txt", "working-tree.txt", "working-tree.patch"} == {
        "reuse-64-1.json", "reuse-64-2.json", "reuse-64-o8-1.samples.jsonl", "reuse-64-o8-2.json",
    }  # fmt: skip


def test_the_state_of_the_repository_is_kept_beside(tmp_path: Path) -> None:
    where = tmp_path / "repository"
    where.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=where, check=True)
    done = ran("--mode", "reuse", *SMALL, "-o", str(tmp_path / "out"), cwd=where, HWR_RUN_DIR=str(tmp_path))
    assert (tmp_path / "out/revision.txt").exists()
    assert "hwr-diag: note: the repository has no commit yet" in done.stderr


def test_the_report_says_the_verdict_first_and_what_grew(tmp_path: Path) -> None:
    done = ran("--mode", "get_tensor", "--no-control", *SMALL, HWR_RUN_DIR=str(tmp_path))
    said = done.stdout.splitlines()
    assert re.fullmatch(r"(retained|flat|inconclusive): get_tensor, 64 elements at offset 0, 2,000 calls", said[0])
    assert any(re.fullmatch(r"growth since the baseline +loop +closed", line) for line in said)
    for name in ("private", "anonymous", "RSS", "descriptors", "interpreter blocks", "anonymous bytes"):
        assert any(line.startswith(f"  {name} ") for line in said), name
    assert any(line.startswith("  malloc bytes ") for line in said) == (os.confstr("CS_GNU_LIBC_VERSION") is not None)
    assert any(line.startswith("    by closing alone ") for line in said)
    assert done.stderr.splitlines()[0] == "get_tensor, 64 elements, offset 0: preparing"
    assert "docs/retention.md" in said[-1]
    assert max(len(line) for line in said if not line.startswith("warning: ")) <= 250  # one names the processes that came and went


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mode", "nothing"), "argument --mode: invalid choice: 'nothing'"),
        (("--mode", "reuse", "--iterations", "0"), "argument --iterations: '0' is not a whole number of at least 1"),
        (("--mode", "reuse", "--iterations", "1e3"), "argument --iterations: '1e3' is not a whole number"),
        (("--mode", "reuse", "--timeout", "nan"), "argument --timeout: 'nan' is not a number of seconds above 0"),
        (("--mode", "reuse", "--header-bytes", "12"), "argument --header-bytes: '12' is not a multiple of 8"),
        (("--mode", "reuse", "--python", ""), "argument --python: '' is blank"),
        (("--mode", "reuse", "-o", ""), "argument -o/--output: '' is blank"),
        (("--mode", "reuse", "-o", " "), "argument -o/--output: ' ' is blank"),
        (("--mode", "reuse", "-o", "/dev/null"), "-o /dev/null: ENOTDIR (Not a directory)"),
        (("--mode", "call", "--call", ""), "--call: '' is not FILE.py:FUNCTION"),
        (("--mode", "call"), "arguments: --mode call and --call FILE.py:FUNCTION go together"),
        (("--mode", "reuse", "--python", "/bin/true"), "--python: /bin/true is not a Python that works"),
        (("--mode", "reuse", "--cpu", "x"), "--cpu: 'x' is not a list of processors"),
        (("--mode", "reuse", "--like", "4194305"), "--like 4194305: there is no such process"),
        (("--mode", "reuse", "-o", "/proc/absent"), "-o /proc/absent: ENOENT"),
        (("--mode", "reuse", "--iter", "5"), "no such argument: --iter"),
    ],
)
def test_what_is_refused_is_two_lines_and_no_report(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = ran(*arguments, HWR_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    refusal = [line for line in done.stderr.splitlines() if not line.endswith(": preparing")]
    assert len(refusal) == 2, done.stderr
    assert said in refusal[0]


def test_what_cannot_be_measured_is_3_and_a_timeout_is_4(tmp_path: Path) -> None:
    done = ran("--mode", "reuse", "--header-bytes", "8", HWR_RUN_DIR=str(tmp_path))
    assert done.returncode == 3
    assert done.stdout.startswith("not measured: nothing can be measured here (reuse, ")
    done = ran("--mode", "get_tensor", "--timeout", "0.2", "--json", HWR_RUN_DIR=str(tmp_path))
    run = checked(json.loads(done.stdout))
    assert done.returncode == 4
    assert (run["complete"], run["ending"]["status"], run["control"], run["analysis"]) == (False, "timeout", None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_a_truthful_object_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    asked = command("--mode", "get_tensor", "--iterations", "5000000", "--sample-every", "1000", "-o", str(out), "--json")
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(HWR_RUN_DIR=str(tmp_path))
    ) as process:
        samples = out / "get_tensor-64-1.samples.jsonl"
        until(lambda: samples.exists() and b'"loop"' in samples.read_bytes(), 60)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    run = json.loads((out / "get_tensor-64-1.json").read_text())
    assert json.loads(stdout) == checked(run)
    assert (run["complete"], run["ending"]["status"], run["ending"]["signal"]) == (False, "signal", "SIGTERM")
    assert signal.Signals(number).name in run["ending"]["message"]
    assert run["samples"][-1]["phase"] == "loop"
    assert run["control"] is None
    assert is_gone(run["pid"])
    assert not samples.exists()
    assert "Traceback" not in stderr


def test_killed_without_a_word_the_probe_goes_too_and_its_samples_stay(tmp_path: Path) -> None:
    asked = command("--mode", "get_tensor", "--iterations", "5000000", "--sample-every", "1000", "-o", str(tmp_path / "out"))
    with subprocess.Popen(
        asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(HWR_RUN_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    ) as process:
        samples = tmp_path / "out/get_tensor-64-1.samples.jsonl"
        until(lambda: samples.exists() and b'"loop"' in samples.read_bytes(), 60)
        pid = json.loads(samples.read_text().partition("\n")[0])["begin"]["pid"]
        process.kill()
    until(lambda: is_gone(pid))
    assert b'"loop"' in samples.read_bytes()


def test_a_full_disk_is_said_and_no_traceback(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    shell = f"mount -t tmpfs -o size=4k none {tmp_path} && exec " + " ".join(command("--mode", "reuse", *SMALL, "-o", str(tmp_path)))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell], capture_output=True, text=True, cwd="/", env=environment(HWR_TELEMETRY="off"), timeout=120
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("not measured: ")
    assert "nothing can be measured here" in done.stdout
    assert "No space left on device" in done.stdout
    assert "reuse-64-1.json could not be written: ENOSPC" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_output_is_not_the_verdict(tmp_path: Path, form: tuple[str, ...]) -> None:
    """Nobody got the answer: could not measure, as with /dev/full; with `-o` the run is there all the same."""
    asked = " ".join(command("--mode", "reuse", "--header-bytes", "8", "-o", str(tmp_path / "out"), *form))
    for where, problem in ((">&-", "EBADF"), (">/dev/full", "ENOSPC")):
        given = environment(HWR_TELEMETRY="off")
        done = subprocess.run(["sh", "-c", f"{asked} {where}"], stderr=subprocess.PIPE, text=True, env=given, timeout=60, check=False)
        assert done.returncode == 3
        assert f"the report could not be written: {problem}" in done.stderr
    assert (tmp_path / "out" / "reuse-64-1.json").exists()


def test_the_journal_tells_of_the_run(tmp_path: Path) -> None:
    ran("--mode", "get_tensor", *SMALL, "--run-dir", str(tmp_path))
    (directory,) = {path.parent for path in tmp_path.rglob("*.jsonl")}
    reader = JournalReader(directory, from_start=True)
    counted = reader.poll().events
    reader.close()
    assert counted["hwr.retention.run.begin"] == counted["hwr.retention.run.end"] == counted["hwr.retention.memory.report"] == 2
    assert counted["hwr.retention.run.progress"] > 0


def test_like_takes_on_a_live_worker(tmp_path: Path) -> None:
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    given = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        chosen = max(os.sched_getaffinity(0))
        os.sched_setaffinity(worker.pid, {chosen})
        done = ran("--mode", "reuse", *SMALL, "--like", str(worker.pid), "--json", HWR_RUN_DIR=str(tmp_path))
        worker.communicate()
    run = json.loads(done.stdout)
    assert run["executable"] == sys.executable
    assert run["cpu_affinity"] == [chosen]
    assert run["allocator"]["environment"]["MALLOC_ARENA_MAX"] == "1"
    assert run["run"]["like"]["pid"] == worker.pid


def test_the_report_survives_whatever_a_run_object_lacks() -> None:
    run: dict[str, Any] = {"arguments": {"mode": "x\x1b[2J"}, "samples": [], "python": "3", "warnings": ["a\nb"], "analysis": None}
    said = "\n".join(lines({**run, "ending": {"status": "ended"}}))
    assert "\x1b" not in said
    assert said.startswith("not judged: x\\x1b[2J, - elements at offset 0, - calls")
