"""Which copy of libcudart is used: torch's own, however it was loaded, and none before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_standin import LAST_ERROR, Foundry

from hwr.cuda.libcudart import Libcudart, load
from hwr.errors import Unavailable

# Say which copy `load` takes; a pending error that was made through it shows that it is the very same instance.
_LOAD = """
import ctypes, os, pathlib, sys
from hwr.cuda.libcudart import load

def say():
    found = load()
    print(f"{found.origin} {found.path}" if found else f"unavailable {found.reason}")
    return found
"""


def test_importing_loads_nothing(python: Callable[..., str]) -> None:
    """Neither the room nor the driver: no library is mapped and torch is not imported before something is asked."""
    code = """
import sys
before = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
import hwr.cuda.libcudart, hwr.cuda.errors, hwr.registration.drivers.cuda, hwr.registration.drivers.mlock
hwr.registration.drivers.cuda.CudaDriver(), hwr.registration.drivers.mlock.MlockDriver()
after = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print("torch" in sys.modules, *(name for name in after - before if "cuda" in name))
"""
    assert python(code).split() == ["False"]


def test_the_argument_is_obeyed_and_the_library_asked_nothing(foundry: Foundry, tmp_path: Path) -> None:
    standin = foundry.standin(tmp_path)
    found = load(standin.path)
    assert isinstance(found, Libcudart)
    assert (found.origin, found.path) == ("argument", str(standin.path))
    assert not standin.calls()


def test_a_missing_or_strange_file_is_a_reason(tmp_path: Path) -> None:
    missing = load(tmp_path / "libcudart.so.12")
    (tmp_path / "text.so").write_bytes(bytes(4096))
    strange = load(tmp_path / "text.so")
    assert isinstance(missing, Unavailable)
    assert isinstance(strange, Unavailable)
    assert "No such file" in missing.reason
    assert "invalid ELF header" in strange.reason


@pytest.mark.parametrize("name", ["libcudart.so.12", "libcudart-9335f6a2.so.12", "libcudart.so.11.0"])
@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_the_only_copy_in_the_process_is_used(foundry: Foundry, tmp_path: Path, python: Callable[..., str], name: str, mode: str) -> None:
    standin = foundry.standin(tmp_path, name)
    code = """
ctypes.CDLL(sys.argv[1], mode=getattr(os, sys.argv[2])).cudaSetDevice(9)  # leaves 101 pending
print(say().last_error())
"""
    assert python(_LOAD + code, standin.path, mode).splitlines() == [f"process {standin.path}", "101"]


def test_a_file_that_is_gone_or_replaced_is_still_the_same_instance(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    """An update of the package under a running server: maps says (deleted), and the path is another file or none."""
    standin = foundry.standin(tmp_path)
    code = """
ctypes.CDLL(sys.argv[1]).cudaSetDevice(9)
new = pathlib.Path(sys.argv[1]).read_bytes()
os.unlink(sys.argv[1])
assert " (deleted)" in open("/proc/self/maps").read()
print(say().last_error())
pathlib.Path(sys.argv[1]).write_bytes(new)
ctypes.CDLL(sys.argv[1]).cudaSetDevice(9)
print(say().last_error())
"""
    assert python(_LOAD + code, standin.path).splitlines() == [f"process {standin.path}", "101"] * 2


@pytest.mark.parametrize("dependent", ["libc10_cuda.so", "libtorch_cuda.so"])
@pytest.mark.parametrize("others_first", [True, False])
def test_of_several_copies_torch_s_is_used(
    foundry: Foundry, tmp_path: Path, python: Callable[..., str], dependent: str, others_first: bool
) -> None:
    """Another library brought a copy of its own, before torch or after; torch's is private to it, as in the wheels."""
    torch_s = foundry.standin(tmp_path / "torch", "libcudart-9335f6a2.so.12")
    other = foundry.standin(tmp_path / "other", "libcudart.so.11.0")
    same_name = foundry.standin(tmp_path / "same", "libcudart-5c1d7a22.so.12")
    torch = foundry.dependent(dependent, torch_s.path)
    code = """
torch, other, same_name, first = sys.argv[1:]
load_others = lambda: [ctypes.CDLL(path, mode=os.RTLD_LOCAL) for path in (other, same_name)]
if first == "True": load_others()
torch = ctypes.CDLL(torch, mode=os.RTLD_LOCAL)
if first != "True": load_others()
try:
    ctypes.CDLL(None).cudaGetLastError
except AttributeError:
    print("private")
found = say()
found.function("cudaSetDevice")(9)
print(torch.ask_runtime(), found.last_error())
"""
    said = python(_LOAD + code, torch, other.path, same_name.path, others_first).splitlines()
    assert said == ["private", f"torch {torch_s.path}", "101 0"]
    assert torch_s.calls(LAST_ERROR)
    assert not other.calls() + same_name.calls()


