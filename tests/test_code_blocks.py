"""Every fenced code block of the README, docs/ and examples/ holds: commands parse, files load, Python runs.

What a reader may paste is checked as far as a machine without GPUs can: all commands are parsed with the real parser
and their values looked at; the slow tests run those that need no training, and all Python on tiny models.
"""

import ast
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from code_blocks import PAGES, ROOT, Block, autotune_calls, blocks, every_command
from conftest import write_model
from pydantic import TypeAdapter
from tiny_models import TINY
from typer.testing import CliRunner

import autotune as package
from autotune.cli import console
from autotune.cli.main import app
from autotune.planning.options import Fixed
from autotune.space.file import builtin_spaces, read_space
from autotune.training import baseline
from autotune.training.resolve import resolve
from autotune.units import parse_count, parse_memory, parse_time_s
from autotune.values.budget import Effort
from autotune.values.catalogue import gpu_named
from autotune.values.config import Allowance

BASH, PYTHON, DATA, OTHER = "bash", "python", ("yaml", "json", "toml"), ("text",)

# What reads a file that a page shows.
READERS = {
    "mine.yaml": lambda path: len(read_space(path).parameters) == 7,
    "args.json": baseline.read_arguments,
    ".github/workflows/fits.yaml": lambda path: yaml.safe_load(path.read_text()),
}

# What the value of an option or argument must be good for, by its name in the code.
CHECKS = {
    "allow": Allowance, "effort": Effort, "memory": parse_memory, "max_time": parse_time_s, "tokens": parse_count,
    "train_tokens": parse_count, "gpu": lambda name: name == "all" or gpu_named(name),
    "space": lambda name: name in {*builtin_spaces(), *READERS} or pytest.fail(f"no space {name}"),
    "model": lambda name: name.startswith("./") or resolve(name),
}  # fmt: skip


def named(found: list[Block]) -> list[object]:
    return [pytest.param(block, id=block.name) for block in found]


CALLS = [
    pytest.param(words, id=f"{block.name} {' '.join(words)}")
    for block in [*blocks(BASH), *(block for block in blocks("yaml") if block.title.startswith(".github"))]
    for words in autotune_calls(block.text)
]


@functools.cache
def command_line():
    return typer.main.get_command(app)


def parsed(words: list[str]) -> dict[str, object]:
    """Return the values of a call as the command line understands them.

    Raises:
        typer's usage errors: It doesn't understand them.
    """
    command, rest = command_line(), list(words)
    context = command.make_context("autotune", [], resilient_parsing=True)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest[0]]
        context, rest = command.make_context(rest[0], rest[1:], parent=context, resilient_parsing=False), rest[1:]
        if not hasattr(command, "commands"):
            break
    assert context.parent is not None, f"{words}: no such command"
    return {**context.params, **console.given(context)}


def test_every_block_has_a_language_that_is_checked():
    known = {BASH, PYTHON, *DATA, *OTHER}
    assert [block.name for block in blocks() if block.language not in known] == []
    assert {block.page for block in blocks(BASH)} > {"README.md", "docs/recipes.md", "docs/quick-start.md"}


@pytest.mark.parametrize("block", named(blocks(BASH)))
def test_the_shell_can_read_it(block):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("words", CALLS)
def test_a_command_is_understood(words):
    values = parsed(words)
    for name, check in CHECKS.items():
        if isinstance(value := values.get(name), str) and value and "$" not in value:
            check(value)
    TypeAdapter(Fixed).validate_python(values.get("fix", ()))


def test_what_is_not_understood_would_be_noticed():
    with pytest.raises(Exception, match="--memry"):
        parsed(["find", "--model", "gpt2", "--memry", "8GiB"])
    with pytest.raises(ValueError, match="everything"):
        CHECKS["allow"]("everything")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES])
def test_commands_in_running_text_exist_with_their_options(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    known = options_by_command()
    for span in re.findall(r"(?<!`)`(autotune [a-z][^`\n]*)`(?!`)", prose):
        _, name, *rest = span.replace("…", "").split()
        assert name in known, span
        assert {word for word in rest if word.startswith("--")} <= known[name], span


@functools.cache
def options_by_command() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path, parameters in every_command():
        options = {option for p in parameters for option in (*p.opts, *p.secondary_opts)}
        found.setdefault(path.split()[1], set()).update(options)
    return found


def test_extras_that_pages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in PAGES)
    found = re.findall(r"(?:autotune-train|-e \"?\.)\[([\w,-]+)\]", text)
    asked = {name for names in found for name in names.split(",")}
    assert asked
    assert asked <= extras.keys()


