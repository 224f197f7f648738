"""Telemetry: the spine. Rooms emit typed events; metrics, logs, screens and reports are projections of them.

Owns the public words `configure`, `serve_metrics`, `collector`, `snapshot`, `record`. Promises to import neither torch nor
safetensors and to do nothing at import. Refuses a second way to tell.
"""

from __future__ import annotations

from hwr.telemetry.collector import HwrCollector
from hwr.telemetry.collector import worker_collector as collector
from hwr.telemetry.endpoint import MetricsServer, asked_to_serve, serve_metrics
from hwr.telemetry.process import close, configure, emit, ensure_configured, journal_directory, run_directory, snapshot, span
from hwr.telemetry.recording import Recording, record

__all__ = [
    "HwrCollector",
    "MetricsServer",
    "Recording",
    "asked_to_serve",
    "close",
    "collector",
    "configure",
    "emit",
    "ensure_configured",
    "journal_directory",
    "record",
    "run_directory",
    "serve_metrics",
    "snapshot",
    "span",
]
