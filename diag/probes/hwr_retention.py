"""The retention probe's cases beyond safetensors: our own lease, and a function of the user's.

Owns the cases `hwr_lease` and `call`, and what `--call` names; everything else is the probe's, which is loaded from beside this file.
Promises that our runtime is imported by `hwr_lease` alone, in the process that measures; that `--mode call --call FILE.py:FUNCTION` needs
what the probe needs; and that what a function of the user's raises is told as its own.
Refuses to measure a lease without telemetry: a server writes its journal too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diag.probes import safetensors_retention as probe
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import safetensors_retention as probe

    del sys.path[0]


class HwrLease(probe.Case):
    """Look an artifact up, lease it, bind a tensor to its bytes, let go of both."""

    def prepare(self, directory: str) -> None:
        """Publish an artifact of the tensor and, for an offset, a filler; check what a lease gives."""
        import torch

        try:
            from hwr import telemetry
            from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, Component, Layout, Producer, Representation, Source
            from hwr.outcomes import TensorKind
            from hwr.store.domain import Limits, open_domain
            from hwr.store.publish import publish
        except ImportError as error:
            raise probe.Unusable(f"mode hwr_lease needs hwr-suite in {sys.executable}: {error}") from error
        probe.insist_on_room(self.arguments, directory, self.tensors)
        telemetry.configure(run_dir=os.path.join(directory, "run"))
        identity = ArtifactIdentity(
            source=Source("model", "retention"),
            component=Component("component"),
            representation=Representation("safetensors", "float32"),
            layout=Layout("as_loaded"),
            adaptation=Adaptation(),
            producer=Producer("retention", "1", "1", 1, 1),
        )
        self.domain = open_domain(os.path.join(directory, "store"), limits=Limits(min_free_bytes=0), coordination_timeout_seconds=30)
        payload = probe.payload_of(self.arguments)
        tensors = [Given(probe.TENSOR, "F32", len(payload), payload.tobytes(), TensorKind.BUFFER)]
        if self.arguments.offset_bytes:  # in whole cache lines: such tensors come first, by name
            words = -(-self.arguments.offset_bytes // 64) * 8
            tensors.append(Given(probe.FILLER, "I64", words, bytes(words * 8), TensorKind.BUFFER))
        published = publish(self.domain, identity, tensors)
        if published.failure is not None:
            raise published.failure
        self.key, self.identity = identity.key, identity.to_json()
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        with self.leased() as lease:
            entry = next(tensor for tensor in lease.tensors() if tensor.name == probe.TENSOR)
            self.path = str(self.domain.layout.artifact(self.key) / entry.file)
            probe.check(torch.frombuffer(lease.view(probe.TENSOR), dtype=torch.float32), payload)
            header = int.from_bytes(Path(self.path).read_bytes()[:8], "little")
            self.file = {
                "header_bytes": header, "payload_bytes": entry.nbytes, "file_bytes": os.stat(self.path).st_size,
                "offset_bytes": entry.offset - 8 - header, "begin": entry.offset, "end": entry.offset + entry.nbytes,
                "tensors": len(lease.manifest.tensors),
            }  # fmt: skip

    def leased(self) -> Any:
        """Return a lease."""
        from hwr.outcomes import ValidationLevel
        from hwr.store.lookup import lookup

        found = lookup(self.domain, self.key, self.identity, ValidationLevel.MANIFEST_AND_METADATA)
        if found.lease is None:
            raise found.failure or RuntimeError(f"the artifact that was published is a {found.status}")
        return found.lease

    def loop(self, count: int) -> probe.Weak:
        import torch

        leased, frombuffer, float32 = self.leased, torch.frombuffer, torch.float32
        for _ in range(count):
            lease = leased()
            tensor = frombuffer(lease.view(probe.TENSOR), dtype=float32)
            last = weakref.ref(tensor)
            del tensor
            lease.close()
        return last

    def close(self) -> None:
        from hwr import telemetry

        telemetry.close()


@dataclass(frozen=True)
class Given:
    """A tensor of one dimension to publish (hwr.store.writer.TensorSource)."""

    name: str
    dtype: str
    elements: int
    data: bytes
    kind: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its one size."""
        return (self.elements,)

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes."""
        yield memoryview(self.data)


class Call(probe.Case):
    """A function without arguments; its attribute `close`, if it has one, is called at the end."""

    noun = "result"

    def prepare(self, directory: str) -> None:
        """Find it."""
        self.function = function_of(self.arguments.call)

    def loop(self, count: int) -> probe.Weak:
        function = self.function
        with _told_as_the_functions("the function"):
            for _ in range(count):
                result = function()
        try:
            return weakref.ref(result)
        except TypeError:  # None, a number, bytes: nothing that a weak reference could watch
            return lambda: None

    def close(self) -> None:
        with _told_as_the_functions("its close"):
            getattr(self.function, "close", lambda: None)()


CASES: Mapping[str, Callable[[argparse.Namespace], probe.Case]] = {"hwr_lease": HwrLease, "call": Call}


def target(text: str) -> str:
    """Return what `--call` names, if it has the form of one of the two and its file is there; for argparse."""
    place, _, name = text.rpartition(":")
    if not name.isidentifier() or not (place.endswith(".py") or all(part.isidentifier() for part in place.split("."))):
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE.py:FUNCTION, nor MODULE:FUNCTION")
    if place.endswith(".py") and not os.path.isfile(place):
        raise argparse.ArgumentTypeError(f"there is no file {place}")
    return text


def function_of(text: str) -> Callable[[], Any]:
    """Return the function that FILE.py:FUNCTION or MODULE:FUNCTION names.

    A file finds the modules beside it, as a script does; a module is looked for on PYTHONPATH, and not in the current directory.
    """
    place, _, name = text.rpartition(":")
    try:
        if place.endswith(".py"):
            sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
            found = runpy.run_path(place, run_name="retention_call")
        else:
            module = importlib.import_module(place)
            found = {name: getattr(module, name)} if hasattr(module, name) else {}
    except (Exception, SystemExit) as error:  # the user's own code runs here: whatever it raises, there is nothing to measure
        raise probe.Unusable(f"--call {text}: {place} cannot be run: {type(error).__name__}: {error}") from error
    if name not in found:
        raise probe.Unusable(f"--call {text}: {place} has no function {name}")
    if not callable(found[name]):
        raise probe.Unusable(f"--call {text}: {name} of {place} cannot be called")
    return found[name]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _told_as_the_functions(what: str) -> Iterator[None]:
    """Tell an exception as the one of the user's function that it is."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise probe.Broken(f"{what} raised {type(error).__name__}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one case and print its JSON."""
    return probe.main(argv, CASES, target)


if __name__ == "__main__":
    sys.exit(main())
