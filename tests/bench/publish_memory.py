"""Publish a model of 1 GiB with a cast and print the largest growth of RssAnon meanwhile, in bytes. Run as a process of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import torch

from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, Component, Layout, Producer, Representation, Source
from hwr.errors import Unavailable
from hwr.loader.plan import LayoutPlan
from hwr.loader.producer import finalized_model
from hwr.outcomes import PublicationOutcome
from hwr.procfs.status import read_status
from hwr.store.domain import Limits, open_domain
from hwr.store.publish import publish

COLUMNS, ROWS, LAYERS = 8192, 8192, 4  # four float32 matrices of 256 MiB


def anonymous() -> int:
    """Return this process's anonymous memory in bytes."""
    status = read_status(os.getpid())
    assert not isinstance(status, Unavailable)
    assert status.rss_anon is not None
    return status.rss_anon


def main() -> None:
    """Publish and measure."""
    module = torch.nn.Module()
    for number in range(LAYERS):
        module.register_parameter(f"w{number}", torch.nn.Parameter(torch.ones(ROWS, COLUMNS), requires_grad=False))
    identity = ArtifactIdentity(
        Source("m", "f"), Component("c"), Representation("r", "bfloat16"), Layout("l"), Adaptation(), Producer("p", "1", "1", 1, 1)
    )
    directory = Path(tempfile.mkdtemp())
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    try:
        domain = open_domain(directory / "store", limits=Limits(min_free_bytes=0), coordination_timeout_seconds=60)
        produced = finalized_model(module, LayoutPlan(cast="bfloat16"))
        torch.ones(1).to(torch.bfloat16)  # torch's own first use is not the publication's
        before = anonymous()
        watcher = threading.Thread(target=watch)
        watcher.start()
        result = publish(domain, identity, produced.tensors, aliases=produced.aliases)
        stop.set()
        watcher.join()
        assert result.outcome is PublicationOutcome.PUBLISHED, result.failure
        print(max(0, peak[0] - before))
    finally:
        os.system(f"chmod -R u+w {directory}")
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
