"""The live display: it says what a search is at, in words that fit the terminal, and needs no colour."""

import io

import pytest
from factories import Clock, make_config
from rich.cells import cell_len
from rich.console import Console
from search_events import make_ended, make_leader, make_standing, make_started

from autotune.output.live_view import LiveView
from autotune.units import GIB
from autotune.values.problem import Phase, PhaseBegan
from autotune.values.trial import Prediction, Purpose


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock) -> LiveView:
    return LiveView(clock)


def drawn(view: LiveView, width: int = 80, *, encoding: str = "utf-8") -> list[str]:
    """The lines of the display without colours, as NO_COLOR leaves them."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    console = Console(file=file, width=width, color_system=None, force_terminal=True)
    console.print(view)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def text_of(view: LiveView, width: int = 80) -> str:
    """The display as one line."""
    return " ".join(" ".join(drawn(view, width)).split())


def test_before_the_first_trial_it_says_what_it_is_at_and_since_when(view, clock):
    view.take(PhaseBegan(phase=Phase.LOOKING))
    clock.now_s = 3.0
    assert "looking at the machine and the model · 3 s" in text_of(view)
    view.take(PhaseBegan(phase=Phase.PREDICTING))
    clock.now_s = 7.0
    assert "predicting · 4 s" in text_of(view)


@pytest.mark.parametrize(
    ("purpose", "phase"),
    [
        (Purpose.BASELINE, "baseline"),
        (Purpose.SEARCH, "searching"),
        (Purpose.FINAL, "confirming"),
        (Purpose.SOAK, "checking"),
        (Purpose.LOSS_CHECK, "checking"),
        (Purpose.EXPLAIN, "explaining"),
    ],
)
def test_the_phase_follows_from_the_purpose_of_the_trial(view, purpose, phase):
    view.take(make_started(purpose=purpose))
    assert f"now {phase} · " in text_of(view)


def test_a_trial_is_said_in_words_with_its_time(view, clock):
    view.take(make_started(7))
    clock.now_s = 12.0
    assert "trial 7 precision bf16, micro-batch 16" in text_of(view)
    assert "5.00 of 8.00 GiB predicted · 12 s" in text_of(view)


def test_the_baseline_is_said_to_be_it_and_what_it_is(view):
    view.take(make_started(0, purpose=Purpose.BASELINE, changes=(), config=make_config(), standing=None))
    assert "the baseline: micro-batch 8, fp32" in text_of(view)


def test_time_left_goes_down_while_a_trial_runs(view, clock):
    view.take(make_started(time_left_s=720.0, trials_left=17))
    assert "at most 12 min and 17 trials left" in text_of(view)
    clock.now_s = 300.0
    assert "at most 7 min and 17 trials left" in text_of(view)
    clock.now_s = 1000.0
    assert "at most 0 s" in text_of(view)


def test_trials_left_are_the_searchs_own(view):
    view.take(make_started(purpose=Purpose.FINAL))
    assert "at most 12 min left" in text_of(view)


def test_the_best_is_shown_beside_the_baseline_and_the_budget(view):
    view.take(make_started())
    assert "best precision bf16 34.2 samples/s · 1.62 x the baseline" in text_of(view)
    assert "3.00 of 8.00 GiB at its peak" in text_of(view)


def test_a_best_that_is_the_baseline_has_no_speedup(view):
    view.take(make_started(standing=make_standing(leader=make_leader(changes=(), speedup=None))))
    assert "best the baseline 34.2 samples/s" in text_of(view)
    assert "x the baseline" not in text_of(view)


def test_counts_are_of_the_latest_event(view):
    view.take(make_started())
    assert "so far 5 measured · 2 out of memory · 132 refused" in text_of(view)
    view.take(make_ended(standing=make_standing(completed=6, failed=1)))
    assert "so far 6 measured · 2 out of memory · 1 failed · 132 refused" in text_of(view)
    assert "trial 7" not in text_of(view)


def test_of_many_trials_at_once_the_first_are_shown(view):
    for number in range(3, 8):
        view.take(make_started(number))
    assert [f"trial {n}" in text_of(view) for n in range(3, 8)] == [True, True, True, False, False]
    assert "and 2 more trials at once" in text_of(view)


@pytest.mark.parametrize(
    ("used_bytes", "budget_bytes", "expected"),
    [
        (3 * GIB, 8 * GIB, "3.00 of 8.00 GiB at its peak"),
        (5 << 20, 8 * GIB, "5 MiB of 8.00 GiB at its peak"),
        (300 << 20, 800 << 20, "300 of 800 MiB at its peak"),
        (9 * GIB, 800 << 20, "9216 of 800 MiB at its peak"),
    ],
)
def test_memory_is_said_in_a_unit_that_shows_it(view, used_bytes, budget_bytes, expected):
    leader = make_leader(peak_bytes=used_bytes)
    view.take(make_started(standing=make_standing(leader=leader, memory_bytes=budget_bytes)))
    assert expected in text_of(view)


def bars(view: LiveView, width: int = 80) -> list[str]:
    return ["".join(c for c in line if c in "█░") for line in drawn(view, width) if set(line) & set("█░")]


def test_a_bar_is_the_share_of_the_budget(view):
    view.take(make_started(standing=make_standing(leader=None)))
    (bar,) = bars(view)
    assert bar.count("█") / len(bar) == pytest.approx(5 / 8, abs=0.5 / len(bar))


def test_a_bar_beyond_the_budget_is_full(view):
    too_much = Prediction(samples_per_second=1.0, peak_bytes=9 * GIB)
    view.take(make_started(prediction=too_much, standing=make_standing(leader=None)))
    (bar,) = bars(view)
    assert set(bar) == {"█"}
    assert "9.00 of 8.00 GiB predicted" in text_of(view)


def test_without_a_prediction_there_is_the_time_alone(view):
    view.take(make_started(prediction=None, standing=make_standing(leader=None)))
    assert not bars(view)
    assert "predicted" not in text_of(view)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_terminal(view, width):
    for number in range(5, 9):
        view.take(make_started(number))
    lines = drawn(view, width)
    assert max(map(cell_len, lines)) <= width
    assert len(bars(view, width)) == 4
    assert all(len(bar) >= 6 for bar in bars(view, width))
    assert len(lines) <= 24


def test_a_narrow_terminal_shows_the_same_words(view):
    view.take(make_started())
    assert sorted(text_of(view, 40).replace("█", "").replace("░", "").split()) == sorted(
        text_of(view, 80).replace("█", "").replace("░", "").split()
    )


def test_where_there_is_no_unicode_a_bar_is_drawn_all_the_same(view):
    view.take(make_started())
    assert any("###" in line and "..." in line for line in drawn(view, encoding="ascii"))


def test_colours_are_used_where_they_may_be(view):
    view.take(make_started())
    for no_color, expected in ((None, True), (True, False)):
        file = io.StringIO()
        console = Console(file=file, width=80, force_terminal=True, color_system="standard", no_color=no_color)
        console.print(view)
        assert ("\x1b[36m" in file.getvalue()) is expected


def test_a_ctrl_c_has_room_behind_the_last_line(view):
    for number in range(5, 9):
        view.take(make_started(number))
    for width in (40, 80):
        assert len(drawn(view, width)[-1]) <= width - len("^C")