def test_a_path_that_the_loader_spells_in_another_way_is_found(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    """torch's libraries name the runtime of another wheel by $ORIGIN/../../nvidia/cuda_runtime/lib, which maps never shows."""
    standin = foundry.standin(tmp_path / "nvidia/cuda_runtime/lib")
    (tmp_path / "torch/lib").mkdir(parents=True)
    torch = foundry.dependent("libc10_cuda.so", standin.path)
    roundabout = tmp_path / "torch/lib/../../nvidia/cuda_runtime/lib"
    said = python(
        _LOAD + "ctypes.CDLL(sys.argv[1])\nctypes.CDLL(sys.argv[2])\nos.unlink(sys.argv[3])\nsay()",
        roundabout / standin.path.name,
        torch,
        standin.path,
    )
    assert said.splitlines() == [f"torch {roundabout / standin.path.name}"]


def test_several_copies_and_nothing_to_tell_them_apart_is_unavailable(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    one, other = foundry.standin(tmp_path / "one", "libcudart.so.12"), foundry.standin(tmp_path / "other", "libcudart.so.11.0")
    said = python(_LOAD + "[ctypes.CDLL(path) for path in sys.argv[1:]]\nsay()", one.path, other.path)
    assert said.startswith("unavailable several copies of libcudart are loaded")
    assert str(one.path) in said
    assert str(other.path) in said


def test_a_file_that_is_only_mapped_is_no_loaded_library(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    one, other = foundry.standin(tmp_path / "one"), foundry.standin(tmp_path / "other")
    code = """
import mmap
ctypes.CDLL(sys.argv[1])
file = open(sys.argv[2], "rb")
mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert sys.argv[2] in open("/proc/self/maps").read()
say()
"""
    assert python(_LOAD + code, one.path, other.path).splitlines() == [f"process {one.path}"]


def test_with_nothing_loaded_the_wheel_s_library_is_taken(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    standin = foundry.standin(tmp_path / "nvidia/cuda_runtime/lib")
    assert python(_LOAD + "sys.path.insert(0, sys.argv[1])\nsay()", tmp_path).splitlines() == [f"wheel {standin.path}"]


def test_else_the_loader_finds_it_by_its_own_means(foundry: Foundry, tmp_path: Path, python: Callable[..., str]) -> None:
    """LD_LIBRARY_PATH and the cache of ldconfig; the working directory is not searched, though Python may have it in its path."""
    foundry.standin(tmp_path / "here/nvidia/cuda_runtime/lib", "libcudart.so.13")
    standin = foundry.standin(tmp_path / "there", "libcudart.so.13")
    code = "os.chdir(sys.argv[1])\nsys.path[:] = ['', '.']\nprint(say().value('cudaRuntimeGetVersion'))"
    said = python(_LOAD + code, tmp_path / "here", prefix=["env", f"LD_LIBRARY_PATH={standin.directory}"])
    assert said.splitlines() == ["system libcudart.so.13", "12080"]
    assert standin.calls()


def test_a_function_that_is_missing_is_a_value(foundry: Foundry, tmp_path: Path) -> None:
    """An old or cut-down library loads all the same; what it lacks says so when it is wanted."""
    found = load(foundry.standin(tmp_path, defines=["NO_LAST_ERROR", "NO_REGISTER"]).path)
    assert isinstance(found, Libcudart)
    register, last_error = found.function("cudaHostRegister"), found.last_error()
    assert isinstance(register, Unavailable)
    assert isinstance(last_error, Unavailable)
    assert isinstance(found.pending_error(), Unavailable)
    assert "cudaHostRegister" in register.reason
    assert found.value("cudaRuntimeGetVersion") == 12080
    with pytest.raises(KeyError):
        found.function("cudaFree")


def test_an_unreadable_proc_is_a_reason(tmp_path: Path) -> None:
    found = load(proc_root=tmp_path)
    assert isinstance(found, Unavailable)
    assert "self/maps" in found.reason
