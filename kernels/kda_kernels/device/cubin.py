"""CuTe DSL kernels as device binaries: compiled from shapes on any machine, kept on disk, launched
by the driver.

A kernel here takes pointers and scalars only, so its parameters are those of the Python signature,
in order, and a binary made without a GPU runs wherever its architecture does, with no DSL on the
launching path.

What is certified and measured is machine code: `Binary.digest` names it, whatever the source was
called or said.

The cache folder is `$KDA_KERNELS_CACHE`, else `~/.cache/kda_kernels`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_kernels.device import machine_code, sources
from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_REGISTERS, SM_SMEM_BYTES

_SM_THREADS = 2_048
_SM_CTAS = 32
_DEFAULT_SMEM = 48 * 1024

_OPTIONS = "--keep-ptx --keep-cubin"

_PARAMETER_TYPES = {
    ".u64": ctypes.c_uint64,
    ".s64": ctypes.c_int64,
    ".b64": ctypes.c_uint64,
    ".u32": ctypes.c_uint32,
    ".s32": ctypes.c_int32,
    ".b32": ctypes.c_uint32,
    ".f32": ctypes.c_float,
}


@dataclass(frozen=True)
class Resources:
    """What one launch of a kernel takes. stack_bytes > 0 means spills or an array in local
    memory."""

    threads: int
    cluster: int
    registers: int
    stack_bytes: int
    smem_bytes: int

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs by registers, shared memory and threads."""
        warps = -(-self.threads // 32)
        registers = warps * 256 * -(-self.registers * 32 // 256)
        smem = self.smem_bytes + RESERVED_SMEM_BYTES
        return min(
            SM_REGISTERS // registers, SM_SMEM_BYTES // smem, _SM_THREADS // self.threads, _SM_CTAS
        )


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one target. `parameters` are PTX type names, in the order of the
    kernel's signature."""

    symbol: str
    arch: str
    image: bytes
    parameters: tuple[str, ...]
    resources: Resources
    compile_s: float

    @cached_property
    def digest(self) -> str:
        """What `machine_code.digest` calls it: neither symbol nor source file matter."""
        return machine_code.digest(self.arch, self.image, self.parameters, astuple(self.resources))


def cache_dir() -> Path:
    return Path(os.environ.get("KDA_KERNELS_CACHE") or Path.home() / ".cache" / "kda_kernels")


@cache
def _written(module: str) -> str:
    return sources.digest(sources.behind(module))


@cache
def toolchain() -> str:
    """The compiler, as "4.8.1 cu13": version of the DSL, and the CUDA toolkit of the flavour that
    it has loaded.

    The flavours of a version make different machine code of the same source.
    """
    import cutlass  # noqa: F401  which loads the newest flavour that the driver allows

    library = (
        getattr(sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir"), "__file__", None) or ""
    )
    flavour = re.search(r"_cutlass_ir\.(cu\d+)\.", library)
    return " ".join((metadata.version("nvidia-cutlass-dsl"), flavour[1] if flavour else "unknown"))


def build(
    host: Callable[..., None],
    arguments: Callable[[], tuple[Any, ...]],
    *,
    arch: str,
    threads: int,
    cluster: int,
    choices: object,
) -> Binary:
    """Compile `host(*arguments())`, a `cute.jit` function that launches one kernel, or take it from
    the cache.

    choices  everything beside the sources that decides the code; its repr enters the cache key, as
             do the modules that it is written in (`host.kernel`, if there is one, else `host`), by
             `sources.digest`
    threads, cluster   of the launch that `host` describes
    """
    kernel = getattr(host, "kernel", host)
    written, compiler = _written(kernel.__module__), toolchain()
    text = "\0".join(
        (
            written,
            kernel.__name__,
            repr(choices),
            arch,
            str(threads),
            str(cluster),
            compiler,
            _OPTIONS,
        )
    )
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    if _recording.get() is not None:
        return Binary("", arch, b"", (), Resources(threads, cluster, 0, 0, 0), 0.0)
    found = _load(key)
    if found is not None:
        return found
    binary = _compile(host, arguments(), arch, threads, cluster)
    _store(key, binary)
    return binary


def _compile(
    host: Callable[..., None], arguments: tuple[Any, ...], arch: str, threads: int, cluster: int
) -> Binary:
    import cutlass.cute as cute

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            host, *arguments, options=f"{_OPTIONS} --dump-dir={folder} --gpu-arch {arch}"
        )
        image, ptx, ir = compiled.__cubin__, compiled.__ptx__, str(compiled.ir_module)
        seconds = time.perf_counter() - begin
        image = image if isinstance(image, bytes) else Path(image).read_bytes()
        registers, stack = _resource_usage(image, Path(folder))
    entries = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.S)
    assert len(entries) == 1, f"{host.__name__} must launch one kernel, found {len(entries)}"
    symbol, signature = entries[0]
    parameters = tuple(re.findall(r"\.param (\.\w+)", signature))
    # The DSL leaves the dynamic shared memory of a launch only in the host function it generates:
    # its largest constant.
    constants = re.findall(
        r"llvm.mlir.constant\((\d+) : i64\)", ir.split("llvm.func @cutlass_", 1)[1]
    )
    smem = max((int(c) for c in constants), default=0)
    return Binary(
        symbol,
        arch,
        image,
        parameters,
        Resources(threads, cluster, registers, stack, smem),
        seconds,
    )


def _resource_usage(image: bytes, folder: Path) -> tuple[int, int]:
    """Registers per thread and bytes of stack, by the cuobjdump in Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    text = subprocess.run(
        [tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _load(key: str) -> Binary | None:
    folder = cache_dir()
    try:
        about = json.loads((folder / f"{key}.json").read_text())
        image = (folder / f"{key}.cubin").read_bytes()
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if hashlib.sha256(image).hexdigest() != about["image_sha256"]:
        return None
    return Binary(
        about["symbol"],
        about["arch"],
        image,
        tuple(about["parameters"]),
        Resources(**about["resources"]),
        about["compile_s"],
    )


def _store(key: str, binary: Binary) -> None:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    about = asdict(binary)
    image = about.pop("image")
    about["image_sha256"] = hashlib.sha256(image).hexdigest()
    for name, content in ((f"{key}.cubin", image), (f"{key}.json", json.dumps(about).encode())):
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.replace(file.name, folder / name)


@dataclass(frozen=True)
class Launch:
    """What a launch asks of the driver. threads, cluster: of its binary; values: of the
    parameters."""

    grid: tuple[int, int, int]
    threads: int
    cluster: int
    values: tuple[int | float, ...]
    pdl: bool


_recording: ContextVar[list[Launch] | None] = ContextVar("recording", default=None)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, nothing is compiled and nothing runs: binaries are hollow, and what would be launched
    is listed."""
    launches: list[Launch] = []
    token = _recording.set(launches)
    try:
        yield launches
    finally:
        _recording.reset(token)


class _Recorder:
    """In the place of a `Launcher` while launches are recorded."""

    def __init__(self, binary: Binary, launches: list[Launch]) -> None:
        self._taken, self._launches = binary.resources, launches

    def launch(
        self, grid: tuple[int, int, int], values: Sequence[int | float], stream: int, pdl: bool
    ) -> None:
        self._launches.append(
            Launch(grid, self._taken.threads, self._taken.cluster, tuple(values), pdl)
        )


class Launcher:
    """A binary loaded into the current CUDA context. Raises RuntimeError with the driver's error
    name.

    A launch takes the stream as an int handle, the grid in CTAs, and one value per kernel
    parameter.
    """

    def __init__(self, binary: Binary) -> None:
        from cuda.bindings import driver

        self.binary = binary
        self._driver = driver
        self._types: list[Any] = [_PARAMETER_TYPES[p] for p in binary.parameters]
        self._module = self._checked(driver.cuModuleLoadData(binary.image))
        self.function = self._checked(
            driver.cuModuleGetFunction(self._module, binary.symbol.encode())
        )
        attribute = driver.CUfunction_attribute
        if binary.resources.smem_bytes > _DEFAULT_SMEM:
            self._checked(
                driver.cuFuncSetAttribute(
                    self.function,
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    binary.resources.smem_bytes,
                )
            )
        self._checked(
            driver.cuFuncSetAttribute(
                self.function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
            )
        )

    @staticmethod
    def _checked(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error) != 0:
            raise RuntimeError(f"CUDA driver: {error.name}")
        return values[0] if values else None

    def launch(
        self, grid: tuple[int, int, int], values: Sequence[int | float], stream: int, pdl: bool
    ) -> None:
        if len(values) != len(self._types):
            raise ValueError(
                f"{self.binary.symbol} takes {len(self._types)} parameters, got {len(values)}"
            )
        driver = self._driver
        cells: list[Any] = [t(v) for t, v in zip(self._types, values, strict=True)]
        addresses = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.binary.resources.threads, 1, 1
        config.sharedMemBytes = self.binary.resources.smem_bytes
        config.hStream = stream
        config.attrs = self._attributes(pdl)
        config.numAttrs = len(config.attrs)
        self._checked(
            driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(addresses), 0)
        )

    def _attributes(self, pdl: bool) -> list[Any]:
        driver = self._driver
        attributes = []
        if self.binary.resources.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = self.binary.resources.cluster
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            attributes.append(cluster)
        if pdl:
            serialization = driver.CUlaunchAttribute()
            serialization.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            serialization.value.programmaticStreamSerializationAllowed = 1
            attributes.append(serialization)
        return attributes


_launchers: dict[tuple[int, int], Launcher] = {}
_launchers_lock = threading.Lock()


def launcher(binary: Binary) -> Launcher | _Recorder:
    """The binary's launcher in the current torch device's context, loaded once."""
    if (launches := _recording.get()) is not None:
        return _Recorder(binary, launches)
    import torch

    torch.cuda.current_stream()  # makes the primary context current
    key = (torch.cuda.current_device(), id(binary))
    with _launchers_lock:
        if key not in _launchers:
            _launchers[key] = Launcher(binary)
        return _launchers[key]
