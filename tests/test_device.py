"""The capability seam: one function answers, and a pretence reaches every caller."""

from __future__ import annotations

import pytest
import torch

from sm120_mla import device
from sm120_mla.errors import ArgumentError, UnavailableError

CAPABILITIES = [(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), None]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_only_major_12_is_sm12x(capability):
    with device.pretend_device(capability):
        assert device.capability() == capability
        assert device.is_sm12x() == (capability in [(12, 0), (12, 1)])


def test_a_pretended_sm120_has_its_shared_memory_limit():
    with device.pretend_device((12, 1), sm_count=48):
        assert device.shared_memory_limit() == 101_376
        assert device.sm_count() == 48
    with device.pretend_device((9, 0), shared_memory=232_448):
        assert device.shared_memory_limit() == 232_448


def test_pretences_nest_and_end():
    before = device.capability()
    with device.pretend_device((12, 0)):
        with device.pretend_device(None):
            assert not device.is_sm12x()
        assert device.is_sm12x()
    assert device.capability() == before


def test_a_pretence_ends_with_an_exception():
    before = device.capability()
    with pytest.raises(RuntimeError, match="inside"), device.pretend_device((12, 0)):
        raise RuntimeError("inside")
    assert device.capability() == before


def test_a_pretended_key_stands_for_every_tensor():
    tensor = torch.zeros(1)
    plain = device.device_key(tensor)
    with device.pretend_device_key("pretended:1"):
        assert device.device_key(tensor) == "pretended:1"
    assert device.device_key(tensor) == plain


def test_an_explicit_mode_never_falls_back(monkeypatch):
    monkeypatch.setattr(device, "cuda_available", lambda: False)
    for mode in ("cuda", "sm120"):
        monkeypatch.setenv("SM120_MLA_MODE", mode)
        with pytest.raises(UnavailableError, match=f"mode {mode} is not available"):
            device.mode()


def test_mode_sm120_needs_the_capability(monkeypatch):
    monkeypatch.setattr(device, "cuda_available", lambda: True)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setenv("SM120_MLA_MODE", "sm120")
    with device.pretend_device((9, 0)), pytest.raises(UnavailableError, match="capability"):
        device.mode()
    with device.pretend_device((12, 1)):
        assert device.mode() == "sm120"


def test_auto_takes_the_strongest_mode(monkeypatch):
    monkeypatch.setenv("SM120_MLA_MODE", "auto")
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(device, "cuda_available", lambda: True)
    with device.pretend_device((12, 0)):
        assert device.mode() == "sm120"
    with device.pretend_device((10, 0)):
        assert device.mode() == "cuda"
    monkeypatch.setattr(device, "cuda_available", lambda: False)
    assert device.mode() == "reference"


def test_an_unknown_mode_is_named(monkeypatch):
    monkeypatch.setenv("SM120_MLA_MODE", "gpu")
    with pytest.raises(ArgumentError, match="SM120_MLA_MODE = 'gpu'"):
        device.mode()


def test_values_are_never_validated_in_capture():
    with device.capturing(device.Capture()):
        assert device.is_capturing()
        assert not device.validate_values("values")
    assert not device.is_capturing()
    with pytest.raises(ArgumentError, match="validate"):
        device.validate_values("all")
