"""The page in a real browser: no error, charts drawn, the table sorted, nothing on top of anything else.

Needs playwright and a Chromium: its own (`playwright install chromium`) or the system's (`apt-get install chromium`).
"""

import shutil

import pytest
from finished_searches import make_report

from autotune.output.report import html_report

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api")

# Boxes that have common ground: texts of one chart, or sections; and those that reach out of chart or section.
OVERLAPS = """() => {
  const found = [];
  const compare = (boxes) => boxes.forEach(([words, box], at) => {
    for (const [others, other] of boxes.slice(at + 1))
      if (box.left < other.right - 1 && other.left < box.right - 1 &&
          box.top < other.bottom - 1 && other.top < box.bottom - 1) found.push(words + " / " + others);
  });
  for (const svg of document.querySelectorAll("figure svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [words, box] of boxes)
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
        found.push(words + " leaves its chart");
    compare(boxes);
  }
  for (const table of document.querySelectorAll("section table, section pre, section p"))
    if (table.getBoundingClientRect().right > table.closest("section").getBoundingClientRect().right - 10)
      found.push("too wide: " + table.textContent.slice(0, 40));
  compare([...document.querySelectorAll("section")].map(s => [s.id, s.getBoundingClientRect()]));
  return found;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of a search: as it is, one in which nothing fits, and one of many trials with long reasons."""
    folder = tmp_path_factory.mktemp("pages")
    report = make_report(folder / "run")
    nothing = report.model_copy(update={"result": None, "explanation": None, "nothing": "nothing fits"})
    cause = {"cause": "a_path/that/has/no/place/to/break/" * 6 + "at all"}
    long = tuple(t.model_copy(update=cause) for t in report.trials) * 5
    found = {"search": report, "nothing": nothing, "long": report.model_copy(update={"trials": long})}
    for name, each in found.items():
        (folder / f"{name}.html").write_text(html_report(each))
    return folder


@pytest.fixture(scope="module")
def opened(pages):
    """Return a function that opens a page; what it asked of the network or said on the console is in `errors`."""
    with sync_api.sync_playwright() as playwright:
        system = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")

        def open_page(name="search", width=1400):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.errors = []
            page.on("console", lambda message: page.errors.append(message.text) if message.type != "log" else None)
            page.on("pageerror", lambda error: page.errors.append(str(error)))
            page.on(
                "request", lambda r: page.errors.append(r.url) if not r.url.startswith(("file:", "data:")) else None
            )
            page.goto(f"file://{pages}/{name}.html")
            return page

        yield open_page
        browser.close()


@pytest.mark.parametrize("name", ["search", "nothing", "long"])
@pytest.mark.parametrize("width", [400, 700, 1400])
def test_nothing_overlaps_and_nothing_has_to_be_pushed_aside(opened, name, width):
    page = opened(name, width)
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.errors == []


def test_charts_are_drawn_with_texts_that_can_be_read(opened):
    page = opened()
    wide = "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width > 300)"
    assert page.evaluate(wide) == [True] * 3
    heights = "[...document.querySelectorAll('figure text')].map(t => t.getBoundingClientRect().height)"
    assert min(page.evaluate(heights)) >= 11


def column(page, heading):
    """The numbers of a column, as the rows stand; None where there is none."""
    return page.evaluate(
        """heading => {
          const heads = [...document.querySelectorAll(".trials th")].map(h => h.textContent);
          const at = heads.indexOf(heading);
          return [...document.querySelectorAll(".trials tbody tr")].map(r => r.cells[at].getAttribute("data-value"))
            .map(v => v === null ? null : Number(v));
        }""",
        heading,
    )


def test_the_table_is_sorted_by_a_click_on_its_heading_and_on_a_narrow_screen_by_a_list(opened):
    page = opened()
    button = page.get_by_role("button", name="samples/s", exact=True)
    before = column(page, "samples/s")
    for reverse in (False, True):
        button.click()
        *known, last = column(page, "samples/s")
        known = [rate for rate in known if rate is not None]
        assert known == sorted(known, reverse=reverse) != [rate for rate in before if rate is not None]
        assert last is None  # what has no figure comes last
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("samples/s")
    narrow = opened(width=400)
    narrow.locator("#order").select_option(label="peak memory, falling")
    peaks = [v for v in column(narrow, "peak memory") if v is not None]
    assert peaks == sorted(peaks, reverse=True)


def test_rows_are_chosen_by_kind_and_by_words(opened):
    page = opened()
    rows = page.locator(".trials tbody tr")
    page.locator("#kind").select_option("failed")
    shown = [r for r in rows.all() if r.is_visible()]
    assert shown
    assert all(r.get_attribute("data-kind") == "failed" for r in shown)
    page.locator("#kind").select_option("")
    page.locator("#words").fill("adafactor")
    shown = [r for r in rows.all() if r.is_visible()]
    assert 0 < len(shown) < rows.count()
    assert all("adafactor" in r.inner_text() for r in shown)
    assert page.locator("#count").inner_text() == f"{len(shown)} of {rows.count()} shown"


def test_of_many_rows_the_first_are_shown_until_all_are_asked_for(opened):
    page = opened("long")
    rows = page.locator(".trials tbody tr")
    assert rows.count() > 60
    assert sum(r.is_visible() for r in rows.all()) == 50
    page.locator("#more").click()
    assert sum(r.is_visible() for r in rows.all()) == rows.count()
    assert not page.locator("#more").is_visible()
