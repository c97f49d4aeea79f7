"""Makes the pictures of the documentation from the run directory of a real search.

    python docs/pictures.py answer RUN_DIR   # docs/answer.svg: the answer as a terminal shows it
    python docs/pictures.py report RUN_DIR   # docs/report.png: the page

The second needs playwright and a Chromium (its own, by `playwright install chromium`, or the system's).
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import tempfile
from pathlib import Path

from autotune import load
from autotune.output.gather import gather
from autotune.output.report import html_report
from autotune.output.table import result_table
from autotune.output.terminal import Console

DOCS = Path(__file__).parent

COLUMNS = 100

# Width and height of the picture of the report, in pixels.
SIZE = {"width": 1400, "height": 1840}

# Fonts from another server, which viewers of the repository don't load; texts have their widths without them.
_FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def answer_picture(run_directory: Path) -> str:
    """Return the answer of a finished search as SVG, with the command as the title of the window."""
    report = gather(run_directory)
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor")
    shown = f"runs/{run_directory.resolve().name}"
    table = result_table(load(run_directory / "best-config.json"), "best-config.json", shown)
    console.print(table, highlight=False, crop=False)
    return _FONT_FACES.sub("", console.export_svg(title=report.command or "autotune"))


def report_picture(run_directory: Path) -> bytes:
    """Return a PNG picture of the top of the report's page."""
    from playwright.sync_api import sync_playwright

    shown = gather(run_directory).model_copy(update={"run_directory": f"runs/{run_directory.resolve().name}"})
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        page = Path(folder, "report.html")
        page.write_text(html_report(shown))
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE)
        tab.goto(page.as_uri())
        return tab.screenshot()


def main() -> None:
    """Write the pictures that the command line names."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation from a finished search.")
    parser.add_argument("what", choices=("answer", "report"))
    parser.add_argument("run_directory", type=Path)
    asked = parser.parse_args()
    if asked.what == "answer":
        (DOCS / "answer.svg").write_text(answer_picture(asked.run_directory))
        return
    (DOCS / "report.png").write_bytes(report_picture(asked.run_directory))


if __name__ == "__main__":
    main()
