"""Inside somebody else's server: the example, threads, prefork, telemetry on, off and unwritable; nothing of the host's is touched."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_processes import REPOSITORY, Forge, Programs, until
from e2e_stores import Store

EXAMPLE = REPOSITORY / "docs" / "examples" / "embedding_server.py"
TEXTS = ("final bytes on the node", "one mapping", "many readers", "and none of them writes")

STOCK = """
import json, sys, torch
from transformers import AutoTokenizer, BertModel
model = BertModel.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(json.dumps([model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0].tolist() for text in sys.argv[2:]]))
"""
# Import once, fork, load in each child: what a preforking server does. Each child has an environment and an output of its own.
PREFORK = """
import importlib.util, json, os, signal, sys
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
children = []
for environ, output in json.loads(sys.argv[4]):
    pid = os.fork()
    if pid == 0:
        os.environ.update(environ)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
        try:
            example.serve(sys.argv[2], sys.argv[3], 0, 0)
        except KeyboardInterrupt:
            pass
        sys.exit(0)
    children.append(pid)

def end(number, frame):
    for child in children:
        os.kill(child, signal.SIGINT)

signal.signal(signal.SIGTERM, end)
print("started", flush=True)
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(map(abs, statuses)))
"""


@pytest.fixture(scope="module")
def stock(forge: Forge, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    done = forge.python(STOCK, with_tokenizer(minilm), *TEXTS)
    assert done.rc == 0, done.err
    embeddings: list[list[float]] = json.loads(done.out)
    return embeddings


def with_tokenizer(model: Path) -> Path:
    assert (model / "tokenizer.json").is_file()
    return model


def parsed(line: str) -> tuple[str, str, str]:
    """Return where a server listens, where its weights came from, and where its metrics are."""
    assert line.startswith("POST text to "), line
    first, outcome, metrics = line.strip().split(" · ")
    return first.removeprefix("POST text to "), outcome, metrics


def ask(url: str, text: str) -> list[float]:
    with urllib.request.urlopen(urllib.request.Request(url, data=text.encode(), method="POST"), timeout=60) as answer:
        value: list[float] = json.load(answer)
        return value


def ask_from_threads(url: str, expected: list[list[float]], requests: int = 24) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(url, TEXTS[number % len(TEXTS)]), range(requests)))
    assert answers == [expected[number % len(TEXTS)] for number in range(requests)]


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


HIT = 'hwr_resolutions_total{engine="default",mode="preferred",outcome="local_hit",rank="0"} 1.0'


def test_the_example_serves_from_threads(programs: Programs, minilm: Path, minilm_published: Store, stock: list[list[float]]) -> None:
    running = programs.start([sys.executable, str(EXAMPLE), str(minilm), str(minilm_published.root), "0", "0"])
    url, outcome, metrics = parsed(running.line() or running.stop(signal.SIGKILL).err)
    assert outcome == "local_hit"
    ask_from_threads(url, stock)
    assert HIT in scrape(metrics)
    with pytest.raises(urllib.error.HTTPError):
        scrape(metrics.removesuffix("/metrics") + "/snapshot")
    done = running.stop(signal.SIGINT)
    assert done.rc == 0, done.err
    assert done.state.exited
    assert (done.state.lease_acquisitions, done.state.leases) == (1, {})


def test_the_example_serves_from_forks_with_telemetry_on_off_and_unwritable(
    programs: Programs, minilm: Path, minilm_published: Store, stock: list[list[float]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    off = programs.run_dir()
    environs: list[dict[str, str]] = [{}, {}, {"HWR_TELEMETRY": "off", "HWR_RUN_DIR": str(off)}, {"HWR_RUN_DIR": str(tmp_path / "file")}]
    children = [(environ, str(tmp_path / f"child-{number}")) for number, environ in enumerate(environs)]
    running = programs.start_python(PREFORK, EXAMPLE, minilm, minilm_published.root, json.dumps(children))
    assert running.line() == "started\n"

    def lines() -> list[str] | None:
        assert running.process.poll() is None, running.stop(signal.SIGKILL).err
        found = [Path(output).read_text() if Path(output).exists() else "" for _, output in children]
        return found if all(text.endswith("\n") for text in found) else None

    servers = [parsed(line) for line in until(lines, "four servers")]
    for number, (url, outcome, metrics) in enumerate(servers):
        assert outcome == "local_hit"
        ask_from_threads(url, stock, 8)
        # The third has no telemetry; the fourth keeps its events in memory.
        assert (HIT in scrape(metrics)) is (number != 2)
    done = running.stop(signal.SIGTERM)
    assert done.rc == 0, done.err
    assert list(off.iterdir()) == []
    # A journal each, of its own process, ended in order.
    assert len({journal.records[0]["res"]["process.pid"] for journal in done.journals}) == len(done.journals) == 2
    for journal in done.journals:
        assert journal.state.exited
        assert (journal.state.lease_acquisitions, journal.state.leases) == (1, {})


# What a host has set up is as it was before. The faulthandler timer has no getter: it is seen to fire.
HOST = """
import faulthandler, json, logging, os, signal, sys, threading, time, warnings
import prometheus_client, torch, hwr
from hwr.loader.factory import PretrainedFactory
model, root, enabled, dump = sys.argv[1:5]
options = hwr.Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root=root, telemetry=enabled == "on")
signal.signal(signal.SIGUSR1, lambda *_: None)
timer = open(dump, "w")
faulthandler.dump_traceback_later(1.5, file=timer)

