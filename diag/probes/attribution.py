"""Where what stays was allocated: memray around the loop of a retention probe.

Owns the recording and the folding of its stacks. Promises native frames below the Python ones, one entry for all call sites of a
function, and only what was allocated in the loop and not freed by its end. Loaded by the probe, by path, with `--attribute` only;
refuses imports of its project, as the probe does: memray is all that the interpreter needs besides.
"""

from __future__ import annotations

import os
import re
from typing import Any

SHOWN = 5
STACK_FRAMES = 16
# The hash and the escapes of Rust's legacy symbol names.
_HASH = re.compile(r"::h[0-9a-f]{16}$")
_RUST = (("$LT$", "<"), ("$GT$", ">"), ("$u20$", " "), ("$RF$", "&"), ("$u7b$", "{"), ("$u7d$", "}"), ("..", "::"))


class Recording:
    """Records while it is entered.

    Raises:
        ImportError: this interpreter has no memray.
    """

    def __init__(self, directory: str) -> None:
        import memray

        self.memray: Any = memray
        self.path = os.path.join(directory, "memray.bin")

    def __enter__(self) -> Recording:
        kind = self.memray.FileFormat.AGGREGATED_ALLOCATIONS  # as large for a million calls as for one
        self.tracker = self.memray.Tracker(self.path, native_traces=True, trace_python_allocators=True, file_format=kind)
        self.tracker.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.tracker.__exit__(*raised)

    def stacks(self, calls: int) -> list[dict[str, Any]]:
        """Return the stacks that most bytes came from, innermost frame first."""
        found: dict[tuple[str, ...], list[int]] = {}
        with self.memray.FileReader(self.path) as reader:
            for record in reader.get_leaked_allocation_records(merge_threads=True):
                frames = tuple(readable(*frame) for frame in record.hybrid_stack_trace(max_stacks=STACK_FRAMES))
                sums = found.setdefault(frames, [0, 0])
                sums[0] += record.n_allocations
                sums[1] += record.size
        most = sorted(found.items(), key=lambda item: -item[1][1])[:SHOWN]
        return [
            {"count": count, "bytes": size, "count_per_call": count / calls, "bytes_per_call": size / calls, "stack": list(frames)}
            for frames, (count, size) in most
        ]


def readable(function: str, file: str, line: int) -> str:
    """Return a frame as one line."""
    name = _HASH.sub("", function)
    if name != function:
        for mangled, plain in _RUST:
            name = name.replace(mangled, plain)
    return f"{name} ({os.path.basename(file)}:{line})" if line else name
