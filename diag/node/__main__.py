"""`python -m diag.node`: the agent without the `hwr` command around it.

Owns nothing; `hwr demo` starts the agent this way, since the runtime does not know who looks at it.
"""

from __future__ import annotations

import sys

from diag.node.command import add_arguments
from hwr.ending import ended, show_logs, telemetry_wanted
from hwr.usage import HwrParser, open_streams

if __name__ == "__main__":
    open_streams()
    parser = HwrParser(prog="hwr agent", description="Watch every worker of this node; one port that always answers.")
    add_arguments(parser)
    chosen = parser.parse_args()
    show_logs(None)
    sys.exit(ended(lambda: chosen.command(chosen), enabled=telemetry_wanted(None)))
