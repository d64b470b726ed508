"""The adapter of cuDNN's graphs in FP8, over a stand-in for cudnn-frontend, which needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cudnn_stand_in  # noqa: E402

import seamproof  # noqa: E402
from seamproof.loading import load_file  # noqa: E402

ADAPTER = Path(seamproof.__file__).parent / "adapters" / "cudnn_graph.py"
# Sixty cases show a wrong call, and are few for a campaign.
pytestmark = pytest.mark.filterwarnings("ignore::seamproof.TooLittleRun")
FORWARDS = ("fp8", "fp8_wide_values", "fp8_batch")
BOTH = ("fp8_both", "fp8_any_rows", "fp8_deterministic", "fp8_grouped", "fp8_batch_both")


@pytest.fixture
def adapter(monkeypatch):
    cudnn_stand_in.install(monkeypatch)
    module = load_file(str(ADAPTER))
    monkeypatch.setattr(module, "handle", lambda: None)
    return module


@pytest.mark.parametrize("name", FORWARDS + BOTH)
def test_the_adapter_asks_for_what_the_graph_takes(adapter, name, tmp_path):
    subject = getattr(adapter, name)
    report = seamproof.check(subject, cases=60, seed=2, length_most=40, out=str(tmp_path))
    assert report.held > 20, report.text


def test_numbers_that_are_exchanged_are_found(adapter, monkeypatch, tmp_path):
    right = cudnn_stand_in.Graph.sdpa_fp8

    def exchanged(self, descale_s, scale_s, **more):
        return right(self, descale_s=scale_s, scale_s=descale_s, **more)

    monkeypatch.setattr(cudnn_stand_in.Graph, "sdpa_fp8", exchanged)
    with pytest.raises(AssertionError):
        seamproof.check(adapter.fp8, cases=60, seed=2, length_most=40, out=str(tmp_path))


def test_magnitudes_in_another_order_are_found(adapter, monkeypatch, tmp_path):
    monkeypatch.setattr(adapter, "FORWARD_AMAX", ("out", "p"))
    with pytest.raises(AssertionError):
        seamproof.check(adapter.fp8, cases=60, seed=2, length_most=40, out=str(tmp_path))
