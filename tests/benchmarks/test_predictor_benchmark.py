"""The benchmark that holds predictions of memory and time against published measurements."""

import functools
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import predictor  # noqa: E402
from published.intervals import estimated, left_out, time_figures  # noqa: E402
from published.rows import NotPredicted, Row, load_rows  # noqa: E402
from published.scores import Fits, Prediction, Score  # noqa: E402
from published.setups import setup_of  # noqa: E402
from published.speed import Timed, _check  # noqa: E402


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in load_rows(predictor.ROWS)}


def predicted(row: Row) -> Prediction:
    (prediction,), _ = predictor.predict_all([row], functools.partial(predictor._traced, whole=False))
    return prediction


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param("fms_acceleration-009", id="full, pure bf16"),
        pytest.param("fms_acceleration-003", id="full, with the cache that GPTBigCode kept"),
        pytest.param("fms_acceleration-035", id="LoRA"),
        pytest.param("fms_acceleration-037", id="LoRA with fast kernels"),
        pytest.param("fms_acceleration-057", id="4-bit LoRA with norms in fp32"),
        pytest.param("fms_acceleration-079", id="4-bit LoRA"),
        pytest.param("fms_acceleration-103", id="GPTQ LoRA"),
        pytest.param("fms_acceleration-166", id="LoRA with a fused linear loss"),
        pytest.param("fms_acceleration-183", id="GPTQ LoRA with fused operators and loss"),
        pytest.param("fms_acceleration-258", id="keys and values repeated before flash attention"),
    ],
)
def test_allocated_peaks_are_reproduced(rows, row):
    assert predicted(rows[row]).allocated_error == pytest.approx(0, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fms_acceleration-170", "fms_acceleration-266"])
def test_with_the_fast_loss_the_allocator_holds_a_block_of_the_logits_more(rows, row):
    found = predicted(rows[row])
    assert found.allocated_error == pytest.approx(0, abs=0.01)
    assert found.device_error == pytest.approx(0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 4, 7, 9])
def test_readings_of_bert_large_are_reproduced(rows, number):
    assert predicted(rows[f"hf_docs_bert_large-{number:03}"]).device_error == pytest.approx(0, abs=0.05)


def test_a_run_that_ran_out_is_said_not_to_fit(rows):
    assert not predicted(rows["torchao-018"]).fits


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("llmfoundry-078", "nothing about memory"),
        ("torchtitan-012", "compiled|checkpointing"),
        ("litgpt_resource-042", "several devices, other model code"),
        ("deepspeed_autotune-021", "memory of the device not stated"),
    ],
)
def test_what_is_not_predicted_of_several_devices_has_a_reason(rows, row, why):
    with pytest.raises(NotPredicted, match=why):
        setup_of(rows[row])


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param("fms_acceleration-010", id="full, pure bf16, x 2"),
        pytest.param("fms_acceleration-315", id="full, fp32 shards, x 4"),
        pytest.param("fms_acceleration-034", id="LoRA, x 2"),
        pytest.param("fms_acceleration-326", id="LoRA with a fused linear loss, x 4"),
        pytest.param("fms_acceleration-080", id="4-bit LoRA, x 2"),
    ],
)
def test_sharded_peaks_are_near(rows, row):
    assert predicted(rows[row]).allocated_error == pytest.approx(0, abs=0.08)


def test_a_broken_line_gives_one_clear_line(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "a", "group": "b"}\n{"id": 1\n', encoding="utf-8")
    assert predictor.main(["--rows", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert error.startswith(f"error: {file}:2: not a row: ")


def test_a_missing_file_gives_one_clear_line(tmp_path, capsys):
    assert predictor.main(["--rows", str(tmp_path / "none.jsonl")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_last_line_is_one_object(rows, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    lines = predictor.ROWS.read_text(encoding="utf-8").splitlines()
    chosen = ("hf_docs_bert_large-003", "fms_acceleration-033", "llmfoundry-078")
    file.write_text("\n".join(line for line in lines if json.loads(line)["id"] in chosen), encoding="utf-8")
    assert predictor.main(["--rows", str(file), "--no-save"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["rows"] == 3
    assert figures["predicted"] == 2
    assert figures["skipped"] == 1
    assert figures["scores"]["device"]["count"] == 2


def test_an_absent_field_may_be_null():
    assert Row.model_validate_json('{"id": "a", "group": "b", "precision": null}').precision == ""


def test_a_score_has_the_sign_of_the_error():
    score = Score.of([-0.1, None, 0.02, -0.04])
    assert score is not None
    assert (score.count, score.signed_median, score.worst) == (3, -0.04, -0.1)
    assert Score.of([None]) is None


def test_fits_counts_both_kinds_of_right():
    fits = Fits(fits_ran=3, fits_failed=1, short_ran=0, short_failed=4)
    assert fits.share == pytest.approx(7 / 8)


def sources(rows, *factors: float) -> list[Timed]:
    """Return steps of two sources on one device, which took so many times the predicted second."""
    first, second = rows["fms_acceleration-001"], rows["hf_docs_bert_large-001"]
    return [Timed(row, setup_of(row), 1.0, factor) for row in (first, second) for factor in factors]


def test_intervals_are_as_wide_as_the_errors_of_rows(rows):
    near, far = (estimated(sources(rows, *factors))["rows"] for factors in ((1.0, 1.02), (1.0, 1.6, 0.6)))
    assert near.device == pytest.approx(0.0099, abs=1e-3)  # half of the logarithm of 1.02, the median of each
    assert near.knobs < far.knobs


def test_a_source_is_judged_by_the_others(rows):
    usual, odd = sources(rows, 1.0, 1.01)[:2], sources(rows, 3.0, 3.1)[2:]
    held = left_out([*usual, *odd])
    assert [h.within for h in held] == [True, True, False, False]  # the odd source says that errors are large
    assert time_figures([*usual, *odd])["left_out"]["source hf_docs_bert_large"]["coverage"] == 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": ""}, "precision not stated"),
        ({"seq_len": None}, "sequence length or micro-batch not stated"),
        ({"precision": "float8 rowwise"}, "arithmetic in 8 bits"),
        ({"throughput_unit": "samples/s (autotuner internal metric)"}, "not the time of a whole step"),
    ],
)
def test_a_time_that_says_too_little_is_passed_over(rows, changes, reason):
    with pytest.raises(NotPredicted, match=reason):
        _check(rows["fms_acceleration-001"].model_copy(update=changes))
