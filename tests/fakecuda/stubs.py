"""Builds a library for everything else that torch links: stubs.py SITE_PACKAGES WORK_FOLDER LIBCUDA.

What a library has to do more than succeed is in libraries/NAME.cpp; each other symbol that torch or bitsandbytes takes
from it returns 0 (or, if it creates something, hands out a handle). Which symbols, of which versions and under which
names of libraries, is read from their binaries, so that any build of torch is served.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ALIKE = (
    "cublas", "cublasLt", "cudnn", "cufft", "cupti", "curand", "cusolver", "cusparse", "cusparseLt", "nccl", "nvrtc",
)  # fmt: skip
PREFIXES = {name: name for name in ALIKE} | {"cufile": "cuFile", "nvshmem_host": "nvshmem", "nvToolsExt": "nvtx"}
NEEDED = re.compile(r"\(NEEDED\).*\[(lib([A-Za-z_]+)\.so[^\]]*)\]")
UNDEFINED = re.compile(r"^\s*U (\w+)(?:@+(\S+))?$", re.MULTILINE)
DEFINED = re.compile(r"^[0-9a-f]+ T (\w+)", re.MULTILINE)
NOT_INITIALISED = 15  # of CUPTI: profilers go on without it
NOT_SUPPORTED = 9  # of cuSOLVER


def main(site: Path, work: Path, libcuda: Path) -> None:
    users = [*site.glob("torch/lib/*.so"), *site.glob("bitsandbytes/libbitsandbytes_cuda*.so")]
    taken = symbols(users)
    versions = library_versions(site)
    check_runtime(taken, libcuda.parent)
    for soname, name in sorted(sonames(site.glob("torch/lib/*.so")).items()):
        wanted = {symbol: v for symbol, v in taken if belongs(symbol, v, soname, name)}
        build(soname, name, wanted, [f"-D{n}_VERSION={v}" for n, v in versions.items()], work, libcuda)
        print(f"{soname}: {len(wanted)} symbols")


def library_versions(site: Path) -> dict[str, int]:
    """Return the versions, as they give them as numbers, of the libraries that torch was built with."""
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    found = {}
    for name, *parts in re.findall(r"nvidia-(cudnn|nccl)-cu\d+ ?\(?==(\d+)\.(\d+)\.(\d+)", metadata.read_text()):
        major, minor, patch = map(int, parts)
        found[name.upper()] = (1000 if name == "cudnn" and major < 9 else 10000) * major + 100 * minor + patch
    return found


def check_runtime(taken: set[tuple[str, str]], folder: Path) -> None:
    """End the build if the stand-in's libcudart lacks what is asked of it; that would end a program in its midst."""
    for library in folder.glob("libcudart.so.*"):
        defined = {name.partition("@")[0] for name in output("nm", "-D", "--defined-only", library).split()}
        missing = sorted(name for name, version in taken if version == library.name and name not in defined)
        if missing:
            sys.exit(f"stubs.py: {library.name} lacks {', '.join(missing)}")


def sonames(libraries: Iterable[Path]) -> dict[str, str]:
    """Return the libraries of CUDA that `libraries` need, such as libcublas.so.13, and their names, such as cublas."""
    found = {}
    for library in libraries:
        for soname, name in NEEDED.findall(output("readelf", "-d", library)):
            if name in PREFIXES:
                found[soname] = name
    return found


def symbols(users: Iterable[Path]) -> set[tuple[str, str]]:
    """Return the undefined symbols of `users` with their versions, "" for none."""
    return {found for user in users for found in UNDEFINED.findall(output("nm", "-D", user))}


def belongs(symbol: str, version: str, soname: str, name: str) -> bool:
    if version:
        return version == soname or (version == "NVSHMEM" and name == "nvshmem_host")
    return re.match(PREFIXES[name] + "(?!Lt)[A-Z_]", symbol) is not None


def build(soname: str, name: str, versions: dict[str, str], defines: list[str], work: Path, libcuda: Path) -> None:
    """Compile what is written for the library and stubs for the rest, under the version that is asked for."""
    sources, defined = [], set[str]()
    written = HERE / "libraries" / f"{name}.cpp"
    if written.exists():
        compiled = work / f"{name}.o"
        run("g++", "-std=c++17", "-O2", "-Wall", "-fPIC", *defines, "-c", written, "-o", compiled)
        sources.append(compiled)
        defined = set(DEFINED.findall(output("nm", compiled)))
    stubs = work / f"{name}.c"
    functions = [stub(symbol, name) for symbol in sorted(set(versions) - defined)]
    stubs.write_text("static char token[4096];\nstatic _Atomic unsigned long made;\n" + "".join(functions))
    tag = next((version for version in versions.values() if version), soname)
    script = work / f"{name}.map"
    script.write_text(f"{tag} {{ global: *; }};\n")
    options = ["-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    if any(versions.values()):
        options.append(f"-Wl,--version-script,{script}")
    libraries = [libcuda, "-Wl,-rpath,$ORIGIN", "-lstdc++"] if sources else []
    run("gcc", *options, stubs, *sources, "-o", libcuda.parent / soname, *libraries)


def stub(symbol: str, name: str) -> str:
    if "String" in symbol:
        return f'long {symbol}(void) {{ return (long)"an error of the stand-in"; }}\n'
    if "Create" in symbol:
        # Each is another: torch has a workspace for each handle of cuBLAS, of which every thread has its own.
        return f"long {symbol}(void** out) {{ *out = token + made++ % sizeof token; return 0; }}\n"
    if symbol.endswith("bufferSize"):
        return f"long {symbol}(void) {{ return {NOT_SUPPORTED}; }}\n"
    return f"long {symbol}(void) {{ return {NOT_INITIALISED if name == 'cupti' else 0}; }}\n"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
