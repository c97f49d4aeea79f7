"""Imports between the folders run one way, in no circle, and importing the package stays light.

Every import counts: those inside functions and those under `TYPE_CHECKING` as well as those at the top of a module.
"""

import ast
import functools
import graphlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

# A folder, or a module at the top, imports what stands above it here, and nothing that stands beside or below it.
LAYERS = (
    {"errors"},
    {"value", "units", "version"},
    {"values"},
    {"training", "stand_in"},
    {"space", "cost", "execution", "exports"},
    {"planning"},
    {"storage"},
    {"verification", "integrations", "estimates", "doctor"},
    {"search"},
    {"output"},
    {"tuning_result"},
    {"api"},
    {"rehearsal"},
    {"cli"},
    {"__init__", "__main__"},
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}

MOST_MODULES_AT_THE_TOP = 10
MOST_FOLDERS = 15
MOST_LINES = 400

HEAVY = {
    "torch", "transformers", "optuna", "peft", "accelerate", "datasets", "bitsandbytes", "numpy", "sqlalchemy", "ray",
    "matplotlib",
}  # fmt: skip


def modules(package: Path) -> dict[str, Path]:
    """Return all modules by their dotted name without that of the package: 'cost.model', 'cost', '__init__'."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, *, lazy: bool = True) -> set[str]:
    """Return the full names of what a module imports; not `lazy`: only what importing it imports at once."""
    return _imported(path.read_text(), lazy=lazy)


@functools.cache
def _imported(text: str, *, lazy: bool) -> set[str]:
    found = set()
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not lazy and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import of {node.module}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return found


def arrows(package: Path) -> dict[str, set[str]]:
    """Return for each module the modules of the package that it imports."""
    known = modules(package)

    def target(name: str) -> str:
        if name == "autotune":
            return "__init__"
        inside = name.removeprefix("autotune.")
        while inside and inside not in known:
            inside = inside.rpartition(".")[0]
        return inside or "__init__"

    return {
        module: {target(name) for name in imported(path) if name.split(".")[0] == "autotune"} - {module}
        for module, path in known.items()
    }


def room(module: str) -> str:
    return module.split(".")[0]


def violations(package: Path) -> list[str]:
    """Return what is against the rule, a line each; of the circles one."""
    graph = arrows(package)
    homeless = [f"{module} is in no layer" for module in graph if room(module) not in HEIGHT]
    against = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if room(module) in HEIGHT
        and room(module) != room(other)
        and HEIGHT.get(room(other), len(LAYERS)) >= HEIGHT[room(module)]
    ]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [*homeless, *against, f"a circle: {' <- '.join(error.args[1])}"]
    return [*homeless, *against]


def test_imports_run_one_way_and_in_no_circle():
    assert violations(PACKAGE) == []


TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"


@pytest.mark.parametrize(
    ("file", "planted", "said"),
    [
        ("cost/memory.py", "def f():\n    from autotune.search import tuner\n", "cost.memory imports search.tuner"),
        ("values/trial.py", f"{TYPED}    import autotune.planning.plan\n", "values.trial imports planning.plan"),
        ("cost/memory.py", "import autotune.execution.guard\n", "cost.memory imports execution.guard"),
        ("cost/memory.py", "from autotune import find\n", "cost.memory imports __init__"),
        ("planted.py", "", "planted is in no layer"),
        ("planted/__init__.py", "", "planted is in no layer"),
        ("values/problem.py", "import autotune.values.result\n", "a circle: values."),
    ],
)
def test_what_is_against_the_rule_is_found(file, planted, said, tmp_path):
    package = shutil.copytree(PACKAGE, tmp_path / "autotune", ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    (package / file).parent.mkdir(exist_ok=True)
    with (package / file).open("a") as module:
        module.write(planted)
    assert any(said in line for line in violations(package))


def test_the_top_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES_AT_THE_TOP
    assert len([p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"]) <= MOST_FOLDERS


def test_no_module_is_long():
    lengths = {module: len(path.read_text().splitlines()) for module, path in modules(PACKAGE).items()}
    assert {module: length for module, length in lengths.items() if length > MOST_LINES} == {}


def users_of(package: str) -> set[str]:
    return {m for m, path in modules(PACKAGE).items() if any(room(name) == package for name in imported(path))}


def test_one_folder_knows_each_of_these_libraries():
    assert users_of("optuna") == {"search.sampler", "search.tuner", "storage.record", "storage.writer"}
    assert users_of("sqlalchemy") == {"storage.record"}
    assert users_of("ray") == {"execution.cluster", "execution.ray_pool"}


def test_values_import_nothing_heavy():
    for module, path in modules(PACKAGE).items():
        if HEIGHT[room(module)] <= HEIGHT["values"]:
            heavy = {room(name) for name in imported(path, lazy=False)} & HEAVY
            assert not heavy, f"{module} imports {heavy}"


def test_the_package_and_the_help_of_its_command_load_nothing_heavy():
    code = (
        "import sys, atexit; sys.argv = ['autotune', '--help']\n"
        "atexit.register(lambda: print('MODULES', sorted({m.split('.')[0] for m in sys.modules})))\n"
        "from autotune.cli.main import main\n"
        "main()"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    listed = loaded.partition("MODULES")[2]
    assert "'autotune'" in listed
    assert not [name for name in (*HEAVY, "pydantic") if repr(name) in listed]
