"""Search spaces from YAML: every mistake is one line with the file, the path in it and what is expected."""

from pathlib import Path

import pytest

from autotune.errors import SearchSpaceError
from autotune.space.file import Parameter, builtin_spaces, load_space, read_space, spaces_directory
from autotune.values.budget import Effort

HEAD = "description: a test's\n"


# What is wrong, the text, and how the line goes on after the file's name.
def of(parameters: str, rules: str = "") -> str:
    return f"{HEAD}parameters: {{{parameters}}}" + (f"\nrules: {rules}" if rules else "")


MALFORMED = {
    "empty file": ("", "expected a mapping with 'description' and 'parameters'"),
    "a list": ("- precision", "expected a mapping with 'description' and 'parameters'"),
    "no YAML": ("parameters: [fp32", "line 1: expected ',' or ']'"),
    "a tab": ("parameters:\n\tprecision: 1", "line 2: found character '\\t' that cannot start any token"),
    "a control character": ("description: a\x00b", "unacceptable character"),
    "two documents": (HEAD + "---\nparameters: {}", "line 2: "),
    "a key twice": ("description: a\ndescription: b\n", "line 2: key 'description' stands twice"),
    "a parameter twice": (
        HEAD + "parameters:\n  tf32: {choices: [true]}\n  tf32: {choices: [false]}\n",
        "line 4: key 'tf32' stands twice",
    ),
    "a key that is a number": (HEAD + "1: x", "line 2: key 1 is not text"),
    "an unknown key": (HEAD + "paramaters: {}", "'paramaters' is unknown (did you mean 'parameters'?)"),
    "no description": ("parameters: {tf32: {choices: [true]}}", "description: is missing"),
    "no parameters": (HEAD, "parameters: is missing"),
    "parameters without any": (of(""), "parameters: Dictionary should have at least 1 item"),
    "parameters that are a list": (HEAD + "parameters: [tf32]", "parameters: expected names with their values"),
    "an unknown parameter": (
        of("precison: {choices: [fp32]}"),
        "parameter 'precison' is unknown (did you mean 'precision'?)",
    ),
    "an unknown field of an adapter": (
        of("adapter.rnak: {choices: [8]}"),
        "parameter 'adapter.rnak' is unknown (did you mean 'adapter.rank'",
    ),
    "a parameter that is a list": (
        of("tf32: [true]"),
        "parameters.tf32: expected names with their values",
    ),
    "a parameter without choices": (
        of("tf32: {from_effort: quick}"),
        "parameters.tf32.choices: is missing",
    ),
    "an unknown key of a parameter": (
        of("tf32: {choices: [true], from_efort: quick}"),
        "parameters.tf32.from_efort: 'from_efort' is unknown (did you mean 'from_effort'?)",
    ),
    "an effort that does not exist": (
        of("tf32: {choices: [true], from_effort: hard}"),
        "parameters.tf32.from_effort: expected quick, standard or thorough",
    ),
    "no choice": (of("tf32: {choices: []}"), "parameters.tf32.choices: needs at least one choice"),
    "choices that are no list": (
        of("precision: {choices: bf16}"),
        "parameters.precision.choices: expected a list, not 'bf16' (or 'lattice', for the micro-batch)",
    ),
    "a choice twice": (
        of("precision: {choices: [bf16, bf16]}"),
        "parameters.precision.choices: has a choice twice",
    ),
    "a choice that is a list": (
        of("precision: {choices: [[bf16]]}"),
        "parameters.precision.choices: ['bf16'] is no text, number, true, false or null",
    ),
    "a choice that no configuration takes": (
        of("precision: {choices: [fp31]}"),
        "parameters.precision.choices: 'fp31' is no value for it (expected fp32, fp16",
    ),
    "a micro-batch beyond all batches": (
        of("per_device_train_batch_size: {choices: [8, 9999999999999999999999999]}"),
        "parameters.per_device_train_batch_size.choices: 9999999999999999999999999 is no value for it "
        "(expected 1048576 or less)",
    ),
    "a micro-batch of zero": (
        of("per_device_train_batch_size: {choices: [0]}"),
        "parameters.per_device_train_batch_size.choices: 0 is no value for it (expected a number above 0)",
    ),
    "a number in quotes": (
        of("per_device_train_batch_size: {choices: ['8']}"),
        "parameters.per_device_train_batch_size.choices: '8' is no value for it (did you mean 8?)",
    ),
    "a number for a switch": (
        of("tf32: {choices: [1]}"),
        "parameters.tf32.choices: 1 is no value for it (did you mean True?)",
    ),
    "a misspelt optimizer": (
        of("optim: {choices: [adafactr]}"),
        "parameters.optim.choices: 'adafactr' is no value for it "
        "(transformers has no optimizer 'adafactr' (did you mean 'adafactor'",
    ),
    "a misspelt attention kernel": (
        of("attn_implementation: {choices: [spda]}"),
        "parameters.attn_implementation.choices: 'spda' is unknown (did you mean 'sdpa'?)",
    ),
    "a misspelt compiler": (
        of("torch_compile_backend: {choices: [inducter]}"),
        "parameters.torch_compile_backend.choices: 'inducter' is unknown (did you mean 'inductor'?)",
    ),
    "a misspelt adapter": (
        of("adapter: {choices: [lroa]}"),
        "parameters.adapter.choices: 'lroa' is unknown (did you mean 'lora'",
    ),
    "a rank of zero": (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [0]}"),
        "parameters.adapter.rank.choices: 0 is no value for it",
    ),
    "a field for a kind that hasn't it": (
        of("adapter: {choices: [ia3]}, adapter.rank: {choices: [8], when: {adapter: [ia3]}}"),
        "parameters.adapter.rank.when.adapter: ia3 has no rank",
    ),
    "quantization-aware training": (
        of("quantization: {choices: [qat]}"),
        "parameters.quantization.choices: 'qat': quantization-aware training is not offered",
    ),
    "a field of an adapter without the adapter": (
        of("adapter.rank: {choices: [8]}"),
        "parameters.adapter.rank: there is no parameter 'adapter'",
    ),
    "a lattice of something else": (
        of("dataloader_num_workers: {choices: lattice}"),
        "parameters.dataloader_num_workers.choices: 'lattice' is for the micro-batch only",
    ),
    "a condition that is no list": (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: lora}}"),
        "parameters.adapter.rank.when: adapter: expected a list, not 'lora'",
    ),
    "a condition that never holds": (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: []}}"),
        "parameters.adapter.rank.when: adapter: needs at least one value",
    ),
    "a condition on a misspelt value": (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adapter: [lroa]}}"),
        "parameters.adapter.rank.when.adapter: 'lroa' is unknown (did you mean 'lora'",
    ),
    "a condition on a misspelt parameter": (
        of("adapter: {choices: [lora]}, adapter.rank: {choices: [8], when: {adaptor: [lora]}}"),
        "parameter 'adaptor' is unknown (did you mean 'adapter'",
    ),
    "a condition on a parameter below": (
        of("tf32: {choices: [true], when: {precision: [fp32]}}, precision: {choices: [fp32]}"),
        "parameters.tf32.when: 'precision' is not a parameter above it",
    ),
    "rules that are no list": (of("tf32: {choices: [true]}", "5"), "rules: expected a list"),
    "a rule without a reason": (
        of("tf32: {choices: [true]}", "[{forbid: {tf32: [true]}}]"),
        "rules.0.reason: is missing",
    ),
    "a rule that forbids nothing": (
        of("tf32: {choices: [true]}", "[{forbid: {}, reason: x}]"),
        "rules.0.forbid: Dictionary should have at least 1 item",
    ),
    "a rule on a misspelt parameter": (
        of("tf32: {choices: [true]}", "[{forbid: {tf23: [true]}, reason: x}]"),
        "parameter 'tf23' is unknown (did you mean 'tf32'?)",
    ),
    "a rule on a value that does not exist": (
        of("tf32: {choices: [true]}", "[{forbid: {precision: [fp23]}, reason: x}]"),
        "rules.0.forbid.precision: 'fp23' is no value for it",
    ),
    "a rule on a value that is no list": (
        of("tf32: {choices: [true]}", "[{forbid: {tf32: true}, reason: x}]"),
        "rules.0.forbid: tf32: expected a list, not True",
    ),
}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_one_line_with_file_path_and_suggestion(tmp_path, kind):
    text, said = MALFORMED[kind]
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
