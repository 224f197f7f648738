"""One start of the demo, in a process of its own; reads its order from standard input, answers in one line.

Owns loading the model as a server would and the embedding of one fixed sentence. Promises to measure its own memory before the answer.
Refuses to know the other starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from hwr import telemetry
from hwr.cli.children import end_with_parent
from hwr.cli.worker import quiet_libraries
from hwr.ending import ended, show_logs, terminated
from hwr.errors import Unavailable
from hwr.options import Options
from hwr.outcomes import Phase
from hwr.procfs.smaps_rollup import read_smaps_rollup
from hwr.procfs.status import read_status
from hwr.telemetry.events import PhaseChanged

SENTENCE = "The weights are already on the node."


def main() -> int:
    """Do what standard input orders and print the answer."""
    order = json.load(sys.stdin)
    end_with_parent(order["parent"])
    # The demo ends us with SIGTERM, also after a Ctrl-C, which a terminal sends to us too.
    status = 0
    with terminated(ignore=(signal.SIGINT,)):
        show_logs(None)
        quiet_libraries()
        work = (lambda: _answer(_stock(order["model"]))) if order["root"] is None else (lambda: _ours(order))
        status = ended(work, enabled=order["root"] is not None)
    telemetry.close()
    return status


def _stock(model: str) -> dict[str, Any]:
    begun = time.monotonic()
    from transformers import BertModel

    imported = time.monotonic()
    module: Any = BertModel.from_pretrained(model)
    module.eval()
    ended = time.monotonic()
    return {"seconds": ended - begun, "import_seconds": imported - begun, "embedding": _embedding(module, model), "memory": _memory()}


def _ours(order: dict[str, Any]) -> int:
    import hwr
    from hwr.loader.factory import PretrainedFactory

    options = Options.of(
        host_weight_runtime_mode="preferred", host_weight_runtime_root=order["root"], host_weight_runtime_validation="full_checksum"
    )
    journal = telemetry.configure()
    serving = telemetry.serve_metrics(0) if order.get("serve") else Unavailable("not asked for")
    with hwr.load(PretrainedFactory(order["model"]), order["model"], options) as loaded:
        assert loaded.module is not None
        hwr.register_loaded(loaded, options)
        embedding = _embedding(loaded.module, order["model"])
        telemetry.emit(PhaseChanged(phase=Phase.SERVING))
        _answer(
            {
                "report": loaded.report.to_json(),
                "embedding": embedding,
                "memory": _memory(),
                "journal": str(journal),
                "root": order["root"],
                "metrics": None if isinstance(serving, Unavailable) else serving.url,
            }
        )
        while order.get("serve"):
            signal.pause()
    return 0


def _embedding(module: Any, model: str) -> str:
    import torch
    from transformers import AutoTokenizer

    from hwr.cli.synthetic import digest_of

    told = AutoTokenizer.from_pretrained(model, local_files_only=True)(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        hidden = module(**told).last_hidden_state
    mask = told["attention_mask"].unsqueeze(-1).float()
    return digest_of((hidden * mask).sum(1) / mask.sum(1))


def _memory() -> dict[str, int]:
    status, rollup = read_status(os.getpid()), read_smaps_rollup(os.getpid())
    assert not isinstance(status, Unavailable)
    assert not isinstance(rollup, Unavailable)
    return {"rss_anon": status.rss_anon or 0, "pss": rollup.amounts.pss or 0}


def _answer(value: dict[str, Any]) -> int:
    print(json.dumps(value), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
