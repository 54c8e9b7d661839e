"""The oracles of SAFT's weights and of the losses beside it, by their numbers."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ext import saft_loss, saft_weight
from hf_ext.trainers.saft.functional import SCHEMES, WEIGHTS, cayley_exponent, token_losses
from tests.numerics import assert_matches


SETTINGS = {"gamma": 0.5, "power": 0.3, "alpha": 1.0, "min_prob": 0.0, "max_prob": 1.0, "min_weight": 0.0}
VOCABULARY = 11


def losses_of(log_probs: Tensor, scheme: str, **settings) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    return token_losses(log_probs, mask, scheme, **{**SETTINGS, **settings})


def logits_and_labels(dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(2, 7, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (2, 7), generator=generator)
    labels[0, 2] = labels[1, 5:] = -100
    return logits.to(dtype), labels


def integrated(p: Tensor, scheme: str, gamma: float) -> Tensor:
    """The loss whose plain gradient is that of the detached form: the integral of `w(u) / u` from `p` to 1."""
    if scheme == "linear":
        return gamma * (1 - p) - (1 - gamma) * p.log()
    if scheme == "geometric":
        return (1 - p**gamma) / gamma
    return -(gamma + (1 - gamma) * p).log() / (1 - gamma)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("scheme", ["harmonic", "geometric", "linear"])
def test_oracle_2_gradient_is_that_of_the_integrated_loss_and_w_times_p_minus_one(scheme, gamma):
    logits, labels = (it.flatten(0, 1) for it in logits_and_labels())
    labels = labels.clamp(min=0)
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_probs = found.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    losses, weights = losses_of(log_probs, scheme, gamma=gamma)
    losses.sum().backward()
    probs = wanted.softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    integrated(probs, scheme, gamma).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=1e-15)
    by_hand = weights[:, None] * (logits.softmax(-1) - F.one_hot(labels, VOCABULARY))
    torch.testing.assert_close(found.grad, by_hand, rtol=0, atol=1e-15)


def test_oracle_3_order_and_monotony():
    log_probs = torch.linspace(-12, 0, 500, dtype=torch.float64)
    for gamma in (0.0, 0.01, 0.3, 0.5, 0.99, 1.0):
        harmonic, geometric, linear = (saft_weight(log_probs, it, gamma, min_weight=0.0) for it in WEIGHTS[:3])
        assert (harmonic <= geometric + 1e-15).all() and (geometric <= linear + 1e-15).all()
        for weight in (harmonic, geometric, linear):
            assert weight[-1] > 1 - 1e-15 and (weight.diff() >= -1e-15).all()
            assert (weight >= log_probs.exp() - 1e-15).all() and (weight <= 1).all()
    for scheme in WEIGHTS:
        falling = [saft_weight(log_probs, scheme, gamma, power=0.4) for gamma in (0.0, 0.2, 0.6, 1.0)]
        assert all((low <= high + 1e-15).all() for high, low in zip(falling, falling[1:], strict=False))


@pytest.mark.parametrize(
    "scheme, values",
    [
        ("harmonic", (2e-4, 0.019802, 0.181818, 0.666667, 0.947368)),
        ("geometric", (0.01, 0.1, 0.316228, 0.707107, 0.948683)),
        ("linear", (0.50005, 0.505, 0.55, 0.75, 0.95)),
    ],
)
def test_oracle_4_values(scheme, values):
    log_probs = torch.tensor([1e-4, 1e-2, 0.1, 0.5, 0.9], dtype=torch.float64).log()
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(saft_weight(log_probs, scheme), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "scheme, gamma, peak",
    [
        ("harmonic", 0.5, math.sqrt(0.5) / (1 + math.sqrt(0.5))),
        ("geometric", 0.5, 1 / 3),
        ("linear", 0.9, 1 - 1 / 1.8),
        ("linear", 0.4, 0.0),
        ("harmonic", 1.0, 0.5),
    ],
)
def test_oracle_5_where_the_pull_on_the_label_is_strongest(scheme, gamma, peak):
    p = torch.linspace(1e-6, 1, 200_001, dtype=torch.float64)
    pull = saft_weight(p.log(), scheme, gamma, min_weight=0.0) * (1 - p)
    assert p[pull.argmax()].item() == pytest.approx(peak, abs=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("gamma, limit", [(0.0, 1.0), (0.5, 0.0), (1.0, 0.0)])
def test_oracle_6_no_nan_where_the_probability_underflows(scheme, gamma, limit):
    log_probs = torch.tensor([-388.0, -1e4, 0.0], requires_grad=True)
    losses, weights = losses_of(log_probs, scheme, gamma=gamma, log_sum_sq_probs=torch.tensor([-12.0, -0.1, 0.0]))
    losses.sum().backward()
    assert losses.isfinite().all() and weights.isfinite().all() and log_probs.grad.isfinite().all()
    if scheme == "harmonic":
        assert weights[0] == limit
        assert saft_weight(log_probs, scheme, gamma)[0] == pytest.approx(max(limit, 1e-8))


@pytest.mark.parametrize("scheme", [it for it in SCHEMES if it != "asft"])
def test_oracle_7_a_loss_is_a_sum_over_labels_whatever_the_batches(scheme):
    logits, labels = logits_and_labels()
    loss = partial(saft_loss, scheme=scheme, alpha=0.7)
    whole = loss(logits, labels)
    count = (labels[:, 1:] != -100).sum()
    if scheme != "deft_cayley":  # its floor is of the batch
        parts = sum(loss(logits[i : i + 1], labels[i : i + 1], count) for i in range(2))
        assert_matches(parts, whole, "fp64")
    longer = F.pad(logits, (0, 0, 0, 4), value=9.0), F.pad(labels, (0, 4), value=-100)
    assert_matches(loss(*longer), whole, "fp64")
    assert_matches(loss({"logits": logits}, labels, int(count)), whole, "fp64")


@pytest.mark.parametrize("scheme", [it for it in SCHEMES if it != "asft"])
def test_oracle_7_nothing_to_learn_is_a_zero_with_a_gradient(scheme):
    logits = torch.randn(1, 4, VOCABULARY, requires_grad=True)
    loss = saft_loss(logits, torch.full((1, 4), -100), scheme=scheme)
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.8])
def test_oracle_8_bound_of_the_harmonic_loss(gamma):
    p = torch.logspace(-300, 0, 400, dtype=torch.float64)
    losses = integrated(p, "harmonic", gamma)
    assert losses.max().item() == pytest.approx(-math.log(gamma) / (1 - gamma), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_oracle_8_general_family_pulls_like_geometric(alpha):
    log_probs = torch.linspace(-30, 0, 50, dtype=torch.float64, requires_grad=True)
    losses, weights = losses_of(log_probs, "general", alpha=alpha)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert_matches(-gradient, saft_weight(log_probs, "geometric", alpha, min_weight=0.0), "fp64")
    assert_matches(weights, -gradient, "fp64")
    assert_matches(losses, (1 - log_probs.exp() ** alpha) / alpha, "fp64")


def test_general_family_from_nll_to_powers():
    log_probs = torch.tensor([0.05, 0.4, 0.9], dtype=torch.float64).log()
    assert_matches(losses_of(log_probs, "general", alpha=0.0)[0], -log_probs, "fp64")
    assert_matches(losses_of(log_probs, "general", alpha=1e-9)[0], -log_probs, "fp32")
    assert_matches(losses_of(log_probs, "general", alpha=10.0)[0], (1 - log_probs.exp() ** 10) / 10, "fp64")
    for bounds, kept in (
        ({"min_prob": 0.4}, (0, 1, 1)),
        ({"max_prob": 0.4}, (1, 1, 0)),
        ({"max_prob": 0.1}, (1, 0, 0)),
    ):
        losses, weights = losses_of(log_probs, "general", **bounds)
        kept = torch.tensor(kept, dtype=torch.float64)
        assert_matches(losses, kept * (1 - log_probs.exp()), "fp64")
        assert_matches(weights, kept * log_probs.exp(), "fp64")


def test_oracle_8_deft_takes_its_exponent_from_the_whole_distribution():
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    probs = logits[:, :-1].softmax(-1)
    alpha = probs.detach().square().sum(-1)
    mask = labels[:, 1:] != -100
    p = probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
    wanted = ((1 - p**alpha) / (alpha + 1e-6))[mask].sum() / mask.sum()
    found = saft_loss(logits, labels, scheme="deft")
    assert_matches(found, wanted, "fp64")
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


def test_deft_cayley_exponent_by_hand():
    probs = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    floor = 0.5 * 0.4
    wanted = [floor + (1 - floor) * p / (2 - p) for p in (0.2, 0.6)]
    torch.testing.assert_close(cayley_exponent(probs, mask)[:2], torch.tensor(wanted).double(), rtol=1e-6, atol=0)
    log_probs = probs.log().requires_grad_()
    losses, weights = token_losses(log_probs, mask, "deft_cayley", **SETTINGS)
    torch.testing.assert_close(losses[0].item(), (1 - 0.2 ** wanted[0]) / wanted[0], rtol=1e-6, atol=0)
    assert losses[2] == 0
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert_matches(-gradient, weights, "fp64")


@pytest.mark.parametrize("scheme", [it for it in SCHEMES if it != "asft"])
def test_oracle_9_half_precision_logits_are_weighted_in_fp32(scheme):
    logits, labels = logits_and_labels(torch.bfloat16)
    full = logits.double()
    found, wanted = saft_loss(logits, labels, scheme=scheme), saft_loss(full, labels, scheme=scheme)
    assert found.dtype == torch.float32
    assert_matches(found, wanted.float(), "fp32")


def test_power_holds_all_three_and_is_smooth_through_the_geometric():
    log_probs = torch.linspace(-40, 0, 300)
    for scheme, power in (("harmonic", -1.0), ("geometric", 0.0), ("linear", 1.0)):
        found = saft_weight(log_probs, "power", 0.3, power=power)
        assert_matches(found, saft_weight(log_probs, scheme, 0.3), "exact")
    for gamma in (0.0, 0.3, 1.0):
        for power in (-5.0, -0.5, -0.099, -1e-4, -1e-7, 1e-7, 1e-4, 0.099, 0.5, 0.9):
            exact = log_probs.double()
            exact = (gamma * (power * exact).exp() + 1 - gamma) ** (1 / power)
            found = saft_weight(log_probs, "power", gamma, power=power, min_weight=0.0)
            assert (found - exact).abs().max() < 2e-6, (gamma, power)


def test_weights_carry_no_gradient_and_keep_the_floor():
    log_probs = torch.tensor([-50.0, -1.0], requires_grad=True)
    weights = saft_weight(log_probs)
    assert not weights.requires_grad and weights[0].item() == pytest.approx(1e-8)
    assert saft_weight(log_probs.detach().bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("scheme, gamma, weigh", [("nll", 0.5, torch.ones_like), ("dft", 0.5, torch.exp)])
def test_oracle_1_both_ends(scheme, gamma, weigh):
    logits, labels = logits_and_labels()
    log_probs = -F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    wanted = -(weigh(log_probs) * log_probs).sum() / (labels[:, 1:] != -100).sum()
    end = 0.0 if scheme == "nll" else 1.0
    for name in (scheme, "harmonic", "geometric", "linear"):
        assert_matches(saft_loss(logits, labels, scheme=name, gamma=end, min_weight=0.0), wanted, "fp64")
    assert abs(saft_loss(logits, labels) - wanted) > 0.01


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"scheme": "harmonc"}, "scheme='harmonc' is unknown; allowed: harmonic, geometric"),
        ({"scheme": "asft"}, "SAFTTrainer"),
        ({"gamma": 1.5}, "gamma=1.5 is outside of its range, 0 to 1"),
        ({"gamma": float("nan")}, "gamma=nan is outside"),
        ({"gamma": "0.5"}, "gamma='0.5' is a str"),
        ({"scheme": "power", "power": 2.0}, "power=2.0 is outside of its range, -inf to 1"),
        ({"scheme": "power", "power": -math.inf}, "power=-inf"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"min_prob": 0.6, "max_prob": 0.5}, "min_prob=0.6 is above max_prob=0.5"),
        ({"min_weight": True}, "min_weight=True is a bool"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error:
        saft_loss(*logits_and_labels(), **settings)
    assert words in str(error.value)


def test_bad_shapes_and_schemes_are_named():
    logits, labels = logits_and_labels()
    with pytest.raises(ValueError, match="not shifted"):
        saft_loss(logits, labels[:, 1:])
    with pytest.raises(ValueError, match="'dft' is none of the weights"):
        saft_weight(torch.zeros(2), "dft")
    with pytest.raises(ValueError, match="gamma=-0.1"):
        saft_weight(torch.zeros(2), gamma=-0.1)