@pytest.mark.parametrize("block", named(blocks(*DATA)))
def test_a_file_is_read_by_what_reads_it(block, tmp_path):
    path = tmp_path / Path(block.title).name
    path.write_text(block.text)
    assert READERS[block.title](path)


@pytest.mark.parametrize("block", named(blocks(PYTHON)))
def test_python_names_what_exists(block):
    """Names of the package are public, its functions have the arguments, and a result has what is asked of it."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and _owner(node) == "autotune":
            assert node.attr in package.__all__
        elif isinstance(node, ast.Attribute) and _owner(node) == "result":
            assert node.attr in {*dir(package.TuningResult), *package.TuningResult.model_fields}
        if isinstance(node, ast.Call) and _owner(node.func) == "autotune":
            assert {keyword.arg for keyword in node.keywords} <= _arguments(node.func.attr, node.keywords)


def _arguments(name: str, given: list[ast.keyword]) -> set[str | None]:
    """Return the arguments of a public function, read off the stub: importing some takes torch. A class takes all."""
    source = (ROOT / "autotune" / "__init__.pyi").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return {keyword.arg for keyword in given}


def _owner(node: ast.expr) -> str:
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES])
def test_files_that_pages_name_are_there(page):
    """By their path in the repository, or in the package."""
    folders = "autotune|tests|benchmarks|examples|search_spaces|docs|cost"
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]+\.(?:py|yaml|md|sbatch))\b", page.read_text())
    places = (ROOT, ROOT / "autotune", page.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_the_map_of_the_code_names_every_folder_and_module_at_the_top():
    (block,) = [block for block in blocks() if block.page == "docs/code.md" and "values/" in block.text]
    places = [path for path in (ROOT / "autotune").iterdir() if path.suffix == ".py" or path.is_dir()]
    places = [path for path in places if not path.name.startswith("__")]
    names = {path.stem if path.suffix else f"{path.name}/" for path in places}
    assert [name for name in names if not re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", block.text)] == []


def test_walks_through_the_code_are_short_and_pass_no_module_twice():
    walks = re.split(r"^\*\*.*\*\*", (ROOT / "docs/code.md").read_text(), flags=re.MULTILINE)[1:]
    stations = [re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE) for walk in walks]
    assert len(stations) == 3
    for walk in stations:
        assert 5 <= len(walk) == len(set(walk)) <= 10
        assert [name for name in walk if not (ROOT / "autotune" / name).exists()] == []


# Below: what takes longer.

# Commands that run on any machine, with nothing but what pages show.
RUNNABLE = {"estimate", "models", "gpus", "spaces", "doctor"}
RUNS = [case for case in CALLS if case.values[0] and case.values[0][0] in RUNNABLE]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder that holds the files that pages show."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(*DATA):
        (tmp_path / Path(block.title).name).write_text(block.text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", RUNS)
def test_a_command_that_can_run_runs(desk, words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output


# What is too large for a test, and what takes its place: names of models by tiny ones, and searches made shorter.
SMALLER = {"google-t5/t5-small": "tiny-t5", "t5-small": "./tiny-t5", 'effort="quick"': 'effort="quick", max_trials=1'}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", named(blocks(PYTHON)))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_python_runs(desk, request, block):
    import transformers

    t5 = {**TINY["t5"], "architectures": ["T5ForConditionalGeneration"], "vocab_size": 512}
    config = write_model(desk / "tiny-t5", t5)
    transformers.T5ForConditionalGeneration(transformers.T5Config.from_pretrained(config)).save_pretrained(config)
    if "best-config.json" in block.text:
        (desk / "best-config.json").write_bytes(request.getfixturevalue("answer").read_bytes())
    code = block.text
    for large, small in SMALLER.items():
        code = re.sub(rf"(?<![\w-]){re.escape(large)}", small, code)
    exec(compile(code, block.name, "exec"), {"__name__": "__main__"})
