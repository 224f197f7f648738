"""Where a model comes from: its code, its ordinary loading, its skeleton.

Owns the one protocol that the runtime loads through, and the two ways to meet it: any callable that builds a module, and a directory that
transformers or diffusers wrote. Promises that ordinary loading is the library's own. Refuses remote code, always.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard, cast

import torch
from safetensors import safe_open

from hwr.checkpoint.source import CheckpointSource, open_source, read_config
from hwr.errors import CanonicalLoadFailed, HwrError, RestorePreflightFailed
from hwr.loader.plan import CASTS
from hwr.loader.producer import held_tensors
from hwr.loader.skeleton import build_skeleton
from hwr.telemetry import emit
from hwr.telemetry.events import BuffersIgnored
from hwr.units import canonical_json, one_line

DTYPES: Final = ("float32", "float16", "bfloat16", "float64")


class ModelFactory(Protocol):
    """What the runtime needs of a model. `name` and `metadata` become part of the artifact's identity."""

    @property
    def name(self) -> str:
        """Library and class, or module and function."""

    @property
    def dtype(self) -> str:
        """The dtype that it is loaded in."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """JSON values that give the tensors their meaning."""

    def skeleton(self) -> torch.nn.Module:
        """Build the module with its parameters on meta and everything else real."""

    def canonical(self, directory: Path, source: CheckpointSource | None) -> torch.nn.Module:
        """Load the module the ordinary way; `source` is None where the checkpoint was not looked at."""


class CallableFactory:
    """A callable that builds the module; the checkpoint's tensors have the module's own names."""

    def __init__(self, build: Callable[[], torch.nn.Module]) -> None:
        self._build = build
        self.name = f"{getattr(build, '__module__', '')}.{getattr(build, '__qualname__', type(build).__qualname__)}"
        self.dtype = "as_built"
        self._spare: list[torch.nn.Module] = []

    @functools.cached_property
    def metadata(self) -> Mapping[str, Any]:
        """What the callable builds, since its name says little: two closures of one name may build in different dtypes."""
        skeleton = self.skeleton()
        self._spare.append(skeleton)
        rows = [[name, kind.value, str(tensor.dtype), list(tensor.shape)] for name, kind, tensor in held_tensors(skeleton)]
        return {"structure_sha256": hashlib.sha256(canonical_json(rows)).hexdigest()}

    def skeleton(self) -> torch.nn.Module:
        """Build it with parameters on meta."""
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        module: torch.nn.Module = build_skeleton(self._build)
        return module

    def canonical(self, directory: Path, source: CheckpointSource | None) -> torch.nn.Module:
        """Build it and load the checkpoint's tensors by name."""
        self._spare.clear()
        module = self._build()
        state = {}
        for path in _weight_files(directory, source):
            with safe_open(path, framework="pt") as file:
                state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (safe_open is no mapping)
        try:
            missing, unexpected = module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise CanonicalLoadFailed(
                reason="shapes",
                model=directory.name,
                problem=one_line(str(error)),
                remedy="Give a module whose tensors have the checkpoint's shapes.",
            ) from error
        given = {id(tensor) for name, _, tensor in held_tensors(module) if name in state}
        tied = {name for name, _, tensor in held_tensors(module) if id(tensor) in given}
        missing = [name for name in missing if name not in tied]
        non_persistent = {name for name, _ in module.named_buffers()}
        ignored = [name for name in unexpected if name in non_persistent]
        if ignored:
            emit(BuffersIgnored(names=tuple(sorted(ignored))))
        odd = sorted({*missing, *unexpected} - set(ignored))
        if odd:
            raise CanonicalLoadFailed(
                reason="names",
                model=directory.name,
                problem=f"checkpoint and module disagree about {len(odd)} tensors: {', '.join(odd[:3])}",
                remedy="Give a module that has the checkpoint's names, or a layout plan that renames them.",
            )
        return module


# The format's words for what a model can be loaded in.
_FLOATING: Final = {word: name for name, word in CASTS.items()}


@dataclass(frozen=True, slots=True)
class _Chosen:
    model_class: Any
    library: str
    version: str
    dtype: str
    config_sha256: str


