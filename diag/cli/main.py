"""The `hwr-diag` command. Owns nothing yet but the honest answer that its probes have not landed."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata


def main() -> int:
    """Say what exists so far."""
    parser = argparse.ArgumentParser(
        prog="hwr-diag",
        allow_abbrev=False,
        description="Scripted answers about memory and stalls. No probe has landed in this version yet.",
    )
    parser.add_argument("--version", action="version", version=f"hwr-diag {metadata.version('hwr-suite')}")
    parser.parse_args()
    print("hwr-diag: no probe has landed in this version yet.", file=sys.stderr)
    print("Look at a worker's journal (docs/internals/events.md) and at its /metrics.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
