"""An embedding server on one page: python embedding_server.py MODEL_DIR STORE_DIR [PORT [METRICS_PORT]]"""

import contextlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoTokenizer

import hwr


def serve(model: str, store: str, port: int = 8080, metrics_port: int = 9400) -> None:
    options = hwr.compose({"host_weight_runtime_mode": "preferred", "host_weight_runtime_root": store})
    hwr.telemetry.configure(options.telemetry.enabled, options.telemetry.run_dir, options.telemetry.engine)
    metrics = hwr.telemetry.serve_metrics(metrics_port)  # falsy, with the reason, if the port is taken: the server serves all the same
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    with hwr.load(hwr.PretrainedFactory(model), model, options) as loaded:

        def embed(text: str) -> list[float]:
            with torch.no_grad():  # a graph would keep tensors of the store alive
                return loaded.module(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0].tolist()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.dumps(embed(self.rfile.read(int(self.headers["Content-Length"])).decode())).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        embed("the first request should not be the slow one")
        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            where = metrics.url if metrics else f"no metrics: {metrics.reason}"
            print(f"POST text to http://127.0.0.1:{server.server_port}/ · {loaded.report.outcome} · {where}", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(*sys.argv[1:3], *map(int, sys.argv[3:]))