class PretrainedFactory:
    """A directory written by transformers or diffusers: class by config.json, ordinary loading by `from_pretrained`."""

    def __init__(self, directory: str | os.PathLike[str], dtype: str | None = None) -> None:
        """Remember where and how; nothing is read before the first use, so that a bad checkpoint is refused for its own reason.

        Every other member raises CanonicalLoadFailed if there is no usable config.json or no library has the class.
        """
        self._directory, self._dtype = Path(directory), dtype
        self._uninitialised: tuple[str, ...] = ()

    @functools.cached_property
    def _chosen(self) -> _Chosen:
        config, text, problem = read_config(self._directory)
        if config is None or text is None:
            raise self._failure("config", f"config.json: {problem}", "Give a directory that save_pretrained wrote.")
        model_class, library, version = _model_class(config, self._failure)
        dtype = self._dtype or self._library_dtype(config, library, version)
        if dtype not in DTYPES:
            raise self._failure("dtype", f"dtype {dtype!r} is not supported", f"Give --dtype one of {', '.join(DTYPES)}.")
        return _Chosen(model_class, library, version, dtype, hashlib.sha256(text.encode()).hexdigest())

    def _library_dtype(self, config: Mapping[str, Any], library: str, version: str) -> str:
        """Return what the library loads in when nobody says: float32; transformers from 5 on asks the configuration, then the weights."""
        if library == "diffusers" or int(version.partition(".")[0]) < 5:
            return "float32"
        told = config.get("dtype") or config.get("torch_dtype")
        if told:
            return str(told).removeprefix("torch.")
        tensors = (tensor for shard in open_source(self._directory).shards for tensor in shard.header.tensors)
        found = (_FLOATING[tensor.dtype] for tensor in tensors if tensor.dtype in _FLOATING)
        return next(found, "float32")

    @property
    def uninitialised(self) -> tuple[str, ...]:
        """Names that the last ordinary load did not find in the checkpoint; the library made them up."""
        return self._uninitialised

    @property
    def name(self) -> str:
        """The library and its class."""
        return f"{self._chosen.library}.{self._chosen.model_class.__name__}"

    @property
    def dtype(self) -> str:
        """The dtype that it is loaded in: as asked for, else as the library would."""
        return self._chosen.dtype

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What gives the tensors their meaning: library, its version, the configuration."""
        chosen = self._chosen
        return {"library": chosen.library, "version": chosen.version, "config_sha256": chosen.config_sha256}

    @property
    def config(self) -> Any:
        """The library's own configuration object."""
        chosen = self._chosen
        if chosen.library == "diffusers":
            return chosen.model_class.load_config(self._directory)
        return chosen.model_class.config_class.from_pretrained(self._directory)

    def skeleton(self) -> torch.nn.Module:
        """Build it with parameters on meta, in evaluation mode, as `from_pretrained` leaves it."""
        try:
            return self._skeleton()
        except HwrError:
            raise
        except Exception as error:  # (whatever a foreign class raises: ordinary loading may still work)
            problem = f"no skeleton of {self.name}: {type(error).__name__}: {one_line(str(error))}"
            raise RestorePreflightFailed(reason="skeleton", problem=problem) from error

    def _skeleton(self) -> torch.nn.Module:
        dtype = getattr(torch, self.dtype)
        if self._chosen.library == "diffusers":
            # As its own loading does: buffers that a class makes in float32 stay so, which a cast afterwards would not see.
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return build_skeleton(lambda: self._chosen.model_class.from_config(self.config)).eval()  # type: ignore[no-any-return]
            finally:
                torch.set_default_dtype(before)
        model = build_skeleton(lambda: self._chosen.model_class._from_config(self.config, dtype=dtype)).eval()
        if model.can_generate() and (self._directory / "generation_config.json").is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(self._directory)
        return model  # type: ignore[no-any-return]

    def canonical(self, directory: Path, source: CheckpointSource | None) -> torch.nn.Module:
        """Load it with the library's own `from_pretrained`."""
        dtype = getattr(torch, self.dtype)
        options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
        options["torch_dtype" if self._chosen.library == "diffusers" else "dtype"] = dtype
        try:
            model, told = self._chosen.model_class.from_pretrained(directory, **options)
        except HwrError:
            raise
        except Exception as error:  # (whatever a foreign loader raises becomes one typed failure)
            raise self._failure(
                "load",
                f"{type(error).__name__}: {one_line(str(error))}",
                "Check that the directory is complete and was written for this library.",
            ) from error
        mismatched = (entry if isinstance(entry, str) else entry[0] for entry in told.get("mismatched_keys", ()))
        self._uninitialised = tuple(sorted({*told.get("missing_keys", ()), *mismatched}))
        return model.eval()  # type: ignore[no-any-return]

    def _failure(self, reason: str, problem: str, remedy: str) -> CanonicalLoadFailed:
        return CanonicalLoadFailed(reason=reason, model=self._directory.name or str(self._directory), problem=problem, remedy=remedy)


def as_factory(module_factory: ModelFactory | Callable[[], torch.nn.Module]) -> ModelFactory:
    """Take a factory as it is, or wrap a callable that builds a module."""
    if _is_factory(module_factory):
        return module_factory
    return CallableFactory(cast("Callable[[], torch.nn.Module]", module_factory))


def _is_factory(value: ModelFactory | Callable[[], torch.nn.Module]) -> TypeGuard[ModelFactory]:
    # Asked of the class: a property of the instance may import a library, or fail.
    return hasattr(type(value), "skeleton") and hasattr(type(value), "canonical")


def _model_class(config: Mapping[str, Any], failure: Callable[[str, str, str], CanonicalLoadFailed]) -> tuple[Any, str, str]:
    library = "diffusers" if "_class_name" in config else "transformers"
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise failure("library", f"{library} is not installed", f"Install it: `pip install {library}`.") from error
    architectures = config.get("architectures")
    name = config.get("_class_name") or (architectures[0] if isinstance(architectures, list) and architectures else "AutoModel")
    found = getattr(module, str(name), None)
    if not isinstance(found, type):
        raise failure(
            "class", f"{library} {module.__version__} has no class {name!r}; remote code is never run", f"Install a {library} that has it."
        )
    if name == "AutoModel":
        found = _auto_model(module, config, failure)
    return found, library, str(module.__version__)


def _auto_model(transformers: Any, config: Mapping[str, Any], failure: Callable[[str, str, str], CanonicalLoadFailed]) -> Any:
    model_type = config.get("model_type")
    try:
        return transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    except KeyError as error:
        remedy = "Give a config.json with architectures, or another transformers."
        raise failure("class", f"no class is known for model_type {model_type!r}", remedy) from error


def _weight_files(directory: Path, source: CheckpointSource | None) -> list[Path]:
    if source is None:
        source = open_source(directory)
    return [shard.path for shard in source.shards]
