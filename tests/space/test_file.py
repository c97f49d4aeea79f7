"""Search spaces from YAML: every mistake is one line with the file, the path in it and what is expected."""

from pathlib import Path

import pytest

from autotune.errors import SearchSpaceError
from autotune.space.file import Parameter, builtin_spaces, load_space, read_space, spaces_directory
from autotune.values.budget import Effort

HEAD = "description: a test's\n"


# A text, and how the line of the error goes on after the file's name.
def of(parameters: str, rules: str = "") -> str:
    return f"{HEAD}parameters: {{{parameters}}}" + (f"\nrules: {rules}" if rules else "")


MALFORMED = [
    ("", "expected a mapping with 'description' and 'parameters'"),
    ("- precision", "expected a mapping with 'description' and 'parameters'"),
    ("parameters: [fp32", "line 1: expected ',' or ']'"),
    ("parameters:\n\tprecision: 1", "line 2: found character '\\t' that cannot start any token"),
    ("description: a\x00b", "unacceptable character"),
    (HEAD + "---\nparameters: {}", "line 2: "),
    ("description: a\ndescription: b\n", "line 2: key 'description' stands twice"),
    (HEAD + "parameters:\n  tf32: {choices: [true]}\n  tf32: {choices: [false]}\n", "line 4: key 'tf32' stands twice"),
    (HEAD + "1: x", "line 2: key 1 is not text"),
    (HEAD + "paramaters: {}", "'paramaters' is unknown (did you mean 'parameters'?)"),
    ("parameters: {tf32: {choices: [true]}}", "description: is missing"),
    (HEAD, "parameters: is missing"),
    (of(""), "parameters: Dictionary should have at least 1 item"),
    (HEAD + "parameters: [tf32]", "parameters: expected names with their values"),
    (of("precison: {choices: [fp32]}"), "parameter 'precison' is unknown (did you mean 'precision'?)"),
    (of("adapter.rnak: {choices: [8]}"), "parameter 'adapter.rnak' is unknown (did you mean 'adapter.rank'"),
    (of("tf32: [true]"), "parameters.tf32: expected names with their values"),
    (of("tf32: {from_effort: quick}"), "parameters.tf32.choices: is missing"),
    (
        of("tf32: {choices: [true], from_efort: quick}"),
        "parameters.tf32.from_efort: 'from_efort' is unknown (did you mean 'from_effort'?)",
    ),
    (
        of("tf32: {choices: [true], from_effort: hard}"),
        "parameters.tf32.from_effort: expected quick, standard or thorough",
    ),
    (of("tf32: {choices: []}"), "parameters.tf32.choices: needs at least one choice"),
    (
        of("precision: {choices: bf16}"),
        "parameters.precision.choices: expected a list, not 'bf16' (or 'lattice', for the micro-batch)",
    ),
    (of("precision: {choices: [bf16, bf16]}"), "parameters.precision.choices: has a choice twice"),
    (
        of("precision: {choices: [[bf16]]}"),
        "parameters.precision.choices: ['bf16'] is no text, number, true, false or null",
    ),
    (
        of("precision: {choices: [fp31]}"),
        "parameters.precision.choices: 'fp31' is no value for it (expected fp32, fp16",
    ),
    (
        of("per_device_train_batch_size: {choices: [8, 9999999999999999999999999]}"),
        "parameters.per_device_train_batch_size.choices: 9999999999999999999999999 is no value for it (expected 10",
    ),
    (
        of("per_device_train_batch_size: {choices: [0]}"),
        "parameters.per_device_train_batch_size.choices: 0 is no value for it (expected a number above 0)",
    ),
    (
        of("per_device_train_batch_size: {choices: ['8']}"),
        "parameters.per_device_train_batch_size.choices: '8' is no value for it (did you mean 8?)",
    ),
    (of("tf32: {choices: [1]}"), "parameters.tf32.choices: 1 is no value for it (did you mean True?)"),
    (
        of("optim: {choices: [adafactr]}"),
        "parameters.optim.choices: 'adafactr' is no value for it (transformers has no optimizer 'adafactr' (did you",
    ),
    (
        of("attn_implementation: {choices: [spda]}"),
        "parameters.attn_implementation.choices: 'spda' is unknown (did you mean 'sdpa'?)",
    ),
    (
        of("torch_compile_backend: {choices: [inducter]}"),
        "parameters.torch_compile_backend.choices: 'inducter' is unknown (did you mean 'inductor'?)",
    ),
    (of("adapter: {choices: [lroa]}"), "parameters.adapter.choices: 'lroa' is unknown (did you mean 'lora'"),
    (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [0]}"),
        "parameters.adapter.rank.choices: 0 is no value for it",
    ),
    (
        of("adapter: {choices: [ia3]}, adapter.rank: {choices: [8], when: {adapter: [ia3]}}"),
        "parameters.adapter.rank.when.adapter: ia3 has no rank",
    ),
    (
        of("quantization: {choices: [qat]}"),
        "parameters.quantization.choices: 'qat': quantization-aware training is not offered",
    ),
    (of("adapter.rank: {choices: [8]}"), "parameters.adapter.rank: there is no parameter 'adapter'"),
    (
        of("dataloader_num_workers: {choices: lattice}"),
        "parameters.dataloader_num_workers.choices: 'lattice' is for the micro-batch only",
    ),
    (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: lora}}"),
        "parameters.adapter.rank.when: adapter: expected a list, not 'lora'",
    ),
    (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: []}}"),
        "parameters.adapter.rank.when: adapter: needs at least one value",
    ),
    (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: [lroa]}}"),
        "parameters.adapter.rank.when.adapter: 'lroa' is unknown (did you mean 'lora'",
    ),
    (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adaptor: [lora]}}"),
        "parameter 'adaptor' is unknown (did you mean 'adapter'",
    ),
    (
        of("tf32: {choices: [true], when: {precision: [fp32]}}, precision: {choices: [fp32]}"),
        "parameters.tf32.when: 'precision' is not a parameter above it",
    ),
    (of("tf32: {choices: [true]}", "5"), "rules: expected a list"),
    (of("tf32: {choices: [true]}", "[{forbid: {tf32: [true]}}]"), "rules.0.reason: is missing"),
    (
        of("tf32: {choices: [true]}", "[{forbid: {}, reason: x}]"),
        "rules.0.forbid: Dictionary should have at least 1 item",
    ),
    (
        of("tf32: {choices: [true]}", "[{forbid: {tf23: [true]}, reason: x}]"),
        "parameter 'tf23' is unknown (did you mean 'tf32'?)",
    ),
    (
        of("tf32: {choices: [true]}", "[{forbid: {precision: [fp23]}, reason: x}]"),
        "rules.0.forbid.precision: 'fp23' is no value for it",
    ),
    (
        of("tf32: {choices: [true]}", "[{forbid: {tf32: true}, reason: x}]"),
        "rules.0.forbid: tf32: expected a list, not True",
    ),
]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "said"), MALFORMED, ids=lambda words: words[:60])
def test_a_malformed_file_is_one_line_with_file_path_and_suggestion(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(SearchSpaceError) as error:
        read_space(path)
    assert str(error.value).startswith(f"{path}: {said}")
    assert "\n" not in str(error.value)


def test_what_is_no_space_is_refused_by_its_name(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SearchSpaceError, match=r"mine.yaml: not UTF-8 text"):
        read_space(tmp_path / "mine.yaml")
    with pytest.raises(SearchSpaceError, match=r"nothing.yaml: No such file"):
        load_space(str(tmp_path / "nothing.yaml"))
    with pytest.raises(SearchSpaceError, match=r"did you mean 'default'\?") as error:
        load_space("defualt")
    assert ", ".join(builtin_spaces()) in str(error.value)


def test_a_well_formed_file_is_read_as_it_is_written(tmp_path):
    space = read_space(
        written(
            tmp_path,
            """
            description: all that a file can say
            parameters:
              per_device_train_batch_size: {choices: lattice}
              adapter: {choices: [null, lora]}
              adapter.dropout: {choices: [0.0, 0.05], when: {adapter: [lora]}}
              tf32: {choices: [true], from_effort: thorough}
            rules:
              - forbid: {adapter: [lora], per_device_train_batch_size: [1, 2]}
                reason: too slow
            """,
        )
    )
    assert space.name == "mine"
    assert list(space.parameters) == ["per_device_train_batch_size", "adapter", "adapter.dropout", "tf32"]
    assert space.parameters["adapter"].choices == (None, "lora")
    assert space.parameters["adapter.dropout"] == Parameter(choices=(0.0, 0.05), when={"adapter": ("lora",)})
    assert space.parameters["tf32"].from_effort is Effort.THOROUGH
    assert space.rules[0].forbid == {"adapter": ("lora",), "per_device_train_batch_size": (1, 2)}


@pytest.mark.parametrize("name", builtin_spaces())
def test_built_in_spaces_are_well_formed_and_open_with_whom_they_are_for(name):
    assert load_space(name).description
    first = (spaces_directory() / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert "legal points" in first
