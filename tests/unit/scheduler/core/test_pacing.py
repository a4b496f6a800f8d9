"""Predicted step times: learned per size class, from the worker's own timings."""

from __future__ import annotations

import pytest

from services.scheduler.core.pacing import StepPredictor


def test_a_size_that_was_never_seen_has_no_prediction():
    predictor = StepPredictor()
    predictor.observe(64, 1, 9000)
    assert predictor.predict_us(1, 1) is None


def test_the_first_observation_is_the_prediction():
    predictor = StepPredictor()
    predictor.observe(8, 8, 16_000)
    assert predictor.predict_us(8, 8) == 16_000


def test_the_prediction_follows_a_change_without_jumping_to_it():
    predictor = StepPredictor()
    predictor.observe(8, 8, 10_000)
    predictor.observe(8, 8, 20_000)
    predicted = predictor.predict_us(8, 8)
    assert predicted is not None
    assert predicted < 12_500
    for _ in range(60):
        predictor.observe(8, 8, 20_000)
    assert predictor.predict_us(8, 8) == pytest.approx(20_000, rel=0.01)


def test_where_steps_vary_the_prediction_looks_at_the_early_side():
    steady, noisy = StepPredictor(), StepPredictor()
    for turn in range(40):
        steady.observe(8, 8, 10_000)
        noisy.observe(8, 8, 8_000 if turn % 2 else 12_000)
    assert steady.predict_us(8, 8) == pytest.approx(10_000)
    early = noisy.predict_us(8, 8)
    assert early is not None
    assert 5_000 <= early < 9_500


def test_one_outlier_does_not_bring_the_prediction_under_half_the_mean():
    predictor = StepPredictor()
    predictor.observe(8, 8, 1_000)
    predictor.observe(8, 8, 1_000_000)
    assert predictor.predict_us(8, 8) == pytest.approx((1_000 + 0.25 * 999_000) / 2)


def test_decode_steps_and_prefill_steps_of_the_same_size_are_told_apart():
    predictor = StepPredictor()
    predictor.observe(32, 32, 5_000)
    predictor.observe(32, 2, 9_000)
    assert (predictor.predict_us(32, 32), predictor.predict_us(32, 2)) == (5_000, 9_000)


def test_sizes_between_two_powers_of_two_share_a_class():
    predictor = StepPredictor()
    predictor.observe(33, 33, 5_000)
    assert predictor.predict_us(63, 63) == 5_000
    assert predictor.predict_us(64, 64) is None


def test_where_rows_end_one_after_the_other_no_prediction_comes_after_the_step():
    predictor = StepPredictor()
    for _ in range(20):
        predictor.observe(31, 31, 62_000)
    for rows in range(30, 15, -1):
        predicted = predictor.predict_us(rows, rows)
        assert predicted is not None
        assert predicted <= rows * 2_000
        predictor.observe(rows, rows, rows * 2_000)


def test_a_step_larger_than_its_class_was_is_not_expected_later():
    predictor = StepPredictor()
    predictor.observe(16, 16, 30_000)
    assert predictor.predict_us(31, 31) == 30_000
