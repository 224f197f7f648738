"""One class a code, and the pending error of a thread."""

from __future__ import annotations

import ctypes
import inspect
import pickle
import threading
from pathlib import Path

import pytest
from cuda_standin import Standin

from hwr.cuda import errors
from hwr.cuda.libcudart import Libcudart, load
from hwr.cuda.prototypes import PROTOTYPES

_CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CudaError)]
_NAMED = sorted((kind for kind in _CLASSES if kind.NUMBER is not None), key=lambda kind: kind.NUMBER or 0)


@pytest.fixture
def runtime(standin: Standin) -> Libcudart:
    """The stand-in, loaded."""
    found = load(standin.path)
    assert isinstance(found, Libcudart)
    return found


@pytest.mark.parametrize("kind", _NAMED, ids=lambda kind: kind.__name__)
def test_a_code_has_its_class_which_is_named_as_the_runtime_names_it(
    standin: Standin, runtime: Libcudart, kind: type[errors.CudaError]
) -> None:
    standin.configure(f"device 1 fail {kind.NUMBER}")
    with pytest.raises(errors.CudaError) as caught:
        runtime.value("cudaGetDevice")
    error = caught.value
    assert type(error) is kind
    assert error.number == kind.NUMBER
    assert error.name == f"cudaError{kind.__name__}"
    assert str(error).startswith(f"cudaGetDevice failed: {error.name} ({error.number}): {error.text}\n")
    assert type(pickle.loads(pickle.dumps(error))) is kind


def test_a_code_without_a_class_keeps_its_number(standin: Standin, runtime: Libcudart) -> None:
    standin.configure("device 1 fail 4242")
    with pytest.raises(errors.CudaError, match=r"cudaGetDevice failed: unrecognized error code \(4242\)") as caught:
        runtime.value("cudaGetDevice")
    assert type(caught.value) is errors.CudaError


def test_no_code_has_two_classes() -> None:
    assert len({kind.NUMBER for kind in _NAMED}) == len(_NAMED)
    assert all(errors.error_class(kind.NUMBER or 0) is kind for kind in _NAMED)


def test_a_pending_error_is_looked_at_and_consumed_and_survives_a_success(runtime: Libcudart) -> None:
    with pytest.raises(errors.InvalidDevice):
        runtime.call("cudaSetDevice", 9)
    assert runtime.value("cudaGetDevice") == 0
    assert [runtime.pending_error(), runtime.pending_error(), runtime.last_error(), runtime.last_error()] == [101, 101, 101, 0]


def test_a_pending_error_is_that_of_a_thread(runtime: Libcudart) -> None:
    with pytest.raises(errors.InvalidDevice):
        runtime.call("cudaSetDevice", 9)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(runtime.last_error()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert runtime.last_error() == 101


def test_the_words_of_a_code_take_no_pending_error_away(runtime: Libcudart) -> None:
    with pytest.raises(errors.InvalidDevice):
        runtime.call("cudaSetDevice", 9)
    assert (runtime.error_name(713), runtime.error_text(2)) == ("cudaErrorHostMemoryNotRegistered", "out of memory")
    assert runtime.last_error() == 101


def test_an_address_is_never_cut_to_an_int(standin: Standin, runtime: Libcudart) -> None:
    """What ctypes does to an undeclared argument; and a wrong type reaches no driver."""
    with pytest.raises(errors.InvalidValue):
        runtime.call("cudaHostRegister", 0x7F12_3456_7000, 1 << 39, 0x08)
    (call,) = standin.calls("cudaHostRegister")
    assert (call.address, call.bytes) == (0x7F12_3456_7000, 1 << 39)
    with pytest.raises(ctypes.ArgumentError):
        runtime.call("cudaHostRegister", 1.5, 4096, 0x08)
    assert len(standin.calls("cudaHostRegister")) == 1


def test_a_declaration_is_not_shared_with_whoever_else_uses_the_library(standin: Standin, runtime: Libcudart) -> None:
    theirs = ctypes.CDLL(str(standin.path))
    assert theirs.cudaHostRegister.argtypes is None
    function = runtime.function("cudaHostRegister")
    assert callable(function)
    assert function.argtypes == PROTOTYPES["cudaHostRegister"][1]  # type: ignore[attr-defined]


def test_every_function_that_is_called_is_declared() -> None:
    """Text of the rooms that call the runtime: no other name of it than those of the table."""
    import re

    import hwr

    root = Path(hwr.__file__).parent
    sources = [*root.glob("cuda/libcudart.py"), *root.glob("registration/**/*.py")]
    called = {name for source in sources for name in re.findall(r'"(cuda[A-Z][A-Za-z]+)"', source.read_text())}
    assert called >= {"cudaHostRegister", "cudaGetLastError"}
    assert called <= set(PROTOTYPES)
