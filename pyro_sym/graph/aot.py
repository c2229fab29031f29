"""Graphs compiled ahead of time by ``torch._inductor``, and cached on disk for later runs."""

from __future__ import annotations

import atexit
import errno
import getpass
import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from pyro_sym.graph.record import Function

__all__ = ["CompilationError", "cache_dir", "compiled"]

aten = torch.ops.aten

ADVICE = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to"


class CompilationError(RuntimeError):
    """A graph can't be compiled, most often because there is no C++ compiler."""


def cache_dir() -> Path:
    """The folder of compiled packages, within that of ``torch._inductor``, ``TORCHINDUCTOR_CACHE_DIR``."""
    # torch's own rule: importing torch._inductor for it takes seconds.
    root = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if root is None:
        try:
            user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        except (KeyError, ModuleNotFoundError, OSError):
            user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
        root = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return Path(root, "pyro_sym")


def compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Function:
    """Compile a graph for inputs of these shapes, or load it from the cache.

    The graph must be free of side effects. Its tensors become inputs, so that a package also serves other
    data of the same shapes, strides and dtypes. If the cache folder can't be written to, a temporary one is
    used, with a warning; a graph that can't be compiled raises a ``CompilationError``.
    """
    lifted, constants = _with_constants_as_inputs(graph)
    everything = [*inputs, *constants]
    run = _load(_package(lifted, everything)).run

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(run([*given, *constants]))

    return function


def _with_constants_as_inputs(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph that takes its tensors as further inputs, and these tensors."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    constants: list[Tensor] = []
    nodes = list(graph.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            env[node] = new.placeholder(node.name)
    tensors = {n: getattr(graph, str(n.target)) for n in nodes if n.op == "get_attr"}
    for node, tensor in tensors.items():
        if not _is_uniform(tensor):
            env[node] = new.placeholder(node.name)
            constants.append(tensor)
    for node in nodes:
        if node in tensors and node not in env:  # the compiler can simplify operations with numbers
            options = {"dtype": tensors[node].dtype, "device": tensors[node].device}
            number = tensors[node].flatten()[0].item()
            env[node] = new.call_function(aten.full.default, (list(tensors[node].shape), number), options)
        elif node not in env:
            env[node] = new.node_copy(node, env.__getitem__)
    return fx.GraphModule(torch.nn.Module(), new), constants


def _is_uniform(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _key(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> str:
    """A name for a package, from all that it depends on."""
    parts = [
        graph.code,
        *[f"{tuple(t.shape)} {t.stride()} {t.dtype} {t.device}" for t in inputs],
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",  # a constant in the code that inductor writes
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _package(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Path:
    """Find or build a graph's package, in a temporary folder if the cache can't be written to."""
    name = f"{_key(graph, inputs)}.pt2"
    path = cache_dir() / name
    if _exists(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        _build(graph, inputs, path)
    except OSError as error:
        return _elsewhere(graph, inputs, path, error)
    return path


def _elsewhere(graph: fx.GraphModule, inputs: Sequence[Tensor], path: Path, error: OSError) -> Path:
    problem = f"{path.parent} can't be written to ({error.strerror or error})"
    try:
        other = _temporary_folder() / path.name
        if not other.exists():
            kept = f"compiled code is kept in {other.parent} until the process ends"
            warnings.warn(f"{problem}, so {kept}; {ADVICE}", stacklevel=8)
            with _inductor_writes_to(other.parent):
                _build(graph, inputs, other)
    except OSError as again:
        raise CompilationError(f"{problem}, nor can a temporary folder ({again}); {ADVICE}") from again
    return other


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the folder can't be read
        return False


@cache
def _temporary_folder() -> Path:
    """A folder of this process, deleted at its end."""
    folder = tempfile.mkdtemp(prefix="pyro_sym_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextmanager
def _inductor_writes_to(folder: Path) -> Iterator[None]:
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_NOT_WRITABLE = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}


def _cannot_write(error: BaseException | None) -> OSError | None:
    """Among an error and its causes, that of a folder that can't be written to."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            return error
        error = error.__cause__ or error.__context__
    return None


def _build(graph: fx.GraphModule, inputs: Sequence[Tensor], path: Path) -> None:
    """Compile into a package at ``path``, which appears there complete."""
    part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    try:
        from torch._inductor import aoti_compile_and_package

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about itself
            program = torch.export.export(graph, tuple(inputs), strict=False)
            aoti_compile_and_package(program, package_path=str(part))
        part.replace(path)
    except Exception as error:  # compilers fail in all sorts of ways
        not_writable = _cannot_write(error)
        if not_writable is not None:
            raise not_writable from error
        lines = str(error).strip().splitlines() or [""]
        raise CompilationError(f"torch._inductor raised {type(error).__name__}: {lines[0]}") from error
    finally:
        part.unlink(missing_ok=True)


def _load(path: Path) -> Any:
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    except (AttributeError, TypeError):  # another torch: the public function, which imports the compiler
        from torch._inductor import aoti_load_package

        return aoti_load_package(str(path)).loader
