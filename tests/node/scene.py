"""Eight workers, each held up in its own way: the scene that every view of the node must tell right.

    with Scene(tmp_path) as scene:
        scene.cause_all()
        scene.expected[4], scene.blames[4], scene.caused_ns[4]
        scene.undo(4)

One state alone: Scene(tmp_path, ranks=[2]) and scene.cause("mmap_lock_held"). Workers end with the scene and with the thread that began it.
Run it for people: python tests/node/scene.py --run-dir DIR
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

for _room in ("cuda", "registration", "node"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / _room))

import scene_workers as programs  # noqa: E402
from cuda_standin import Foundry, Standin  # noqa: E402

from hwr.errors import Unavailable  # noqa: E402
from hwr.outcomes import Stall  # noqa: E402
from hwr.procfs.stat import read_stat  # noqa: E402
from hwr.telemetry.clock import boot_ns  # noqa: E402

READY_SECONDS = 60.0
# One mprotect over 512 MiB mapped 700 times takes some three seconds, and 1.1 GiB of page tables; a slow machine needs fewer.
HOLD_SECONDS = 3.0
MAPPED_TIMES = 700
KEY = "3f" * 32
CHUNK_SECONDS = 0.7
CHUNKS = 256  # of 1 MiB: three minutes of them, then again
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
        """Wait for the word of its program.

        Raises:
            RuntimeError: it said something else, ended, or said nothing in time.
        """
        assert self.process.stdout is not None
        # It says one word an exchange: what is not in the pipe is not in the buffer either.
        came, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS)
        line = self.process.stdout.readline() if came else ""
        if line != f"{word}\n":
            raise RuntimeError(f"rank {self.rank} said {line!r} instead of {word!r}: {Path(self._errors.name).read_text()}")

    def say(self, word: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def await_stopped(self, stopped: bool) -> None:
        """Wait until a signal that stops it, or lets it run on, has done so.

        Raises:
            RuntimeError: it has ended, or that did not come true in time.
        """
        deadline = time.monotonic() + READY_SECONDS
        while isinstance(found := read_stat(self.pid), Unavailable) or found.stopped is not stopped:
            if isinstance(found, Unavailable) or time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} is not {'stopped' if stopped else 'running'}: {found}")
            time.sleep(0.001)  # a poll, with the deadline above

    def kill(self) -> None:
        """Kill it and whatever it started, stopped or not; `end` waits for it."""
        if self.process.poll() is None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it and whatever it started."""
        self.kill()
        self.process.wait(READY_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Scene:
    """The workers; a context manager that ends what it started."""

    def __init__(
        self,
        place: Path,
        *,
        ranks: Collection[int] = range(8),
        run_dir: Path | None = None,
        spin: bool = False,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """`place` is for the store and the scratch files; `spin` makes the one that holds its interpreter's lock burn a core.

        `hold_seconds` is how long the mmap lock is held at a time; to be ready for it takes some three times that.
        """
        self.place, self.spin, self.hold_seconds = place, spin, hold_seconds
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
        self.lock = place / "store" / "locks" / f"{KEY}.build.lock"
        self._grouped = grouped
        self._standin: Standin | None = None

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
        """End every process: kill all before one is waited for, which may be in the kernel for seconds."""
        for worker in self.workers.values():
            worker.kill()
        for worker in self.workers.values():
            worker.end()

    def cause_all(self) -> None:
        """Cause every state, the waiter after the holder."""
        for rank in self.ranks:
            self.cause(rank)

    def cause(self, which: int | str) -> int:
        """Cause the state of a rank, or one by name ("gil_held"); return the moment (CLOCK_BOOTTIME)."""
        rank = self.rank(which)
        worker = self.workers[rank]
        worker.say("spin" if rank == 1 and self.spin else "go")
        self.caused_ns[rank] = boot_ns()
        worker.expect("caused")
        if self.expected[rank] is Stall.STOPPED:
            os.kill(worker.pid, signal.SIGSTOP)
            worker.await_stopped(True)
        elif self.expected[rank] is Stall.DEAD:
            os.kill(worker.pid, signal.SIGKILL)
            worker.process.wait(READY_SECONDS)
        self.caused_ns[rank] = boot_ns()
        return self.caused_ns[rank]

    def undo(self, which: int | str) -> None:
        """Let go of a rank what can be let go, and return once it is: all but the dead one.

        0 runs on and keeps its lock until 4 is to have it; 6 moves on when 7 comes. 0, 1 and 2 can be caused again.
        """
        rank = self.rank(which)
        worker = self.workers[rank]
        if rank == 0:
            os.kill(worker.pid, signal.SIGCONT)
            worker.await_stopped(False)
        elif rank in (1, 2):
            os.kill(worker.pid, signal.SIGUSR1)
            worker.expect("undone")
        elif rank == 4:
            os.kill(self.workers[0].pid, signal.SIGCONT)
            self.workers[0].say("release")
            self.workers[0].expect("undone")
            worker.expect("undone")
        elif rank == 5 and self._standin is not None:
            worker.say("enough")
            self._standin.configure()
            worker.expect("undone")
        elif rank == GROUP_FIRST_RANK and self._grouped:
            self.workers[rank + 1].say("meet")
            self.workers[rank + 1].expect("caused")
            worker.expect("undone")
        else:
            raise ValueError(f"rank {rank} cannot be let go")

    def rank(self, which: int | str) -> int:
        """Return the rank that is to be in a state."""
        if isinstance(which, int):
            return which
        return next(rank for rank in self.ranks if self.expected[rank] == which)

    def _start(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock.parent.mkdir(parents=True)
        (self.place / "store" / "artifacts").mkdir()
        for rank, program, arguments in self._programs(str(self.lock), str(self.place / "group")):
            errors = self.place / f"rank{rank}.err"
            self.workers[rank] = SceneWorker(rank, program, arguments, self.run_dir, "scene", errors)
        for rank in self.ranks:
            self.workers[rank].expect("ready")

    def _programs(self, lock: str, group: str) -> Iterator[tuple[int, str, list[str]]]:
        if 5 in self.ranks:
            foundry = self.place / "foundry"
            foundry.mkdir()
            self._standin = standin = Foundry(foundry).standin(self.place / "libcudart")
            standin.configure(f"register * sleep {CHUNK_SECONDS}")
            payload = self.place / "payload-00001.safetensors"
            with payload.open("wb") as file:
                file.truncate(CHUNKS << 20)
            payload.chmod(0o444)
        collective = [group, str(GROUP_FIRST_RANK)]
        of = {
            0: (programs.STOPPED, [lock]),
            1: (programs.GIL_HELD, []),
            2: (programs.MMAP_LOCK_HELD, [str(MAPPED_TIMES), str(self.hold_seconds)]),
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


def _ended(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Hold the scene for people, until Ctrl-C or a request to end."""
    signal.signal(signal.SIGTERM, _ended)
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
