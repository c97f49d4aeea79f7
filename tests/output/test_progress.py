"""Progress on a terminal and in a log: what has happened is a line, what happens stands below."""

import errno
import io
import logging
import sys
from unittest.mock import Mock

import pytest
from answers import drawn
from factories import OUT_OF_MEMORY, Clock, make_measurement
from rich.cells import cell_len
from rich.console import Console
from search_events import Heard, make_ended, make_started

from autotune.output import terminal
from autotune.output.progress import Progress, can_be_live, observing
from autotune.values.budget import LossCurve, Soaked
from autotune.values.conditions import Conditions
from autotune.values.problem import Note, Phase, PhaseBegan, ignore
from autotune.values.trial import Interval, Prediction, Purpose


def make_progress(width: int = 100) -> tuple[Progress, Clock]:
    clock = Clock()
    return Progress(Console(file=io.StringIO(), width=width), clock=clock), clock


def live(progress: Progress) -> list[str]:
    return drawn(progress.drawn(), 100).splitlines()


def test_before_the_first_trial_it_says_what_it_is_at_and_since_when():
    progress, clock = make_progress()
    progress(PhaseBegan(phase=Phase.LOOKING))
    clock.now_s = 3.0
    assert live(progress) == ["looking at the machine and the model · 3 s"]
    progress(PhaseBegan(phase=Phase.PREDICTING))
    clock.now_s = 7.0
    assert live(progress) == ["predicting · 4 s"]


@pytest.mark.parametrize(
    ("purpose", "phase"),
    [
        (Purpose.BASELINE, "baseline"), (Purpose.SEARCH, "searching"), (Purpose.FINAL, "confirming"),
        (Purpose.SOAK, "checking"), (Purpose.LOSS_CHECK, "checking"), (Purpose.EXPLAIN, "explaining"),
    ],
)  # fmt: skip
def test_the_phase_follows_from_the_purpose_of_the_trial(purpose, phase):
    progress, _ = make_progress()
    progress(make_started(purpose=purpose))
    assert live(progress)[0].startswith(f"{phase} · at most 12 min")


def test_the_running_trial_has_its_time_beside_the_best_and_the_time_that_is_left():
    progress, clock = make_progress()
    progress(make_started(7, time_left_s=720.0, trials_left=17))
    clock.now_s = 300.0
    best = "best · 34.2 samples/s · 1.62 x the baseline · precision bf16"
    trial = "trial 7 · 5 min · precision bf16, micro-batch 16"
    assert live(progress) == ["searching · at most 7 min and 17 trials left", trial, best]
    clock.now_s = 1000.0
    assert "at most 0 s" in live(progress)[0]
    progress(make_ended())
    assert live(progress)[1:] == [best]


@pytest.mark.parametrize("width", [40, 100])
def test_of_many_trials_at_once_the_first_is_shown_and_what_has_no_room_is_cut(width):
    progress, _ = make_progress(width)
    for number in range(3, 8):
        progress(make_started(number))
    said = "trial 3 · 0 s · precision bf16, micro-batch 16 · and 4 more"
    assert live(progress)[1] == (said if width == 100 else f"{said[:37]}…")
    assert len(live(progress)) == 3
    assert max(map(cell_len, live(progress))) <= width - len("^C")  # a Ctrl-C has room behind it


class Terminal(io.StringIO):
    """What is written to it has gone to a terminal."""

    def isatty(self) -> bool:
        return True


def log_of(*events, verbose: bool = False, **options) -> list[str]:
    file = io.StringIO()
    with Progress(Console(file=file, width=40, **options), verbose=verbose, clock=Clock()) as progress:
        for event in events:
            progress(event)
    return file.getvalue().splitlines()


def test_a_log_has_a_plain_line_an_event():
    lines = log_of(
        Note(text="tuning for the CPU"), PhaseBegan(phase=Phase.PREDICTING), make_started(), make_ended(outcome=34.2),
        make_ended(8, outcome=OUT_OF_MEMORY),
    )  # fmt: skip
    what = "precision bf16, micro-batch 16"
    assert lines == [
        "tuning for the CPU",
        "predicting ...",
        f"trial 7: {what}: completed, 34.2 samples/s ± 2%, peak 1.00 GiB, 10 s",
        f"trial 8: {what}: out of memory, no memory left, 10 s",
    ]
    soaked = Soaked(eval_batch_size=16, checkpoint_bytes=1 << 30)
    curve = make_measurement(curve=LossCurve(losses=(3.0, 2.5), dropout_spread=None))
    first, second = log_of(
        make_ended(outcome=make_measurement(soaked=soaked), purpose=Purpose.SOAK),
        make_ended(outcome=curve, purpose=Purpose.LOSS_CHECK),
    )
    assert str(soaked) in first
    assert "(soak)" in first
    assert "2 losses, the last 2.5" in second


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "the terminal is gone")])
def test_a_search_goes_on_where_its_progress_can_not_be_shown(error, monkeypatch):
    written = Mock(side_effect=error)
    monkeypatch.setattr(gone := io.StringIO(), "write", written)
    with Progress(terminal.Console(file=gone)) as progress:
        progress(Note(text="tuning for the CPU"))
    written.assert_called_once_with("tuning for the CPU\n")


