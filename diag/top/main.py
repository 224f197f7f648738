"""The `hwr-top` command. Owns nothing yet but the honest answer that its screens have not landed."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata


def main() -> int:
    """Say what exists so far."""
    parser = argparse.ArgumentParser(
        prog="hwr-top", allow_abbrev=False, description="What each rank does, on a terminal. No screen has landed in this version yet."
    )
    parser.add_argument("--version", action="version", version=f"hwr-top {metadata.version('hwr-suite')}")
    parser.parse_args()
    print("hwr-top: no screen has landed in this version yet.", file=sys.stderr)
    print("Look at a worker's journal (docs/internals/events.md) and at its /metrics.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
