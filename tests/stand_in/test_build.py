"""Which libraries serve the installed torch: a wheel's of the same versions, or those that are built here once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import MachineError
from autotune.stand_in import build


def pretend(monkeypatch, version):
    monkeypatch.setattr(build, "_torch", lambda: (Path("site-packages"), "13.0", version))


def test_a_wheels_libraries_serve_the_versions_that_they_were_built_for(tmp_path, monkeypatch):
    pretend(monkeypatch, "2.11.0+cu130")
    packaged = tmp_path / "site" / "autotune_stand_in" / build._digest()
    packaged.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    built = []
    monkeypatch.setattr(build, "build", built.append)
    assert build.libraries(tmp_path) == packaged
    assert not built
    pretend(monkeypatch, "2.12.0+cu130")
    assert build.libraries(tmp_path) == build.libraries(tmp_path) == tmp_path / build._digest()
    assert len(built) == 1


@pytest.mark.parametrize(
    ("named", "lacks"), [("", "g++: not found"), ("/opt/other/c++ -O3", "/opt/other/c++: not found")]
)
def test_a_missing_compiler_is_named_with_what_does_without(tmp_path, monkeypatch, named, lacks):
    pretend(monkeypatch, "2.11.0+cu130")
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=rf"^{lacks}.*or a wheel made elsewhere".replace("+", r"\+")):
        build.build(tmp_path)


@pytest.mark.cuda
@pytest.mark.slow
def test_a_wheel_made_by_one_command_serves_where_there_is_no_compiler(tmp_path):
    def run(*command, **variables):
        variables = {**os.environ, **variables}
        return subprocess.run([sys.executable, *command], env=variables, check=True, capture_output=True, text=True)

    run("-m", "autotune.stand_in.build", "--wheel", tmp_path)
    (wheel,) = tmp_path.glob("autotune_stand_in-*-py3-none-manylinux_2_28_*.whl")
    run("-m", "pip", "install", "--no-deps", "--target", tmp_path / "site", wheel)
    code = (
        "import ctypes, pathlib\n"
        "from autotune.stand_in.build import libraries\n"
        f"folder = libraries(pathlib.Path({str(tmp_path)!r}))\n"
        "ctypes.CDLL(next(folder.glob('libcudart.so.*')))\n"
        "print(folder)"
    )
    done = run("-c", code, PATH=str(tmp_path), PYTHONPATH=f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}")
    assert done.stdout.startswith(f"{tmp_path}/site/")
