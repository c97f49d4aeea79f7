"""Builds the stand-in's libraries for the installed torch, from `sources/`.

`sources/*.cpp` are the driver, the runtime and NVML. Of everything else that torch links, what has to do more than
succeed is in `sources/libraries/NAME.cpp`; each other symbol that torch or bitsandbytes takes returns 0 (or, if it
creates something, hands out a handle). Which symbols, of which versions and under which names of libraries, is read
from their binaries, so that any build of torch is served.

    python -m autotune.stand_in.build FOLDER
    python -m autotune.stand_in.build --wheel FOLDER

The second makes a wheel of them, for machines of the same versions without a compiler (glibc 2.28 or later).
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from autotune.errors import InfrastructureError, MachineError
from autotune.version import __version__

SOURCES = Path(__file__).parent / "sources"

_ALIKE = (
    "cublas", "cublasLt", "cudnn", "cufft", "cupti", "curand", "cusolver", "cusparse", "cusparseLt", "nccl", "nvrtc",
)  # fmt: skip
_PREFIXES = {name: name for name in _ALIKE} | {"cufile": "cuFile", "nvshmem_host": "nvshmem", "nvToolsExt": "nvtx"}
_NEEDED = re.compile(r"\(NEEDED\).*\[(lib([A-Za-z_]+)\.so[^\]]*)\]")
_UNDEFINED = re.compile(r"^\s*U (\w+)(?:@+(\S+))?$", re.MULTILINE)
_DEFINED = re.compile(r"^[0-9a-f]+ T (\w+)", re.MULTILINE)
_NOT_INITIALISED = 15  # of CUPTI: profilers go on without it
_NOT_SUPPORTED = 9  # of cuSOLVER
_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
_PACKAGE = "autotune_stand_in"  # of libraries that were built elsewhere


def libraries(store: Path) -> Path:
    """Return the folder of the libraries for the installed torch: a wheel's, or below `store`, built there once.

    Raises:
        MachineError: torch isn't a build for CUDA, or a compiler is missing.
        InfrastructureError: The build failed.
    """
    digest, packaged = _digest(), importlib.util.find_spec(_PACKAGE)
    for place in (packaged and packaged.submodule_search_locations) or ():
        if (Path(place) / digest).exists():
            return Path(place) / digest
    folder = store / digest
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=store) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                build(made)
                made.replace(folder)
    return folder


def build(folder: Path) -> None:
    """Build the libraries into `folder` by $CXX and $CC; an older one there, which may be loaded, is left alone."""
    site, cuda, _ = _torch()
    cxx, cc = _compiler("CXX", "g++")[0], _compiler("CC", "gcc")[0]
    for program, package in {cxx: "g++", cc: "gcc", "nm": "binutils", "readelf": "binutils"}.items():
        if shutil.which(program) is None:
            raise MachineError(
                f"{program}: not found; the stand-in for a GPU is compiled here once: install {package}, or a wheel "
                "made elsewhere with the same versions of autotune, torch and bitsandbytes (docs/estimates.md)"
            )
    major = cuda.partition(".")[0]
    with tempfile.TemporaryDirectory() as scratch:
        work, driver, runtime = Path(scratch), folder / "libcuda.so.1", folder / f"libcudart.so.{major}"
        nvml, warp = folder / "libnvidia-ml.so.1", folder / "libfakecuda-warp.so"
        for library in (driver, runtime, nvml, warp):
            library.unlink(missing_ok=True)
        flags = [f"-DCUDA_MAJOR={major}", *("-std=c++17", "-O2", "-Wall", "-Wno-deprecated-declarations")]
        flags += ["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", *_headers(site, cuda, work)]
        _compiled(flags, "device clock driver", driver, "-lpthread", "-ldl")
        _compiled(["-std=c++17", "-O2", "-shared", "-fPIC"], "warp", warp, "-lpthread", "-ldl")
        version = work / "cudart.map"
        version.write_text(f"{runtime.name} {{ global: *; }};\n")
        hidden = [*flags, "-fvisibility=hidden"]
        parts = "runtime streams graphs launches durations"
        _compiled(hidden, parts, runtime, str(driver), f"-Wl,--version-script,{version}")
        _compiled(hidden, "nvml", nvml)
        users = [*site.glob("torch/lib/*.so"), *site.glob("bitsandbytes/libbitsandbytes_cuda*.so")]
        taken = {found for user in users for found in _UNDEFINED.findall(_output("nm", "-D", user))}
        defined = {name.partition("@")[0] for name in _output("nm", "-D", "--defined-only", runtime).split()}
        missing = sorted(name for name, of in taken if of == runtime.name and name not in defined)
        if missing:  # it would end a program in its midst
            raise InfrastructureError(f"the stand-in's {runtime.name} lacks {', '.join(missing)}")
        versions = [f"-D{name}_VERSION={number}" for name, number in _library_versions(site).items()]
        # The libraries of CUDA that torch needs, such as libcublas.so.13, with their names, such as cublas.
        said = "".join(_output("readelf", "-d", library) for library in site.glob("torch/lib/*.so"))
        needed = {soname: name for soname, name in _NEEDED.findall(said) if name in _PREFIXES}
        for soname, name in sorted(needed.items()):
            wanted = {symbol: of for symbol, of in taken if _belongs(symbol, of, soname, name)}
            _stubs(soname, name, wanted, versions, work, driver)


def make_wheel(folder: Path) -> None:
    """Put the libraries into a wheel in `folder`: Zig, fetched for it, compiles them for the glibc that torch needs."""
    target, version = f"{platform.machine()}-linux-gnu.2.28", f"{__version__}+torch{_torch()[2].replace('+', '.')}"
    with tempfile.TemporaryDirectory() as scratch:
        tools, tree = Path(scratch) / "tools", Path(scratch) / "tree"
        _run(*_PIP, tools, "ziglang>=0.13", "wheel>=0.45")
        zig = tools / "ziglang" / "zig"
        os.environ |= {"CXX": f"{zig} c++ -target {target}", "CC": f"{zig} cc -target {target}"}
        os.environ |= {"ZIG_GLOBAL_CACHE_DIR": f"{tools}/cache", "PYTHONPATH": str(tools)}
        (made := tree / _PACKAGE / _digest()).mkdir(parents=True)
        build(made)
        (about := tree / f"{_PACKAGE}-{version}.dist-info").mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: {version}\n")
        tag = f"py3-none-manylinux_2_28_{platform.machine()}"
        (about / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: autotune\nRoot-Is-Purelib: false\nTag: {tag}\n")
        folder.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", folder)


def _digest() -> str:
    _, cuda, version = _torch()
    digest = hashlib.sha256(f"{version} {cuda} {importlib.metadata.version('bitsandbytes')}".encode())
    for source in (*sorted(SOURCES.rglob("*")), Path(__file__)):
        digest.update(source.read_bytes() if source.is_file() else b"")
    return digest.hexdigest()[:16]


def _torch() -> tuple[Path, str, str]:
    """Return the folder that torch is installed in, and its versions of CUDA and of its own."""
    found = importlib.util.find_spec("torch")  # which isn't imported: it would look for a GPU
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    told = runpy.run_path(str(package / "version.py"))
    if not told["cuda"]:
        version = told["__version__"]
        raise MachineError(
            f"torch {version} isn't a build for CUDA, which the stand-in for a GPU runs: install one into another "
            f"environment, by pip install 'torch==={version.partition('+')[0]}'"
        )
    return package.parent, told["cuda"], told["__version__"]


def _headers(site: Path, cuda: str, work: Path) -> list[str]:
    """Return the options that name CUDA's headers: NVIDIA's package beside torch, or else one from the index."""
    major, _, _ = cuda.partition(".")
    of_major = {"12": ("nvidia-cuda-runtime-cu12", "cuda_runtime")}.get(major, ("nvidia-cuda-runtime", f"cu{major}"))
    package, folder = of_major
    if not (site / "nvidia" / folder / "include" / "cuda_runtime_api.h").exists():
        site = work / "headers"
        _run(*_PIP, site, f"{package}=={cuda}.*")
    # Of the compiler's headers the one that is included defines nothing for the host, and Triton has it.
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    of_triton = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    return [f"-I{site / 'nvidia' / folder / 'include'}", f"-I{of_triton}"]


def _library_versions(site: Path) -> dict[str, int]:
    """Return the versions, as they give them as numbers, of the libraries that torch was built with."""
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    found = {}
    for name, *parts in re.findall(r"nvidia-(cudnn|nccl)-cu\d+ ?\(?==(\d+)\.(\d+)\.(\d+)", metadata.read_text()):
        major, minor, patch = map(int, parts)
        found[name.upper()] = (1000 if name == "cudnn" and major < 9 else 10000) * major + 100 * minor + patch
    return found


def _belongs(symbol: str, version: str, soname: str, name: str) -> bool:
    if version:
        return version == soname or (version == "NVSHMEM" and name == "nvshmem_host")
    return re.match(_PREFIXES[name] + "(?!Lt)[A-Z_]", symbol) is not None


def _stubs(soname: str, name: str, versions: dict[str, str], defines: list[str], work: Path, driver: Path) -> None:
    """Compile what is written for the library and stubs for the rest, under the version that is asked for."""
    parts, defined = [], set[str]()
    written = SOURCES / "libraries" / f"{name}.cpp"
    if written.exists():
        compiled = work / f"{name}.o"
        _run(*_compiler("CXX", "g++"), "-std=c++17", "-O2", "-Wall", "-fPIC", *defines, "-c", written, "-o", compiled)
        parts.append(compiled)
        defined = set(_DEFINED.findall(_output("nm", compiled)))
    stubs = work / f"{name}.c"
    functions = [_stub(symbol, name) for symbol in sorted(set(versions) - defined)]
    stubs.write_text("static char token[4096];\nstatic _Atomic unsigned long made;\n" + "".join(functions))
    options = ["-w", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    if any(versions.values()):
        script = work / f"{name}.map"
        tag = next(version for version in versions.values() if version)
        script.write_text(f"{tag} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script,{script}")
    linked: list[str | Path] = [driver, "-Wl,-rpath,$ORIGIN", "-lstdc++"] if parts else []
    _run(*_compiler("CC", "gcc"), *options, stubs, *parts, "-o", driver.parent / soname, *linked)


def _stub(symbol: str, name: str) -> str:
    if "String" in symbol:
        return f'long {symbol}(void) {{ return (long)"an error of the stand-in"; }}\n'
    if "Create" in symbol:
        # Each is another: torch has a workspace for each handle of cuBLAS, of which every thread has its own.
        return f"long {symbol}(void** out) {{ *out = token + made++ % sizeof token; return 0; }}\n"
    if symbol.endswith("bufferSize"):
        return f"long {symbol}(void) {{ return {_NOT_SUPPORTED}; }}\n"
    return f"long {symbol}(void) {{ return {_NOT_INITIALISED if name == 'cupti' else 0}; }}\n"


def _compiled(flags: list[str], parts: str, library: Path, *linked: str) -> None:
    sources = [SOURCES / f"{part}.cpp" for part in parts.split()]
    _run(*_compiler("CXX", "g++"), *flags, *sources, "-o", library, f"-Wl,-soname,{library.name}", *linked)


def _compiler(variable: str, usual: str) -> list[str]:
    return shlex.split(os.environ.get(variable) or usual)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise InfrastructureError(f"the stand-in for a GPU can't be built: {Path(command[0]).name}: {said}")


if __name__ == "__main__":
    make_wheel(Path(sys.argv[2])) if sys.argv[1] == "--wheel" else build(Path(sys.argv[1]))
