"""Two faults in one model: the larger must be named first, and the other one too."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnosis.faults import fault
from tests.diagnosis.planted_in_data import faint_calibration, freak_batch, other_units
from tests.diagnosis.planted_in_models import int8_bias, outlier_activation_channel, rounded_before_relu
from tests.diagnosis.planted_in_specs import (
    clipped_weight,
    fixed,
    four_bit_weight,
    read_range,
    three_bit_input,
    value_spec,
    wide_fixed_range,
)
from tests.diagnosis.subject import Planted, Subject


@fault(
    "calibrated on 0..1 where the model sees 0..8, and a weight in four bits",
    "narrow-calibration",
    beside="weight-scheme",
)
def units_and_weight(subject: Subject) -> Planted:
    four_bit_weight(subject)
    return other_units(subject)


@fault(
    "a calibration batch a hundred times too large, and the observer of a weight clips it",
    "calibration-outlier",
    beside="weight-scheme",
)
def freak_and_weight(subject: Subject) -> Planted:
    clipped_weight(subject)
    return freak_batch(subject)


@fault("a fixed range of an eighth of the values, and a weight in four bits", "site-range", beside="weight-scheme")
def range_and_weight(subject: Subject) -> Planted:
    low, high = read_range(subject, subject.net.links[0].reader)
    four_bit_weight(subject)
    return value_spec(subject, lambda own: fixed(low / 8, high / 8, own))


@fault(
    "calibrated on 0..1 where the model sees 0..8, and one channel is huge",
    "narrow-calibration",
    beside="outlier-channel",
)
def units_and_channel(subject: Subject) -> Planted | None:
    planted = outlier_activation_channel(subject)
    return None if planted is None else other_units(subject)


@fault(
    "calibrated on samples of a quarter of the contrast, and biases in eight bits",
    "narrow-calibration",
    beside="weight-scheme",
)
def contrast_and_bias(subject: Subject) -> Planted | None:
    return None if int8_bias(subject) is None else faint_calibration(subject)


@fault(
    "a calibration batch a hundred times too large, and a product rounded before its ReLU",
    "calibration-outlier",
    beside="unfused-activation",
)
def freak_and_rounding(subject: Subject) -> Planted | None:
    return None if rounded_before_relu(subject) is None else freak_batch(subject)


@fault(
    "an input in three bits, and a fixed range forty times too wide",
    "activation-scheme",
    beside="site-range",
)
def input_and_range(subject: Subject) -> Planted:
    three_bit_input(subject)
    return replace(wide_fixed_range(subject), places=None)
