"""Registration as a user meets it: the transport and why, and nothing that is registered outlives its mapping (R3, R5, R12-R14)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_standin import REGISTER, UNREGISTER, Standin
from e2e_processes import NOBODY, Done, Forge, Programs
from e2e_stores import Store

# What a server does, with the platform's library given. It prints the choice and what is held, then ends in one of several ways.
SERVER = """
import json, sys
from pathlib import Path
import hwr
from hwr.loader.factory import PretrainedFactory
from hwr.registration.drivers.cuda import CudaDriver
model, root, library, options, end = sys.argv[1:]
given = {"host_weight_runtime_mode": "required", "host_weight_runtime_root": root, **json.loads(options)}
options = hwr.compose(given, environ={}, server=False)
loaded = hwr.load(PretrainedFactory(model), model, options)
choice = hwr.register_loaded(loaded, options, device="cuda:0", driver=CudaDriver(Path(library)))
print(json.dumps({
    "transport": choice.transport, "reason": choice.reason, "detail": choice.detail, "bytes": loaded.report.registered_bytes,
    "registration": loaded.registration is not None, "lease_open": not loaded.lease.closed,
    "pin_cpu_memory": options.distributed_layerwise_offload.pin_cpu_memory,
}), flush=True)
if end == "close":
    loaded.close()
elif end == "drop":
    del loaded, choice
elif end == "raise":
    raise RuntimeError("a server that fails with everything in its hands")
"""

Serve = Callable[..., Done]


@pytest.fixture
def serve(forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store], standin: Standin) -> Serve:
    """Run a server over a store of its own and the stand-in."""
    root = copied(tiny_published).root

    def run(end: str = "close", **options: Any) -> Done:
        return forge.python(SERVER, tiny, root, standin.path, json.dumps(options), end)

    return run


@pytest.mark.parametrize("end", ["close", "drop", "raise", "leave"])
def test_what_is_registered_is_unregistered_before_it_is_unmapped(end: str, serve: Serve, standin: Standin) -> None:
    """However a server lets go (closed, dropped, by an exception, at the end of the interpreter): in reverse, and never too late."""
    done = serve(end)
    assert done.rc == (70 if end == "raise" else 0), done.err
    told = json.loads(done.out)
    assert (told["transport"], told["reason"], told["registration"], told["lease_open"]) == ("registered", "registered", True, True)
    registered, gone = standin.calls(REGISTER), standin.calls(UNREGISTER)
    assert sum(call.bytes for call in registered) == told["bytes"] > 0
    assert [call.address for call in gone] == [call.address for call in reversed(registered)]
    assert {call.result for call in (*registered, *gone)} == {0}
    assert standin.lost() == 0


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_disabled_never_calls_the_driver(limit: float, serve: Serve, standin: Standin) -> None:
    """R12, as far as it concerns registration: staging, the lease stays open, no registration, pinning as it was asked for."""
    done = serve(dlo_host_registration_mode="disabled", dlo_host_registration_limit_gib=limit)
    assert done.rc == 0, done.err
    told = json.loads(done.out)
    assert (told["transport"], told["reason"]) == ("staging", "mode_disabled")
    assert (told["registration"], told["lease_open"], told["pin_cpu_memory"]) == (False, True, True)
    assert standin.calls() == []


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_a_failing_driver_is_staging(limit: float, serve: Serve, standin: Standin) -> None:
    """R12, R14: the driver's own words, everything undone, the pending error consumed, the lease open."""
    standin.configure("register 1 fail 2")
    done = serve(dlo_host_registration_limit_gib=limit)
    assert done.rc == 0, done.err
    told = json.loads(done.out)
    assert (told["transport"], told["reason"]) == ("staging", "driver_error")
    assert "cudaErrorMemoryAllocation" in told["detail"]
    assert (told["registration"], told["lease_open"], told["pin_cpu_memory"], told["bytes"]) == (False, True, True, 0)
    (rollback,) = done.journal.of("hwr.registration.rollback.end")
    assert (rollback["result"], rollback["drain"]) == ("clean", "drained")
    (began,) = done.journal.of("hwr.registration.chunk.begin")[-1:]
    assert began.get("limit_bytes") == (int(limit * 2**30) or None), "a limit of 0 is none (R3)"


def test_required_means_registered_or_no_start(forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]) -> None:
    """R5: two lines with the reason, the code in the journal, nothing left."""
    root = copied(tiny_published).root
    arguments = ("run", tiny, "--mode", "required", "--root", root, "--dlo-host-registration-mode", "required", "--quiet", "--json")
    done = forge.hwr(*arguments)
    assert done.rc == 0, done.err
    assert (done.report["transport"], done.report["transport_reason"]) == ("registered", "registered")
    refused = forge.hwr(*arguments, "--dlo-host-registration-limit-gib", "0.0001")
    assert refused.rc == 1
    cause, way_out = refused.lines()
    assert "registration is required" in cause
    assert "(budget)" in cause
    assert "--dlo-host-registration-mode auto" in way_out
    assert "registration_required" in refused.journal.failures()
    assert refused.journal.of("hwr.registration.chunk.begin") == []


@pytest.mark.parametrize(
    ("arguments", "transport", "reason"),
    [
        ((), "registered", "registered"),
        (("--dlo-host-registration-mode", "disabled"), "staging", "mode_disabled"),
        (("--no-pin-cpu-memory",), "staging", "pin_off"),
        (("--dlo-host-registration-limit-gib", "0.0001"), "staging", "budget"),
    ],
)
def test_the_command_says_which_transport_and_why(
    arguments: tuple[str, ...],
    transport: str,
    reason: str,
    forge: Forge,
    tiny: Path,
    tiny_published: Store,
    copied: Callable[[Store], Store],
) -> None:
    """In the report, as an event, and in the state that the metrics come from."""
    done = forge.hwr(
        "run", tiny, "--mode", "required", "--root", copied(tiny_published).root, "--steps", "0", "--quiet", "--json", *arguments
    )
    assert done.rc == 0, done.err
    assert (done.report["transport"], done.report["transport_reason"]) == (transport, reason)
    (choice,) = done.journal.of("hwr.transport.choice.record")
    assert (choice["transport"], choice["reason"]) == (transport, reason)


