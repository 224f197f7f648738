"""Eight workers, each held up in its own way: the scene that every view of the node must tell right.

    with Scene(tmp_path) as scene:
        scene.cause_all()
        scene.expected[4], scene.blames[4], scene.caused_ns[4]

Run it for people: python tests/node/scene.py --run-dir DIR
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

for _room in ("cuda", "registration", "node"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / _room))

import scene_workers as programs  # noqa: E402
from cuda_standin import Foundry  # noqa: E402

from hwr.outcomes import Stall  # noqa: E402
from hwr.telemetry.clock import boot_ns  # noqa: E402

READY_SECONDS = 60.0
# One mprotect over 512 MiB mapped this many times takes some three seconds, and 1.1 GiB of page tables.
MAPPED_TIMES = 700
KEY = "3f" * 32
CHUNK_SECONDS = 0.7
GROUP_FIRST_RANK = 6
_TESTS = Path(__file__).resolve().parents[1]


class SceneWorker:
    """One process of the scene; `command` causes its state."""

    def __init__(self, rank: int, program: str, arguments: list[str], run_dir: Path, run_id: str, errors: Path) -> None:
        self.rank = rank
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HWR_", "RANK", "WORLD_SIZE"))}
        self._errors = errors.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(run_dir), str(rank), *arguments],
            env={**own, "HWR_RUN_ID": run_id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, word: str) -> None:
        """Wait for the word of its program."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != f"{word}\n":
            raise RuntimeError(f"rank {self.rank} said {line!r} instead of {word!r}: {Path(self._errors.name).read_text()}")

    def say(self, word: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End it and whatever it started, stopped or not."""
        if self.process.poll() is None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
        self.process.wait(READY_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Scene:
    """The workers; a context manager that ends what it started."""

    def __init__(self, place: Path, *, ranks: Collection[int] = range(8), run_dir: Path | None = None, spin: bool = False) -> None:
        """`place` is for the store and the scratch files; `spin` makes the one that holds its interpreter's lock burn a core."""
        self.place, self.spin = place, spin
        self.run_dir = run_dir or place / "run"
        self.ranks = tuple(ranks)
        self.workers: dict[int, SceneWorker] = {}
        self.caused_ns: dict[int, int] = {}
        grouped = {GROUP_FIRST_RANK, GROUP_FIRST_RANK + 1} <= set(self.ranks)
        self.expected: dict[int, Stall] = {
            0: Stall.STOPPED,
            1: Stall.GIL_HELD,
            2: Stall.MMAP_LOCK_HELD,
            3: Stall.DEAD,
            4: Stall.LOCK_WAIT,
            5: Stall.PIN_ADVANCING,
            6: Stall.COLLECTIVE_WAIT,
            7: Stall.NONE,
        }
        self.blames: dict[int, tuple[str, ...]] = {4: ("default/0",), 6: ("default/7",)}
        self._grouped = grouped

    def __enter__(self) -> Scene:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        for worker in self.workers.values():
            worker.end()

    def cause_all(self) -> None:
        """Cause every state, the waiter after the holder."""
        for rank in self.ranks:
            self.cause(rank)

    def cause(self, rank: int) -> int:
        """Cause one state; return the moment (CLOCK_BOOTTIME)."""
        worker = self.workers[rank]
        worker.say("spin" if rank == 1 and self.spin else "go")
        self.caused_ns[rank] = boot_ns()
        worker.expect("caused")
        if self.expected[rank] is Stall.STOPPED:
            os.kill(worker.pid, signal.SIGSTOP)
        elif self.expected[rank] is Stall.DEAD:
            os.kill(worker.pid, signal.SIGKILL)
            worker.process.wait(READY_SECONDS)
        self.caused_ns[rank] = boot_ns()
        return self.caused_ns[rank]

    def undo(self, rank: int) -> None:
        """Let go what can be let go: the stopped one continues, the missed one comes."""
        if rank == 0:
            os.kill(self.workers[0].pid, signal.SIGCONT)
        elif rank == GROUP_FIRST_RANK:
            self.workers[rank + 1].say("meet")
            self.workers[rank + 1].expect("caused")
        else:
            raise ValueError(f"rank {rank} cannot be let go")

    def _start(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        locks = self.place / "store" / "locks"
        locks.mkdir(parents=True)
        (self.place / "store" / "artifacts").mkdir()
        lock = str(locks / f"{KEY}.build.lock")
        group = self.place / "group"
        for rank, program, arguments in self._programs(lock, str(group)):
            errors = self.place / f"rank{rank}.err"
            self.workers[rank] = SceneWorker(rank, program, arguments, self.run_dir, "scene", errors)
        for rank in self.ranks:
            self.workers[rank].expect("ready")

    def _programs(self, lock: str, group: str) -> Iterator[tuple[int, str, list[str]]]:
        if 5 in self.ranks:
            foundry = self.place / "foundry"
            foundry.mkdir()
            standin = Foundry(foundry).standin(self.place / "libcudart")
            standin.configure(f"register * sleep {CHUNK_SECONDS}")
            payload = self.place / "payload-00001.safetensors"
            with payload.open("wb") as file:
                file.truncate(1 << 30)
            payload.chmod(0o444)
        collective = [group, str(GROUP_FIRST_RANK)]
        of = {
            0: (programs.STOPPED, [lock]),
            1: (programs.GIL_HELD, []),
            2: (programs.MMAP_LOCK_HELD, [str(MAPPED_TIMES)]),
            3: (programs.DEAD, []),
            4: (programs.LOCK_WAIT, [lock]),
            6: (programs.COLLECTIVE_WAIT, collective),
            7: (programs.HEALTHY_IN_GROUP, collective) if self._grouped else (programs.HEALTHY, []),
        }
        if 5 in self.ranks:
            of[5] = (programs.PIN_ADVANCING, [str(standin.path), str(payload), str(_TESTS / "registration"), str(_TESTS / "cuda")])
        # The slowest to start first: those that import torch, then the one that fills a gigabyte of page tables.
        for rank in sorted(self.ranks, key=lambda rank: (rank not in (6, 7), rank != 2, rank)):
            yield rank, *of[rank]


def main() -> int:
    """Hold the scene for people."""
    parser = argparse.ArgumentParser(description="Eight workers, each held up in its own way, until Ctrl-C.")
    parser.add_argument("--run-dir", type=Path, required=True, help="where their journals go")
    parser.add_argument("--spin", action="store_true", help="the one that holds its interpreter's lock burns a core")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, Scene(Path(place), run_dir=chosen.run_dir, spin=chosen.spin) as scene:
        scene.cause_all()
        for rank in scene.ranks:
            print(f"rank {rank}  pid {scene.workers[rank].pid:<8} {scene.expected[rank]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