def host():
    loggers = {name: logging.getLogger(name) for name in [None, "hwr", *(n for n in logging.root.manager.loggerDict)]}
    return {
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "handlers": {name: [str(h) for h in log.handlers] for name, log in loggers.items() if log.handlers},
        "levels": [logging.root.level, logging.getLogger("hwr").level, logging.root.manager.disable],
        "registry": sorted(map(str, prometheus_client.REGISTRY._collector_to_names.values())),
        "faulthandler": faulthandler.is_enabled(),
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook)],
        "filters": [str(f) for f in warnings.filters],
        "torch": [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
        "environ": {k: v for k, v in os.environ.items() if k != "HWR_RUN_ID"},
        "umask": [line for line in open("/proc/self/status") if line.startswith("Umask")], "cwd": os.getcwd(),
    }

before, threads = host(), {thread.name for thread in threading.enumerate()}
with hwr.load(PretrainedFactory(model), model, options) as loaded:
    outcome, during = loaded.report.outcome, {thread.name for thread in threading.enumerate()}
after = host()
deadline = time.monotonic() + 60
while not os.path.getsize(dump) and time.monotonic() < deadline:
    os.sched_yield()
told = {"changed": [name for name in before if before[name] != after[name]], "outcome": outcome, "threads": sorted(during - threads)}
print(json.dumps({**told, "fired": os.path.getsize(dump) > 0}))
"""


@pytest.mark.parametrize("enabled", ["on", "off"])
def test_nothing_of_the_host_is_touched(forge: Forge, tiny: Path, tmp_path: Path, enabled: str) -> None:
    for outcome in ("canonical_fallback", "local_hit"):
        done = forge.python(HOST, tiny, tmp_path / "store", enabled, tmp_path / f"dump-{outcome}")
        assert done.rc == 0, done.err
        told = json.loads(done.out)
        assert told["outcome"] == outcome
        assert told["changed"] == []
        assert told["fired"]
        # Disabled means no file and no thread.
        foreign = ["tqdm_monitor"] if outcome == "canonical_fallback" else []  # of the library's own loading
        assert [name for name in told["threads"] if name not in foreign] == (["hwr-alive"] if enabled == "on" else [])
        assert (list(done.run_dir.iterdir()) == []) is (enabled == "off")


LIVE_TENSOR = """
import json, sys
import hwr
from hwr.errors import ActiveLease
from hwr.loader.factory import PretrainedFactory
options = hwr.Options.of(host_weight_runtime_mode="required", host_weight_runtime_root=sys.argv[2])
loaded = hwr.load(PretrainedFactory(sys.argv[1]), sys.argv[1], options)
kept = loaded.module.lm_head.weight
try:
    loaded.close()
    refused = None
except ActiveLease as error:
    refused = error.code
total = float(kept.detach().sum())
del kept
loaded.close()
print(json.dumps({"refused": refused, "finite": total == total}))
"""


def test_closing_under_a_live_tensor_is_refused_and_then_works(forge: Forge, tiny: Path, tiny_published: Store) -> None:
    done = forge.python(LIVE_TENSOR, tiny, tiny_published.root)
    assert done.rc == 0, done.err
    assert json.loads(done.out) == {"refused": "active_lease", "finite": True}
    assert len(done.journal.of("hwr.store.lease.refuse")) == 1
    assert done.state.leases == {}


def test_a_write_into_the_store_faults_instead_of_diverging(programs: Programs, tiny: Path, tiny_published: Store) -> None:
    script = LIVE_TENSOR.partition("kept =")[0] + "loaded.module.lm_head.weight.data.mul_(2)\nprint('diverged')\n"
    done = programs.python(script, tiny, tiny_published.root)
    assert done.rc == -signal.SIGSEGV
    assert done.out == ""
    # Killed, not ended: the journal says ready and no exit.
    assert (done.state.phase(), done.state.exited) == ("ready", False)


def test_the_example_is_short_and_installs_no_handler() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 50
    assert "signal" not in text
