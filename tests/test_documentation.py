"""The documentation site is built strictly, its reference has all that the code has, and messages it quotes exist."""

import ast
import functools
import html
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from code_blocks import ROOT, every_command
from finished_searches import make_search
from running import python

import autotune
from autotune import errors
from autotune.cli.main import app


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = python("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return folder


def page(site: Path, name: str) -> str:
    whole = (site / name / "index.html").read_text()
    return whole[whole.index("<article") : whole.index("</article>")]


def test_every_command_has_a_section_with_all_its_options(site):
    text = html.unescape(page(site, "commands"))
    found = list(every_command())
    assert len(found) > 10
    for path, parameters in found:
        section = re.split(r"<h[2-4]", text[text.index(f'id="{path.replace(" ", "-")}"') :])[0]
        for parameter in parameters:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert re.search(rf"(?<![\w-]){parameter.opts[0]}(?![\w-])", section), (path, parameter.opts)


def test_every_public_name_is_described(site):
    text = page(site, "api")
    assert [name for name in autotune.__all__ if f'id="autotune.{name}"' not in text] == []
    assert "the micro-batch, in samples" in text  # descriptions of fields


ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AutotuneError)]
EXIT_CODES = {c.exit_code for c in ERRORS} | {0, errors.EXIT_INTERRUPTED}


def test_every_exit_code_and_error_is_listed_and_the_command_line_names_the_same_codes(site):
    text = page(site, "exit-codes")
    assert set(map(int, re.findall(r"<td>(\d+)</td>", text))) == EXIT_CODES
    assert set(map(int, re.findall(r"\d+", app.info.epilog))) == EXIT_CODES
    for found in ERRORS:
        assert found.__name__ in text


def test_every_module_has_a_line(site):
    text = page(site, "modules")
    assert [path.name for path in (ROOT / "autotune").rglob("*.py") if f"<code>{path.name}</code>" not in text] == []


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="?(https?:[^" >]+)', path.read_text())
        assert loaded == [], path


def test_the_picture_of_an_answer_needs_nothing_from_elsewhere(tmp_path):
    make_search(tmp_path / "run")
    picture = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["answer_picture"](tmp_path / "run")
    words = " ".join("".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ").split())
    assert "1.98 x as fast as your baseline (" in words
    assert "runs/run (autotune report runs/run)" in words
    assert not re.search(r"url\((?!#)|https?://(?!www\.w3\.org|www\.textualize\.io)", picture)


def test_no_markdown_is_left_over(site):
    """Lists and code that the site's Markdown reads otherwise than a viewer of the repository does."""
    for path in site.rglob("index.html"):
        whole = path.read_text()
        text = whole[whole.find("<article") : whole.find("</article>")]
        prose = re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.DOTALL)
        assert re.findall(r"```|\| ---|<p>[*-] |\n {0,4}\* \*\*", prose) == [], path


ANY = "…"
QUOTED = re.compile(r"^### (`+) ?(.+?) ?\1$", re.MULTILINE)
MESSAGES = [quoted[2] for quoted in QUOTED.finditer((ROOT / "docs" / "troubleshooting.md").read_text())]


def text_of(node: ast.expr) -> str:
    """Return what a string or an f-string says, with a mark for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value).replace("{}", ANY)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return ANY


@functools.cache
def said() -> str:
    """Return all that the code can say, a line each."""
    texts = [
        text_of(node)
        for path in sorted((ROOT / "autotune").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    return "\n".join(" ".join(text.split()) for text in texts)


def is_said(message: str) -> bool:
    return re.search(".*".join(map(re.escape, message.split(ANY))), said()) is not None


def test_every_quoted_message_is_one_of_the_code_and_another_would_be_noticed():
    assert [message for message in MESSAGES if not is_said(message)] == []
    assert len(MESSAGES) > 20
    assert not is_said("nothing fits …: the closest, …, still burned down")
