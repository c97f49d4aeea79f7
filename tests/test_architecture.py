"""The arrows between modules run one way, and importing the package stays light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

VALUES = {
    "values",
    "visible",
    "errors",
    "architecture",
    "checkpointing",
    "compilers",
    "complaints",
    "not_offered",
    "optimizers",
    "objective",
    "options",
    "own_code",
    "own_step",
    "config",
    "budget",
    "hardware",
    "nvml",
    "trial",
    "checks",
    "result",
    "events",
    "units",
    "statistics",
    "stopwatch",
    "conditions",
    "spending",
    "cost_estimate",
    "estimate_report",
    "rates",
    "knobs",
    "recording",
    "adapter_config",
    "kept",
    "kept_rows",
    "explanation",
    "attribution",
    "run_report",
    "fleet",
}
PURE_FILES = {"files"}
LASTING = {"home", "mounts", "shown_urls", "databases", "record"}
FOUNDATIONS = {
    "adapters",
    "depth",
    "shrinking",
    "audio",
    "batches",
    "images",
    "models",
    "resolving",
    "model_facts",
    "catalogue",
    "data",
    "corpus",
    "textfile",
    "training_args",
    "loaded",
    "peft_arguments",
    "parallel_arguments",
    "parallel_facts",
    "tensor_parallel",
    "whole_weights",
    "launch_files",
    "own_fit",
    "own_launch",
    "trainer_parts",
    "quantized",
    "quick_weights",
    "loss",
    "baseline",
}
PACKAGES = {"search", "cost", "execution", "output", "exports"}
HEAVY = {
    "torch", "transformers", "optuna", "peft", "accelerate", "datasets", "bitsandbytes", "numpy", "sqlalchemy", "ray",
}  # fmt: skip


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(path: Path, *, inside_functions: bool) -> set[str]:
    """Return the modules that `path` imports: at its top level, or anywhere; type-checking blocks are left out."""
    found = set()
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending += list(ast.iter_child_nodes(node))
    return found


def own_imports(name: str, path: Path, *, inside_functions: bool) -> set[str]:
    known = modules()
    found = {i.removeprefix("autotune.") for i in imports(path, inside_functions=inside_functions) if "autotune." in i}
    return {i for i in found if i in known and i != name}


def room(module: str) -> str:
    return module.split(".")[0]


MODULES = sorted(modules().items())


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_arrows_run_one_way(name, path):
    allowed = {
        **dict.fromkeys(VALUES, VALUES | PURE_FILES),
        **dict.fromkeys(FOUNDATIONS, FOUNDATIONS | VALUES | PURE_FILES),
        **dict.fromkeys(LASTING, VALUES | LASTING),
        "cost": FOUNDATIONS | VALUES | PURE_FILES | LASTING | {"cost"},
        "search": FOUNDATIONS | VALUES | PURE_FILES | {"search"},
        "execution": FOUNDATIONS | VALUES | PURE_FILES | {"execution"},
        "exports": FOUNDATIONS | VALUES | PURE_FILES | {"exports"},
    }
    # The conductor and the command line see everything; `result` maps to training arguments inside its methods.
    if room(name) in allowed and room(name) != "result":
        outside = {i for i in own_imports(name, path, inside_functions=True) if room(i) not in allowed[room(name)]}
        assert not outside, f"{name} must not import {outside}"


def test_packages_never_import_each_other():
    for name, path in MODULES:
        if room(name) in PACKAGES - {"output"}:
            others = {room(i) for i in own_imports(name, path, inside_functions=True)} & (PACKAGES - {room(name)})
            assert not others, f"{name} imports {others}"


def test_output_is_called_by_the_command_line_only():
    users = {
        name
        for name, path in MODULES
        if any(room(i) == "output" for i in own_imports(name, path, inside_functions=True))
    }
    callers = {
        "cli",
        "listing_commands",
        "history_commands",
        "report_commands",
        "notebook",
        "dashboard_command",
        "watched",
        "listening",
    }
    assert {room(user) for user in users} <= callers | {"output"}


def test_no_module_imports_itself_in_a_circle():
    graph = {name: own_imports(name, path, inside_functions=False) for name, path in MODULES if name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def users_of(package: str) -> set[str]:
    return {n for n, p in MODULES if any(i.split(".")[0] == package for i in imports(p, inside_functions=True))}


def test_only_the_studies_import_optuna():
    assert users_of("optuna") == {"search.study", "search.shown_study"}


def test_only_the_record_imports_sqlalchemy():
    assert users_of("sqlalchemy") == {"record", "databases"}


def test_only_the_engine_imports_ray():
    assert users_of("ray") == {"execution.joining", "execution.engine", "execution.cluster"}


def test_values_import_nothing_heavy():
    for name, path in MODULES:
        if name in VALUES:
            heavy = {i.split(".")[0] for i in imports(path, inside_functions=False)} & HEAVY
            assert not heavy, f"{name} imports {heavy}"


def test_importing_autotune_loads_nothing_heavy():
    code = "import sys, autotune; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [name for name in HEAVY if repr(name) in loaded]


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['autotune', '--help']\n"
        "from autotune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('MODULES', sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    listed = loaded.partition("MODULES")[2]
    assert listed
    assert not [name for name in (*HEAVY, "pydantic") if repr(name) in listed]


def test_every_public_name_can_be_imported():
    import autotune

    for name in autotune.__all__:
        assert getattr(autotune, name) is not None
