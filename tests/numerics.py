"""The only place where tests take a tolerance from."""

import torch


# kind: (rtol, atol), elementwise
TOLERANCES = {"exact": (0.0, 0.0), "fp64": (1e-10, 0.0), "fp32": (1e-5, 1e-6)}

# RMS of the difference over RMS of the expected values: bf16 and fp16 round each element, so only the whole is bounded
LOW_PRECISION_RMS_RATIO = 5e-3


def assert_matches(actual: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    """Fail unless `actual` equals `expected` within the tolerance of `kind`: "exact", "fp64", "fp32" or "lowp"."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if kind == "lowp":
        assert torch.isfinite(actual).all(), "a value is not finite"
        difference = (actual.double() - expected.double()).norm()
        bound = LOW_PRECISION_RMS_RATIO * expected.double().norm()
        assert difference <= bound, f"difference {difference:.3e} is over {bound:.3e} (RMS, relative)"
        return
    rtol, atol = TOLERANCES[kind]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, check_dtype=kind == "exact")
