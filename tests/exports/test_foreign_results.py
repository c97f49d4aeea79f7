"""A result that somebody else has made: whatever its texts hold, nothing of them becomes code, or it is refused."""

import ast
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exporting import GPU, answer_of, drafted
from factories import make_config, make_spec, make_workload
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError
from autotune.exports.scripts import Draft
from autotune.exports.targets import drafts
from autotune.training.arguments import training_plan
from autotune.tuning_result import TuningResult, load
from autotune.values.workload import LengthProfile, OwnCode

BENIGN = "benign"
HOSTILE = (
    "x\"\"\"\nimport os\nos.system('touch PWNED')\n'''\r\nRUN touch PWNED\n#\\N{BULLET}\\u2028\u2028\u2029\x85"
    "\x1b[31m\x07\x7f\x9b\u202e\u200b\ufeff\x00$(touch PWNED)`touch PWNED`${oc.env:HOME}{{ 7 }}{% raw %}"
    ": - [a, b] & *x ! | > %\t@ , ]} \\"
)
Place = tuple[Any, ...]

OWN = {
    "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"kind": "x"}, "report_to": ["wandb"], "push_to_hub": True,
    "hub_model_id": "me/mine", "save_strategy": "epoch", "project": "x",
}  # fmt: skip


def usual() -> TuningResult:
    """Return the answer of a search with everything that is text."""
    lengths = LengthProfile(samples=9, mean=20.0, minimum=3, median=20, p95=30, maximum=40)
    data = {"dataset": "data.jsonl", "text_field": "text", "lengths": lengths, "fixed_arguments": OWN}
    where = {"path": "/models/tiny", "source": "directory", "revision": "main"}
    model = make_spec(name="tiny", config={"model_type": "llama"}, **where)
    config = make_config(4, adapter={"kind": "lora"}, experts_implementation="eager", quantization="nf4")
    found = answer_of(config, workload=make_workload(model=model, **data), hardware=GPU)
    told = dict.fromkeys(("notes", "proof_notes", "disturbances"), ("x",))
    return found.model_copy(update={**told, "outshone": "x", "baseline_cause": "x"})


def of_a_script() -> TuningResult:
    code = OwnCode(kind="script", shown="mine.py", command=("mine.py", "--data", "x"), directory="/home")
    return answer_of(make_config(4), workload=make_workload(own_code=code), hardware=GPU)


def texts(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield where the texts of a document are; the name of a key ends with None."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key, None)
            yield from texts(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from texts(inner, (*path, at))
    elif isinstance(value, str):
        yield path


def planted(document: dict[str, Any], path: Place, value: str) -> dict[str, Any]:
    """Return a document with a text, or the name of a key, replaced; its arguments are what they have to be then."""
    changed = json.loads(json.dumps(document))
    place = changed
    *way, last = path if path[-1] is not None else path[:-1]
    for step in way:
        place = place[step]
    if path[-1] is None:
        items = list(place.items())
        place.clear()
        place.update((value if key == last else key, inner) for key, inner in items)
    else:
        place[last] = value
    if path[0] != "arguments":
        _follow(changed)
    return changed


def _follow(document: dict[str, Any]) -> None:
    try:
        found = TuningResult.model_validate_json(json.dumps(document))
        mapping = training_plan(found.best.config, found.workload, found.hardware)
    except ValueError:
        return
    arguments = mapping.model_dump(mode="json", include={"model", "quantization", "adapter"})
    document["arguments"] = {"training_arguments": mapping.tuned, **arguments}


def exported(document: dict[str, Any], file: Path) -> dict[str, Draft] | None:
    """Return what a file's result is exported as; None if it is refused with one line."""
    file.write_text(json.dumps(document))
    try:
        return drafts(load(file))[0]
    except InputError as error:
        refusal = str(error)
    assert refusal.isprintable()
    return None


def read(name: str, content: str) -> Any:
    """Return a file's content with benign texts in place of planted ones; of a script the code without docstrings."""
    assert not {c for c in content if not c.isprintable()} - {"\n"}
    if not name.endswith(".py"):
        found = json.dumps((json.loads if name.endswith(".json") else yaml.safe_load)(content))
        return json.loads(found.replace(json.dumps(HOSTILE)[1:-1], BENIGN))
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Expr(ast.Constant("docstring"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = node.value.replace(HOSTILE, BENIGN)
    return ast.dump(tree)


def assert_the_same(made: dict[str, Draft], benign: dict[str, Draft]) -> None:
    assert set(made) == set(benign)
    for target, draft in made.items():
        other = benign[target]
        assert draft.name == other.name
        assert read(draft.name, draft.text) == read(other.name, other.text), target
        for line, usual_line in zip(draft.launch, other.launch, strict=True):
            assert len(shlex.split(line)) == len(shlex.split(usual_line))


@pytest.mark.parametrize("answer", [usual, of_a_script])
def test_no_text_of_a_result_becomes_code(answer, tmp_path):
    document = json.loads(answer().model_dump_json())
    usually = exported(document, tmp_path / "usual.json")
    taken = []
    for path in texts(document):
        made = exported(planted(document, path, HOSTILE), tmp_path / "theirs.json")
        if made is None or made == usually:  # refused, or it reaches no file
            continue
        benign = exported(planted(document, path, BENIGN), tmp_path / "benign.json")
        if benign is not None:
            taken.append(path)
            assert_the_same(made, benign)
    assert taken, "no text reached a file"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("hardware", "versions", "torch"), "2.0\nRUN touch PWNED", "hardware.versions: "),
        (("hardware", "versions", "torch", None), "torch\nevil", "hardware.versions: "),
        (("hardware", "versions", "transformers"), "new", "hardware.versions: "),
        (("hardware", "kind"), "abacus", "hardware.kind: "),
        (("hardware", "device"), "cuda:0\n", "hardware.device: "),
        (("arguments", "model", "dtype"), "float64", "arguments.model: dtype: not what the best configuration means"),
        (("arguments", "model", "dtype", None), "trust_remote_code", "arguments.model: dtype: not what"),
        (("arguments", "training_arguments", "optim"), "sgd", "arguments.training_arguments: optim: not what"),
        (("arguments", "adapter", "peft_type"), "X", "arguments.adapter: peft_type: not what"),
        (("workload", "model", "name"), "\ud800", "file: Invalid JSON"),
    ],
)
def test_what_no_search_makes_is_refused_in_one_line(path, value, reason, tmp_path):
    document = planted(json.loads(usual().model_dump_json()), path, value)
    (tmp_path / "theirs.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["export", str(tmp_path / "theirs.json"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert f"theirs.json: not a result of autotune (schema 1): {reason}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.strip().isprintable()


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", "x"), ("warmup_steps", [1]), ("lr_scheduler_type", 1)])
def test_a_hyperparameter_of_another_kind_is_refused_by_its_name(name, value):
    with pytest.raises(InputError, match=f"^{name}: expected"):
        drafted("accelerate-loop", own={name: value})