def test_a_disturbed_trial_is_followed_by_a_warning():
    noisy = make_measurement(conditions=Conditions(others_share=0.3), warnings=("the allocator ran short",))
    line, *warnings = log_of(make_ended(outcome=noisy, prediction=Prediction(samples_per_second=40.0, peak_bytes=2)))
    assert "(predicted 40)" in line
    assert warnings == [
        "  warning: the allocator ran short",
        "  warning: other processes took 30% of the cores' time while it was measured",
    ]


def test_an_interval_is_no_narrower_than_what_others_took_of_the_cores():
    steady = {"step_times_s": (1.6, 1.6, 1.6), "samples_per_second_interval": Interval(low=10.0, high=10.0)}
    assert "10 samples/s ± under 1 %, peak" in log_of(make_ended(outcome=make_measurement(**steady)))[0]
    noisy = make_measurement(**steady, conditions=Conditions(others_share=0.12, stolen_share=0.01))
    assert "10 samples/s ± 12%, peak" in log_of(make_ended(outcome=noisy))[0]
    wide = make_measurement(spread=0.4, conditions=Conditions(others_share=0.02))
    assert log_of(make_ended(outcome=wide)) == log_of(make_ended(outcome=make_measurement(spread=0.4)))


def test_verbose_tells_what_is_expected_of_a_trial_and_how_its_knobs_took_effect():
    assert log_of(Note(text="a note"), make_started(), make_ended(), quiet=True) == []
    (line,) = log_of(make_started(), verbose=True)
    assert line == (
        "trial 7 begins (search): precision bf16, micro-batch 16: predicted 40 samples/s, peak 5.00 GiB; "
        "at most 12 min and 17 trials left"
    )
    assert "nothing is predicted of it" in log_of(make_started(prediction=None), verbose=True)[0]
    measured = make_measurement(effects={"precision": "bf16", "adapter": "none"})
    assert log_of(make_ended(outcome=measured), verbose=True)[1:] == ["  in effect: precision bf16"]


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        (Terminal(), {}, True), (Terminal(), {"NO_COLOR": "1"}, True), (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False), (io.StringIO(), {"FORCE_COLOR": "1"}, False),
    ],
    ids=["terminal", "no colours", "dumb", "file", "colours in a file"],
)  # fmt: skip
def test_the_display_is_for_terminals_that_can_do_it(file, environment, expected):
    assert can_be_live(Console(file=file, _environ={"TERM": "xterm-256color", **environment})) is expected


# Who hears of a search that is started from Python.
EVENTS = (PhaseBegan(phase=Phase.PREDICTING), Note(text="a line that is not wrapped, however long it is " * 4))
LINES = ["predicting ...", EVENTS[1].text]


@pytest.fixture
def stderr(monkeypatch):
    """Return a function that puts another stderr in place."""
    return lambda file: monkeypatch.setattr(sys, "stderr", file) or file


def tell(observer=None, **options):
    with observing(observer, **options) as heard:
        for event in EVENTS:
            heard(event)
    return heard


def test_an_observer_of_the_users_own_is_the_only_one_and_quiet_tells_nobody_else(stderr):
    file, own = stderr(Terminal()), Heard()
    assert tell(own) is tell(own, quiet=True) is own
    assert own == list(EVENTS) * 2
    assert tell(quiet=True) is ignore
    assert file.getvalue() == ""


def test_at_a_terminal_it_is_shown_on_stderr_and_nothing_on_stdout(stderr, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    file = stderr(Terminal())
    tell()
    assert EVENTS[1].text.strip() in file.getvalue().replace("\n", "")
    for nobody in (io.StringIO(), None):
        stderr(nobody)
        assert tell() is ignore
        assert nobody is None or nobody.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_a_program_that_logs_finds_it_in_its_log_line_by_line(stderr, caplog):
    file = stderr(Terminal())
    with caplog.at_level(logging.INFO, logger="autotune"):
        tell()
    said = [(record.name, record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [("autotune", logging.INFO, line) for line in LINES]
    assert file.getvalue() == ""


def test_in_a_notebook_lines_go_to_stderr(stderr, monkeypatch):
    file = stderr(io.StringIO())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    tell()
    assert file.getvalue().splitlines() == LINES
