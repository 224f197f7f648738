"""What the retention probe's bookkeeping costs the loop that it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from figures import record

import diag

pytestmark = pytest.mark.bench

BUDGET = 1.02
PROBE = Path(diag.__file__).parent / "probes" / "safetensors_retention.py"

# In one process, in turn: the probe's own loop with a sample after each tenth, and the same calls bare.
SCRIPT = """
import argparse, gc, json, runpy, statistics, sys, tempfile, time
probe = runpy.run_path(sys.argv[1])
import torch
torch.set_num_threads(1)
CALLS = 100_000
given = argparse.Namespace(
    tensor_elements=64, offset_bytes=0, header_bytes=None, tensors=64, iterations=CALLS, sample_every=CALLS // 10, mode="get_tensor"
)
ours, bare = [], []
with tempfile.TemporaryDirectory() as directory:
    case = probe["CASES"]["get_tensor"](given)
    case.prepare(directory)
    case.loop(10_000)
    get_tensor = case.reader.get_tensor
    for _ in range(9):
        sampler = probe["Sampler"](10, None)
        sampler.rehearse()
        sampler.take(0, 0)
        sampler.take(0, 0)
        spent, last = probe["loops"](case, given, sampler)
        ours.append(spent / 1e9)
        gc.collect()
        begun = time.perf_counter()
        for _ in range(CALLS):
            tensor = get_tensor("tensor")
        bare.append(time.perf_counter() - begun)
        del tensor
print(json.dumps([statistics.median(ours), statistics.median(bare), statistics.median(o / b for o, b in zip(ours, bare))]))
"""


def test_the_loop_runs_as_a_bare_one() -> None:
    """`loop_seconds` of 100,000 get_tensor calls with ten samples, over the same calls without any."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(PROBE)], capture_output=True, text=True, check=True, timeout=300)
    ours, bare, ratio = json.loads(done.stdout)
    record("retention probe: loop over a bare loop", ratio, "x", f"<= {BUDGET:g}", ratio <= BUDGET)
    record("retention probe: get_tensor, a call", ours / 100_000 * 1e6, "µs")
    assert bare > 0
