"""Where a model comes from: its code, its ordinary loading, its skeleton.

Owns the one protocol that the runtime loads through, and the two ways to meet it: any callable that builds a module, and a directory that
transformers or diffusers wrote. Promises that ordinary loading is the library's own. Refuses remote code, always.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import safe_open

from hwr.checkpoint.source import CheckpointSource
from hwr.errors import CanonicalLoadFailed, HwrError
from hwr.loader.skeleton import build_skeleton
from hwr.telemetry import emit
from hwr.telemetry.events import BuffersIgnored
from hwr.units import one_line

DTYPES: Final = ("float32", "float16", "bfloat16", "float64")


class ModelFactory(Protocol):
    """What the runtime needs of a model. `name` and `metadata` become part of the artifact's identity."""

    name: str
    dtype: str
    metadata: Mapping[str, Any]

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
        self.metadata: Mapping[str, Any] = {}

    def skeleton(self) -> torch.nn.Module:
        return build_skeleton(self._build)

    def canonical(self, directory: Path, source: CheckpointSource | None) -> torch.nn.Module:
        module = self._build()
        state = {}
        for path in _weight_files(directory, source):
            with safe_open(path, framework="pt") as file:
                state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (safe_open is no mapping)
        missing, unexpected = module.load_state_dict(state, strict=False)
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


class PretrainedFactory:
    """A directory written by transformers or diffusers: class by config.json, ordinary loading by `from_pretrained`."""

    def __init__(self, directory: str | os.PathLike[str], dtype: str | None = None) -> None:
        """Choose the class and the dtype.

        Raises:
            CanonicalLoadFailed: no usable config.json, or no library has the class.
        """
        from hwr.checkpoint.source import read_config  # the one reader of config.json

        self._directory = Path(directory)
        config, text, problem = read_config(self._directory)
        if config is None or text is None:
            raise self._failure("config", f"config.json: {problem}", "Give a directory that save_pretrained wrote.")
        self._class, library, version = _model_class(config, self._failure)
        self.name = f"{library}.{self._class.__name__}"
        self.dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
        if self.dtype not in DTYPES:
            raise self._failure("dtype", f"dtype {self.dtype!r} is not supported", f"Give --dtype one of {', '.join(DTYPES)}.")
        self._library = library
        self.metadata = {"library": library, "version": version, "config_sha256": hashlib.sha256(text.encode()).hexdigest()}

    @property
    def config(self) -> Any:
        """The library's own configuration object."""
        return self._class.load_config(self._directory) if self._library == "diffusers" else self._class.config_class.from_pretrained(self._directory)

    def skeleton(self) -> torch.nn.Module:
        dtype = getattr(torch, self.dtype)
        if self._library == "diffusers":
            return build_skeleton(lambda: self._class.from_config(self.config).to(dtype)).eval()
        model = build_skeleton(lambda: self._class._from_config(self.config, dtype=dtype)).eval()
        if model.can_generate() and (self._directory / "generation_config.json").is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(self._directory)
        return model

    def canonical(self, directory: Path, source: CheckpointSource | None) -> torch.nn.Module:
        dtype = getattr(torch, self.dtype)
        options: dict[str, Any] = {"local_files_only": True}
        options["torch_dtype" if self._library == "diffusers" else "dtype"] = dtype
        try:
            model = self._class.from_pretrained(directory, **options)
        except HwrError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever a foreign loader raises becomes one typed failure)
            raise self._failure(
                "load", f"{type(error).__name__}: {one_line(str(error))}", "Check that the directory is complete and was written for this library."
            ) from error
        return model.eval()

    def _failure(self, reason: str, problem: str, remedy: str) -> CanonicalLoadFailed:
        return CanonicalLoadFailed(reason=reason, model=self._directory.name or str(self._directory), problem=problem, remedy=remedy)


def as_factory(module_factory: ModelFactory | Callable[[], torch.nn.Module]) -> ModelFactory:
    """Take a factory as it is, or wrap a callable that builds a module."""
    if hasattr(module_factory, "canonical") and hasattr(module_factory, "skeleton"):
        return module_factory  # type: ignore[return-value]
    return CallableFactory(module_factory)  # type: ignore[arg-type]


def _model_class(config: Mapping[str, Any], failure: Callable[[str, str, str], CanonicalLoadFailed]) -> tuple[Any, str, str]:
    library = "diffusers" if "_class_name" in config else "transformers"
    try:
        import importlib

        module = importlib.import_module(library)
    except ImportError as error:
        raise failure("library", f"{library} is not installed", f"Install it: `pip install {library}`.") from error
    architectures = config.get("architectures")
    name = config.get("_class_name") or (architectures[0] if isinstance(architectures, list) and architectures else "AutoModel")
    found = getattr(module, str(name), None)
    if not isinstance(found, type):
        raise failure("class", f"{library} {module.__version__} has no class {name!r}; remote code is never run", f"Install a {library} that has it.")
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
        from hwr.checkpoint.source import open_source

        source = open_source(directory)
    return [shard.path for shard in source.shards]
