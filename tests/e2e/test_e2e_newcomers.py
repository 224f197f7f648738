"""What a first user stumbled over, and must not stumble over again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e_processes import Programs, until
from e2e_stores import Store

import hwr
from hwr import telemetry
from hwr.outcomes import PublicationOutcome


def preferred(root: Path) -> hwr.Options:
    return hwr.Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root=root)


def bert(**more: object) -> object:
    from transformers import BertConfig

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    return BertConfig(**shape, **more)


def test_made_up_weights_are_never_published(tmp_path: Path) -> None:
    """A checkpoint without the pooler loads, since the library makes one up; those values are no final bytes of the checkpoint."""
    from transformers import BertModel

    BertModel(bert(), add_pooling_layer=False).save_pretrained(tmp_path / "model")
    for _ in range(2):
        with hwr.load(hwr.PretrainedFactory(tmp_path / "model"), tmp_path / "model", preferred(tmp_path / "store")) as loaded:
            assert loaded.report.publication is PublicationOutcome.FAILED
            failure = loaded.report.publication_failure
            assert failure is not None
            assert (failure.code, failure.reason) == ("producer_unsupported", "uninitialised")
            assert "pooler" in failure.message
    assert Store(tmp_path / "store").names("artifacts") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("told", [True, False])
def test_the_default_dtype_is_that_of_stock_loading(tmp_path: Path, dtype: torch.dtype, told: bool) -> None:
    import json

    from transformers import BertModel

    model = tmp_path / "model"
    BertModel(bert()).to(dtype).save_pretrained(model)
    if not told:
        config = json.loads((model / "config.json").read_text())
        config.pop("dtype", None)
        (model / "config.json").write_text(json.dumps(config))
    stock = BertModel.from_pretrained(model).dtype
    assert stock is dtype
    for _ in ("cold", "warm"):
        with hwr.load(hwr.PretrainedFactory(model), model, preferred(tmp_path / "store")) as loaded:
            assert loaded.module is not None
            assert next(loaded.module.parameters()).dtype is stock
    with hwr.load(hwr.PretrainedFactory(model), model, hwr.Options.of()) as loaded:
        assert loaded.module is not None
        assert next(loaded.module.parameters()).dtype is stock


def test_a_model_in_training_runs_warm_as_it_ran_cold(tmp_path: Path) -> None:
    """Batch normalization writes its statistics: that must not end the second start with SIGSEGV."""
    from safetensors.torch import save_file

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    (tmp_path / "model").mkdir()
    save_file({name: value.clone() for name, value in build().state_dict().items()}, str(tmp_path / "model" / "model.safetensors"))
    for _ in ("cold", "warm"):
        with hwr.load(build, tmp_path / "model", preferred(tmp_path / "store")) as loaded, torch.no_grad():
            assert loaded.module is not None
            loaded.module(torch.ones(2, 4))


def test_load_serves_once_where_its_options_say(tmp_path: Path, programs: Programs, tiny: Path) -> None:
    done = programs.hwr("run", tiny, "--metrics-port", "0", "--steps", "0")
    assert done.rc == 0, done.err
    assert done.journal.state.events["hwr.telemetry.endpoint.open"] == 1
    assert done.state.endpoint is not None
    assert done.state.endpoint in done.out


def test_ports_for_all_ranks_are_asked_for_at_once(programs: Programs, tiny: Path) -> None:
    done = programs.hwr("run", tiny, "--metrics-port", "65534", "--ranks", "4")
    assert done.rc == 2
    assert len(done.lines()) == 2


def test_a_terminated_publication_ends_in_order(programs: Programs, minilm: Path, tmp_path: Path) -> None:
    """SIGTERM is no SIGKILL: nothing is left in tmp/, and the journal ends with its exit event."""
    store = Store(tmp_path / "store")
    running = programs.start_hwr("publish", minilm, "--root", store.root)
    until(lambda: (journal := running.journal()) is not None and journal.state.ops, "it works")
    done = running.stop(signal.SIGTERM)
    assert done.rc == 128 + signal.SIGTERM
    assert done.state.exited
    assert store.temporary == []


def test_closed_streams_are_no_reason_to_fail(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hwr.cli.main", "run", str(tiny), "--steps", "0", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(["/bin/sh", "-c", '"$@" 2>&- <&-', "sh", *command], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stdout


def test_a_dead_rank_is_told_of_while_the_others_hold(programs: Programs, tiny: Path) -> None:
    running = programs.start_hwr("run", tiny, "--ranks", "2", "--hold", "--quiet")
    lines = [running.line() for _ in range(2)]
    assert all(lines)
    children = until(lambda: _children(running.process.pid) if len(_children(running.process.pid)) == 2 else None, "two ranks")
    os.kill(children[0], signal.SIGKILL)
    assert running.process.stderr is not None
    assert "ended with status -9" in running.process.stderr.readline()
    running.stop(signal.SIGTERM)


def test_an_interrupt_is_no_failure() -> None:
    from hwr.outcomes import LoadStage, Outcome
    from hwr.telemetry import events as E

    with telemetry.record() as told, pytest.raises(KeyboardInterrupt):
        interrupt()
    (end,) = told.of(E.StageEnded)
    assert (end.stage, end.outcome, end.error_code) == (LoadStage.PUBLISH, Outcome.CANCELLED, None)


def interrupt() -> None:
    from hwr.outcomes import LoadStage
    from hwr.telemetry import events as E

    with telemetry.span(E.StageBegun(stage=LoadStage.PUBLISH), stage=LoadStage.PUBLISH):
        raise KeyboardInterrupt


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
