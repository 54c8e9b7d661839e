"""The only place where tests take a tolerance from."""

import torch


# kind: (rtol, atol), elementwise
TOLERANCES = {"exact": (0.0, 0.0), "fp64": (1e-10, 0.0), "fp32": (1e-5, 1e-6)}

# RMS of the difference over RMS of the expected values, where single elements may be off: "lowp" for bf16 and fp16,
# which round each element, "model" for fp32 sums in another order through a whole model
RMS_RATIOS = {"lowp": 5e-3, "model": 1e-5}


def assert_matches(actual: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    """Fail unless `actual` is `expected` within the tolerance of `kind`, a key of `TOLERANCES` or `RMS_RATIOS`."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if kind in RMS_RATIOS:
        assert torch.isfinite(actual).all(), "a value is not finite"
        difference = (actual.double() - expected.double()).norm()
        bound = RMS_RATIOS[kind] * expected.double().norm()
        assert difference <= bound, f"difference {difference:.3e} is over {bound:.3e} (RMS, relative)"
        return
    rtol, atol = TOLERANCES[kind]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, check_dtype=kind == "exact")