def test_a_cold_start_has_nothing_to_register(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    """What the ordinary load made is this process's own."""
    done = forge.hwr("run", tiny, "--mode", "preferred", "--root", tmp_path / "store", "--steps", "0", "--quiet", "--json")
    assert done.rc == 0, done.err
    assert (done.report["outcome"], done.report["transport"], done.report["transport_reason"]) == ("canonical_fallback", "none", "no_lease")


@pytest.mark.usefixtures("as_root")
def test_a_small_memlock_limit_is_named(forge: Forge, open_place: Path) -> None:
    """As another user with 64 KiB: staging because of memlock, and no call was made."""
    prepare = f"import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); {NOBODY}"
    (open_place / "mine").mkdir()
    os.chown(open_place / "mine", 65534, 65534)
    place = ("--mode", "preferred", "--root", open_place / "mine" / "store")
    arguments = ("run", open_place / "model", *place, "--steps", "0", "--quiet", "--json")
    for outcome in ("canonical_fallback", "local_hit"):
        done = forge.hwr(*arguments, prepare=prepare, run_dir=open_place / "run")
        assert done.rc == 0, done.err
        assert done.report["outcome"] == outcome
    assert (done.report["transport"], done.report["transport_reason"]) == ("staging", "memlock")
    assert "memlock" in done.report["transport_detail"]
    assert not any(journal.of("hwr.registration.chunk.begin") for journal in done.journals)


def test_ranks_end_alike(forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]) -> None:
    """Two ranks of one start: each votes, both are registered."""
    done = forge.hwr(
        "run", tiny, "--mode", "required", "--root", copied(tiny_published).root, "--steps", "0", "--quiet", "--json", "--ranks", "2"
    )
    assert done.rc == 0, done.err
    assert all(line.startswith("{") and line.endswith("}") for line in done.out.splitlines()), done.out
    reports = [json.loads(line) for line in done.out.splitlines()]
    assert [report["transport"] for report in reports] == ["registered", "registered"]
    for journal in done.journals:
        if journal.of("hwr.registration.mapping.begin"):
            (vote,) = journal.of("hwr.registration.vote.end")
            assert vote["decision"] == "registered"


AGAIN = """
import gc, json, re, sys
from pathlib import Path
import hwr
from hwr.errors import OptionError
from hwr.loader.factory import PretrainedFactory
model, root = sys.argv[1:]
options = hwr.compose({"host_weight_runtime_mode": "required", "host_weight_runtime_root": root}, environ={})
def locked():
    return int(re.search(r"VmLck:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
with hwr.load(PretrainedFactory(model), model, options) as loaded:
    refusals = []
    for device in ("cuda:abc", "xpu:0", ""):
        try:
            hwr.register_loaded(loaded, options, device=device)
        except OptionError as error:
            refusals.append(error.cause)
    off = hwr.register_loaded(loaded, options, mode="disabled").reason
    first = hwr.register_loaded(loaded, options, mode="required")
    same = hwr.register_loaded(loaded, options).registered is first.registered
    del first
    gc.collect()
    held = locked()
print(json.dumps({"refusals": len(refusals), "off": off, "same": same, "held": held, "after": locked()}))
"""


def test_a_second_call_changes_nothing_and_a_bad_device_leaves_nothing(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    """A server says the mode itself where its options cannot (R3); what is held is held by the model, not by an answer."""
    done = forge.python(AGAIN, tiny, copied(tiny_published).root)
    assert done.rc == 0, done.err
    told = json.loads(done.out)
    assert (told["refusals"], told["off"], told["same"]) == (3, "mode_disabled", True)
    assert told["held"] > 0
    assert told["after"] == 0


RANK = """
import json, sys
import hwr
from hwr.loader.factory import PretrainedFactory
model, root = sys.argv[1:]
options = hwr.compose({"host_weight_runtime_mode": "required", "host_weight_runtime_root": root, "hwr_registration_deadline_seconds": 60})
with hwr.load(PretrainedFactory(model), model, options) as loaded:
    choice = hwr.register_loaded(loaded, options)
    print(json.dumps([choice.transport, choice.reason]), flush=True)
"""


def test_ranks_of_torchrun_find_each_other(
    programs: Programs, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store], tmp_path: Path
) -> None:
    """torchrun gives no run id of its own ("none"): its ranks have their launcher in common."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    done = programs.run([*command, str(script), str(tiny), str(copied(tiny_published).root)], env={"HWR_RUN_ID": ""})
    assert done.rc == 0, done.err
    assert [json.loads(line) for line in done.out.splitlines() if line.startswith("[")] == [["registered", "registered"]] * 2


def test_ranks_without_a_common_run_do_not_wait_for_each_other(
    programs: Programs, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    """Started apart, with nothing in common: staged at once, and it says what to give them."""
    env = {"WORLD_SIZE": "2", "HWR_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    arguments = ("run", tiny, "--mode", "required", "--root", copied(tiny_published).root, "--steps", "0", "--quiet", "--json")
    for more, reason in (((), "group"), (("--dlo-host-registration-mode", "disabled"), "mode_disabled")):
        done = programs.hwr(*arguments, *more, env=env)
        assert done.rc == 0, done.err
        assert (done.report["transport"], done.report["transport_reason"]) == ("staging", reason)
