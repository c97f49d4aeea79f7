"""What SECURITY.md says of the code: no shell, no unsafe reader, nothing of a model folder run unasked, loopback."""

import ipaddress
import json
import re
from pathlib import Path

import pytest
from conftest import TINY_LLAMA
from exporting import answer_of
from factories import make_config, make_spec

from autotune.errors import InputError
from autotune.execution.environment import ADDRESS, launcher_environment
from autotune.planning.options import SearchOptions
from autotune.training.resolve import resolve

ROOT = Path(__file__).parents[1]
SOURCES = {path.relative_to(ROOT / "autotune").as_posix(): path.read_text() for path in ROOT.glob("autotune/**/*.py")}


def using(pattern: str) -> set[str]:
    return {name for name, text in SOURCES.items() if re.search(pattern, text)}


@pytest.mark.parametrize("pattern", [r"shell=", r"os\.system\(", r"(?<![\w.])(eval|exec)\(", r"torch\.load\("])
def test_no_shell_is_started_and_no_text_is_run(pattern):
    assert using(pattern) == set()


def test_pickled_code_is_loaded_where_its_digest_is_compared_and_yaml_by_safe_loaders():
    loading = {"execution/user_code.py", "rehearsal.py", "training/trainer_pickle.py"}
    assert using(r"pickle\.loads?\(") == loading
    for module in ("execution/user_code.py", "rehearsal.py"):
        assert "pickle.loads(read_unchanged(" in SOURCES[module]
    assert using(r"yaml\.(unsafe_|full_)?load\(") == {"space/file.py"}
    assert "class _StrictLoader(yaml.SafeLoader)" in SOURCES["space/file.py"]


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "owner/kernel"},
        {"attn_implementation": {"": "owner/kernel"}},
        {"_attn_implementation": {"text_config": "owner/kernel", "": "sdpa"}},
        {"text_config": {"_attn_implementation": {"": ["owner/kernel"]}}},
        {"experts_implementation": {"": "owner/kernel"}},
        {"layers": [{"attn_implementation": "owner/kernel"}]},
    ],
)
def test_kernels_of_the_hub_need_the_users_word_wherever_a_config_names_them(tmp_path, named):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **named}))
    with pytest.raises(InputError, match=r"kernels of a repository on the hub \(owner/kernel\).*--trust-remote-code"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path), trust_remote_code=True).hub_kernels == ("owner/kernel",)
    assert make_spec(config={"attn_implementation": "sdpa"}).hub_kernels == ()


def test_what_listens_is_on_loopback_and_code_of_a_model_is_off_by_default():
    assert ipaddress.ip_address(ADDRESS).is_loopback
    assert SearchOptions(model="m").trust_remote_code is False


def test_trials_get_neither_the_record_nor_the_token():
    present = {"AUTOTUNE_RECORD": "postgresql://ann:secret@host/db", "RAY_AUTH_TOKEN": "secret", "HOME": "/home/ann"}
    given = launcher_environment("cpu", {}, present)
    assert given["HOME"] == "/home/ann"
    assert "secret" not in "".join(given.values())


def test_the_page_leads_to_what_is_there():
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("words", ["--dry-run", "--run-dir x", "--max-trials 3", "--seed 3"])
def test_a_script_is_not_run_where_an_option_would_be_passed_over(command, tmp_path, words):
    (tmp_path / "train.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    answer_of(make_config(16, attn_implementation=None)).save(tmp_path / "best.json")
    done = command("script", "--apply", "best.json", *words.split(), "--", "python", "train.py")
    assert (done.exit_code, (tmp_path / "ran").exists()) == (2, False)
    assert f"{words.split()[0]}: is of a search" in done.stderr
