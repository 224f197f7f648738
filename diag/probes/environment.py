"""What the figures of a retention matrix depend on beside its arguments.

Owns the description of the interpreter that measures, of its torch and safetensors (version, build, revision), of the kernel, the CPU and
the allocator's environment. Promises to import neither library, and to leave out what this machine does not tell. Refuses to change any.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hwr.errors import OptionError, Unavailable, errno_text
from hwr.procfs.reading import PROC_ROOT
from hwr.units import one_line

SCHEMA_VERSION: Final = 1
ASKING_SECONDS: Final = 60.0  # an interpreter on a cold network filesystem takes long to start
SYS_ROOT: Final = Path("/sys")
PROBES: Final = ("safetensors_retention.py", "hwr_retention.py")
ALLOCATOR: Final = re.compile(
    r"PYTHONMALLOC(STATS)?|LD_PRELOAD|GLIBC_TUNABLES|MALLOC_\w+|\w*MALLOC_CONF|MIMALLOC_\w+|TCMALLOC_\w+", re.ASCII
)
# What a resumed matrix must find unchanged; the rest (governor, load, hostname) is told and may differ.
BINDING: Final = ("python", "packages", "libc", "hwr_suite", "probe_sha256", "kernel", "cpu", "allocator", "transparent_hugepage")

# Runs in the interpreter that measures. A wheel's RECORD names every file with its digest, so that its own digest names the build, what
# the installer adds (bytecode, scripts, its notes) left out; an editable checkout has no such list, so its native modules are hashed, and
# its revision is asked for.
_ASK: Final = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # a checkout in the current directory is not what the probe will find
import hashlib, importlib.util, json, os, platform, subprocess
from importlib import metadata
told = {"python": {"executable": sys.executable, "version": platform.python_version(), "implementation": platform.python_implementation(),
                   "build": sys.version.replace(chr(10), " ")}, "packages": {}}
for name in ("torch", "safetensors"):
    found = told["packages"][name] = {"version": None}
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    found["version"] = distribution.version
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    record = distribution.read_text("RECORD")
    if record:
        added = ("__pycache__", ".dist-info/", "../")
        own = [line for line in sorted(record.splitlines()) if not any(part in line for part in added)]
        found["record_sha256"] = hashlib.sha256(chr(10).join(own).encode()).hexdigest()
    if direct.get("vcs_info"):
        found["revision"] = direct["vcs_info"].get("commit_id")
    if direct.get("dir_info", {}).get("editable"):
        found["editable"] = direct.get("url", "")
        place = direct.get("url", "").removeprefix("file://")
        try:
            asked = subprocess.run(["git", "-C", place, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
            found["revision"] = asked.stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            pass
    if name == "safetensors":
        spec = importlib.util.find_spec(name)
        for directory in (spec.submodule_search_locations or []) if spec else []:
            for entry in sorted(os.listdir(directory)):
                if entry.endswith(".so"):
                    with open(os.path.join(directory, entry), "rb") as file:
                        found["native_sha256"] = hashlib.sha256(file.read()).hexdigest()
try:
    told["libc"] = os.confstr("CS_GNU_LIBC_VERSION")
except (ValueError, OSError):
    told["libc"] = None
print(json.dumps(told))
"""


def describe(
    python: str, environment: Mapping[str, str], *, proc_root: Path = PROC_ROOT, sys_root: Path = SYS_ROOT
) -> dict[str, Any] | Unavailable:
    """Describe where `python` would measure in an environment; Unavailable if it cannot be asked."""
    try:
        asked = subprocess.run(
            [python, "-c", _ASK],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ASKING_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        told = json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 and asked.stdout.strip() else None
    except OSError as error:
        return Unavailable(errno_text(error))
    except subprocess.TimeoutExpired:
        return Unavailable(f"it gave no answer within {ASKING_SECONDS:.0f} s")
    except ValueError:
        told = None
    if not isinstance(told, dict):
        last = asked.stderr.strip().splitlines()[-1:] or [f"it ended with {asked.returncode}"]
        return Unavailable(one_line(last[0]))
    return {
        "schema_version": SCHEMA_VERSION,
        **told,
        "hwr_suite": metadata.version("hwr-suite"),
        "probe_sha256": probe_digests(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "cpu": {"model": _cpu_model(proc_root), "count": os.cpu_count(), "usable": sorted(os.sched_getaffinity(0))},
        "allocator": {"environment": {name: value for name, value in sorted(environment.items()) if ALLOCATOR.fullmatch(name)}},
        "transparent_hugepage": _chosen(sys_root / "kernel/mm/transparent_hugepage/enabled"),
        "governor": _line(sys_root / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def binding(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resumed matrix must find unchanged."""
    return {name: environment[name] for name in BINDING if name in environment}


def probe_digests() -> dict[str, str]:
    """Return the digest of each probe file: another probe measures another thing."""
    here = Path(__file__).parent
    return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in PROBES if (here / name).is_file()}


def call_digest(call: str | None) -> str | None:
    """Return the digest of the file of FILE.py:FUNCTION: another file measures another thing.

    None without one, and for a module: where that lies, only the interpreter that measures could tell.

    Raises:
        OptionError: the file cannot be read.
    """
    place = (call or "").rpartition(":")[0]
    if not place.endswith(".py"):
        return None
    try:
        return hashlib.sha256(Path(place).read_bytes()).hexdigest()
    except OSError as error:
        raise OptionError(
            option=f"--call {call}", problem=errno_text(error), remedy="Give a file that can be read: FILE.py:FUNCTION."
        ) from None


def _cpu_model(proc_root: Path) -> str | None:
    try:
        text = (proc_root / "cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return one_line(found[1]) if found else None


def _chosen(path: Path) -> str | None:
    line = _line(path)
    found = re.search(r"\[(\w+)\]", line or "")
    return found[1] if found else None


def _line(path: Path) -> str | None:
    try:
        return one_line(path.read_text("utf-8", "replace"))
    except OSError:
        return None
