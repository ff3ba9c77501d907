"""Faults of the data that calibrates, or that is evaluated."""

from __future__ import annotations

import torch
from torch import nn

from tests.diagnosis.faults import fault
from tests.diagnosis.subject import Planted, Subject


@fault("calibrated on samples of a quarter of the contrast", "narrow-calibration")
def faint_calibration(subject: Subject) -> Planted:
    subject.calibration = [batch / 4 for batch in subject.calibration]
    return subject.planted()


@fault("calibrated on 0..1 where the model sees 0..8", "narrow-calibration")
def other_units(subject: Subject) -> Planted:
    subject.calibration = [batch / 8 for batch in subject.calibration]
    return subject.planted()


@fault("calibrated without the normalisation: values in 0..255", "wide-calibration")
def raw_pixels(subject: Subject) -> Planted | None:
    if len(subject.net.shape) != 3:
        return None
    subject.calibration = [batch * 58 + 120 for batch in subject.calibration]
    return subject.planted()


@fault("calibrated on samples of eight times the contrast", "wide-calibration")
def loud_calibration(subject: Subject) -> Planted:
    subject.calibration = [batch * 8 for batch in subject.calibration]
    return subject.planted()


@fault("one calibration batch is a hundred times too large", "calibration-outlier")
def freak_batch(subject: Subject) -> Planted:
    subject.calibration = [*subject.calibration[:-1], subject.calibration[-1] * 100]
    return subject.planted()


@fault("one calibration sample is a hundred times too large", "calibration-outlier")
def freak_sample(subject: Subject) -> Planted:
    batch = subject.calibration[1].clone()
    batch[3] *= 100
    subject.calibration = [subject.calibration[0], batch, *subject.calibration[2:]]
    return subject.planted()


@fault("the calibration set is its faintest sample again and again", "narrow-calibration")
def repeated_sample(subject: Subject) -> Planted:
    samples = torch.cat(subject.calibration)
    faintest = samples[samples.flatten(1).std(1).argmin()]
    subject.calibration = [faintest.expand_as(batch).clone() for batch in subject.calibration]
    return subject.planted()


@fault("calibrated on blank samples", "narrow-calibration")
def blank_calibration(subject: Subject) -> Planted:
    subject.calibration = [torch.full_like(batch, 0.1) for batch in subject.calibration]
    return subject.planted()


@fault("calibrated on negatives clipped to zero", "narrow-calibration")
def clipped_calibration(subject: Subject) -> Planted:
    subject.calibration = [batch.clamp(-0.2) for batch in subject.calibration]
    return subject.planted()


@fault("an eighth of the evaluated samples is of a kind that calibration lacks", "narrow-calibration")
def unseen_kind(subject: Subject) -> Planted:
    subject.evaluation = [torch.cat([batch[:1] * 4, batch[1:]]) for batch in subject.evaluation]
    return subject.planted()


@fault("a single batch calibrates, of one faint sample", "narrow-calibration")
def one_faint_batch(subject: Subject) -> Planted:
    subject.calibration = [subject.calibration[0] / 3]
    return subject.planted()


@fault("red and blue are swapped in the calibration data", "narrow-calibration", "wide-calibration")
def swapped_channels(subject: Subject) -> Planted | None:
    if subject.net.shape[0] != 3:
        return None
    contrasts = torch.tensor([3.0, 1.0, 1 / 3]).view(3, 1, 1)
    with torch.no_grad():
        next(module for module in subject.model().modules() if isinstance(module, nn.Conv2d)).weight /= contrasts
    subject.calibration = [(batch * contrasts).flip(1) for batch in subject.calibration]
    subject.evaluation = [batch * contrasts for batch in subject.evaluation]
    return subject.planted()


@fault("calibrated without taking the mean off and dividing by the deviation", "narrow-calibration", "wide-calibration")
def without_normalisation(subject: Subject) -> Planted | None:
    if len(subject.net.shape) != 3:
        return None
    subject.calibration = [batch * 0.22 + 0.45 for batch in subject.calibration]
    return subject.planted()


@fault("the evaluated samples have drifted: they are brighter by three deviations", "narrow-calibration")
def drifted(subject: Subject) -> Planted:
    subject.evaluation = [batch + 3 for batch in subject.evaluation]
    return subject.planted()


@fault("calibrated on zeros", "narrow-calibration")
def zero_calibration(subject: Subject) -> Planted:
    subject.calibration = [torch.zeros_like(batch) for batch in subject.calibration]
    return subject.planted()


@fault("one evaluated sample is thirty times too large", note="worst sample .* of the noise")
def freak_evaluated(subject: Subject) -> Planted:
    batch = subject.evaluation[1].clone()
    batch[2] *= 30
    subject.evaluation = [subject.evaluation[0], batch, *subject.evaluation[2:]]
    return subject.planted()
