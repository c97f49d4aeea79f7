"""Search spaces from YAML: every mistake is one line with the file, the path in it and what is expected."""

import pytest

from autotune.errors import SearchSpaceError
from autotune.space.file import Parameter, builtin_spaces, load_space, read_space, spaces_directory
from autotune.values.budget import Effort

HEAD = "description: a test's\n"


def of(parameters: str, rules: str = "") -> str:
    return f"{HEAD}parameters: {{{parameters}}}" + (f"\nrules: {rules}" if rules else "")


LISTED = "expected a list of texts, numbers, true, false or null, not"
# Texts, and the words of the error after the file's name.
CHOICES = [  # of a parameter, and the words after its name
    ("tf32", "[]", f".choices: {LISTED} []"),
    ("precision", "bf16", f".choices: {LISTED} 'bf16'"),
    ("precision", "[bf16, bf16]", ".choices: has a value twice"),
    ("precision", "[[bf16]]", f".choices: {LISTED} [['bf16']]"),
    ("precision", "[fp31]", ": 'fp31' is no value for it (expected fp32, fp16"),
    ("per_device_train_batch_size", "[8, 99999999]", ": 99999999 is no value for it (expected 10"),
    ("per_device_train_batch_size", "[0]", ": 0 is no value for it (expected a number above 0)"),
    ("per_device_train_batch_size", "['8']", ": '8' is no value for it (did you mean 8?)"),
    ("tf32", "[1]", ": 1 is no value for it (did you mean True?)"),
    ("optim", "[adafactr]", ": 'adafactr': transformers has no optimizer 'adafactr' (did you"),
    ("attn_implementation", "[spda]", ": 'spda' is unknown (did you mean 'sdpa'?)"),
    ("torch_compile_backend", "[inducter]", ": 'inducter' is no value for it (expected inductor, "),
    ("adapter", "[lroa]", ": 'lroa' is unknown (did you mean 'lora'"),
    ("quantization", "[qat]", ": 'qat': quantization-aware training is not offered"),
    ("dataloader_num_workers", "lattice", ".choices: 'lattice' is for the micro-batch only"),
]
RANK = "adapter: {choices: [lora]}, adapter.rank: {choices: [8]"
WHEN = [  # of the rank
    ("{adapter: lora}", f".adapter: {LISTED} 'lora'"),
    ("{adapter: [lroa]}", ".adapter: 'lroa' is unknown (did you mean 'lora'"),
    ("{adapter: [ia3]}", ".adapter: ia3 has no rank"),
]
PARAMETERS = [  # and the words after 'parameters.'
    ("tf32: [true]", "tf32: expected names with their values"),
    ("tf32: {from_effort: quick}", "tf32.choices: is missing"),
    ("tf32: {choices: [true], from_efort: quick}", "tf32.from_efort: is unknown (did you mean 'from_effort'?)"),
    ("tf32: {choices: [true], from_effort: hard}", "tf32.from_effort: expected quick, standard or thorough"),
    ("adapter: {choices: [lora]}, adapter.rank: {choices: [0]}", "adapter.rank: 0 is no value for it"),
    ("adapter.rank: {choices: [8]}, adapter: {choices: [lora]}", "adapter.rank: there is no parameter 'adapter' above"),
    ("tf32: {choices: [true], when: {optim: [sgd]}}, optim: {choices: [sgd]}", "tf32.when: 'optim' is not a parameter"),
    *((f"{name}: {{choices: {choices}}}", f"{name}{said}") for name, choices, said in CHOICES),
    *((f"{RANK}, when: {when}}}", f"adapter.rank.when{said}") for when, said in WHEN),
]
RULES = [  # beside a parameter tf32
    ("5", "rules: expected a list"),
    ("[{forbid: {tf32: [true]}}]", "rules.0.reason: is missing"),
    ("[{forbid: {}, reason: x}]", "rules.0.forbid: Dictionary should have at least 1 item"),
    ("[{forbid: {tf23: [true]}, reason: x}]", "parameter 'tf23' is unknown (did you mean 'tf32'?)"),
    ("[{forbid: {precision: [fp23]}, reason: x}]", "rules.0.forbid.precision: 'fp23' is no value for it"),
    ("[{forbid: {tf32: true}, reason: x}]", f"rules.0.forbid.tf32: {LISTED} True"),
]
# Lists of nine aliases of the list before, 9^9 values when they are written out.
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MALFORMED = [
    (LAUGHS + of("tf32: {choices: *a9}"), "more than 24 aliases (*name); write their values out"),
    ("", "expected a mapping with 'description' and 'parameters'"),
    ("- precision", "expected a mapping with 'description' and 'parameters'"),
    ("parameters: [fp32", "line 1: expected ',' or ']'"),
    ("parameters:\n\tprecision: 1", "line 2: found character '\\t' that cannot start any token"),
    ("description: a\x00b", "unacceptable character"),
    (HEAD + "---\nparameters: {}", "line 2: "),
    ("description: a\ndescription: b\n", "line 2: key 'description' stands twice"),
    (HEAD + "parameters:\n  tf32: {choices: [true]}\n  tf32: {choices: [false]}\n", "line 4: key 'tf32' stands twice"),
    (HEAD + "1: x", "line 2: key 1 is not text"),
    (HEAD + "paramaters: {}", "paramaters: is unknown (did you mean 'parameters'?)"),
    ("parameters: {tf32: {choices: [true]}}", "description: is missing"),
    (HEAD, "parameters: is missing"),
    (of(""), "parameters: Dictionary should have at least 1 item"),
    (HEAD + "parameters: [tf32]", "parameters: expected names with their values"),
    (of("precison: {choices: [fp32]}"), "parameter 'precison' is unknown (did you mean 'precision'?)"),
    (of("adapter.rnak: {choices: [8]}"), "parameter 'adapter.rnak' is unknown (did you mean 'adapter.rank'"),
    (of(f"{RANK}, when: {{adaptor: [lora]}}}}"), "parameter 'adaptor' is unknown (did you mean 'adapter'"),
    *((of(text), f"parameters.{said}") for text, said in PARAMETERS),
    *((of("tf32: {choices: [true]}", text), said) for text, said in RULES),
]


@pytest.mark.parametrize(("text", "said"), MALFORMED, ids=lambda words: words[:60])
def test_a_malformed_file_is_one_line_with_file_path_and_suggestion(tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SearchSpaceError) as error:
        read_space(path)
    assert str(error.value).startswith(f"{path}: {said}")
    assert "\n" not in str(error.value)


def test_a_space_that_does_not_exist_is_refused_by_its_name(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SearchSpaceError, match=r"mine.yaml: not YAML: "):
        read_space(tmp_path / "mine.yaml")
    with pytest.raises(SearchSpaceError, match=r"nothing.yaml: No such file"):
        load_space(str(tmp_path / "nothing.yaml"))
    with pytest.raises(SearchSpaceError, match=r"did you mean 'default'\?") as error:
        load_space("defualt")
    assert ", ".join(builtin_spaces()) in str(error.value)


def test_a_well_formed_file_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
        description: all that a file can say
        parameters:
          per_device_train_batch_size: {choices: lattice}
          adapter: {choices: [null, lora]}
          adapter.dropout: {choices: [0.0, 0.05], when: {adapter: [lora]}}
          tf32: {choices: [true], from_effort: thorough}
        rules:
          - {forbid: {adapter: [lora], per_device_train_batch_size: [1, 2]}, reason: too slow}
        """
    )
    space = read_space(path)
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
