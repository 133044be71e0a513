"""The functional forms of the divergences return what PyTorch's own functions give."""

import pytest
import torch
import torch.nn.functional as F

from fuse_losses import functional
from fuse_losses.losses import DIVERGENCES

SHAPE, VOCAB = (2, 5), 127


def heads(dtype=torch.float32):
    """Student and teacher: x, weight, bias each."""
    leaves = []
    for hidden in (16, 24):
        leaves += [torch.randn(*SHAPE, hidden), torch.randn(VOCAB, hidden) / hidden**0.5, torch.randn(VOCAB)]
    return [t.to(dtype).requires_grad_() for t in leaves]


def logits(leaves, softcaps=(None, None), temperature=1.0):
    for side, cap in zip((leaves[:3], leaves[3:]), softcaps, strict=True):
        u = F.linear(*side).float()
        yield (u if cap is None else cap * torch.tanh(u / cap)) / temperature


def reduced(d, mask, reduction):
    if mask is not None:
        d = d * mask
    count = d.numel() if mask is None else mask.sum()
    return {"none": d, "sum": d.sum(), "mean": d.sum() / count, "batchmean": d.sum() / SHAPE[0]}[reduction]


def compare(ours, eager, leaves):
    assert ours.dtype == eager.dtype and ours.shape == eager.shape
    upstream = torch.randn(ours.shape)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    theirs = torch.autograd.grad(eager, leaves, upstream)
    for a, b in zip(torch.autograd.grad(ours, leaves, upstream), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(
    "function, options, name, k",
    [
        ("linear_kl_div", {}, "kl", 0.0),
        ("linear_kl_div", {"reverse": True, "skew": 0.1}, "reverse_kl", 0.1),
        ("linear_jsd", {"beta": 0.3}, "jsd", 0.3),
        ("linear_tvd", {}, "tvd", 0.0),
    ],
)
def test_projected(function, options, name, k, masked, reduction):
    leaves = heads()
    mask = None if masked is None else (torch.arange(10).view(SHAPE) % 3).to(masked)
    ours = getattr(functional, function)(
        *leaves[:2], *leaves[3:5], leaves[2], leaves[5], mask=mask, reduction=reduction, temperature=2.0, softcap=3.0,
        teacher_softcap=5.0, chunk_rows=3, **options,
    )  # fmt: skip
    student, teacher = logits(leaves, (3.0, 5.0), 2.0)
    d = DIVERGENCES[name].reference(student.log_softmax(-1), teacher.log_softmax(-1), k)
    compare(ours, reduced(d, mask, reduction), leaves)


@pytest.mark.parametrize("forms", [("logits", "logits"), ("log_probs", "probs"), ("probs", "log_probs")], ids=str)
@pytest.mark.parametrize(
    "function, options, name, k",
    [
        ("kl_div", {}, "kl", 0.0),
        ("kl_div", {"reverse": True}, "reverse_kl", 0.0),
        ("jsd", {}, "jsd", 0.5),
        ("tvd", {}, "tvd", 0.0),
    ],
)
def test_given(function, options, name, k, forms):
    z = torch.randn(2, *SHAPE, 33)
    given = {"logits": lambda z: z, "log_probs": lambda z: z.log_softmax(-1), "probs": lambda z: z.softmax(-1)}
    back = {"logits": lambda t: (t / 2).log_softmax(-1), "log_probs": lambda t: t, "probs": torch.log}
    leaves = [given[form](part).requires_grad_() for part, form in zip(z, forms, strict=True)]
    temperature = 2.0 if forms == ("logits", "logits") else 1.0
    ours = getattr(functional, function)(
        *leaves, input_form=forms[0], target_form=forms[1], temperature=temperature, **options
    )
    lp, lq = (back[form](leaf) for form, leaf in zip(forms, leaves, strict=True))
    compare(ours, DIVERGENCES[name].reference(lp, lq, k).mean(), leaves)


def test_soft_cross_entropy():
    x, weight, bias, *_ = heads()
    target = torch.randn(*SHAPE, VOCAB).softmax(-1)
    eager = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), target.flatten(0, 1))
    compare(functional.linear_soft_cross_entropy(x, weight, target, bias), eager, [x, weight, bias])
    given = torch.randn(*SHAPE, VOCAB, requires_grad=True)
    capped = 3.0 * torch.tanh(given / 3.0)
    eager = F.cross_entropy(capped.flatten(0, 1), target.flatten(0, 1), reduction="none").view(SHAPE)
    ours = functional.soft_cross_entropy(given, target.log(), target_form="log_probs", softcap=3.0, reduction="none")
    compare(ours, eager, [given])


def test_forward_kl_is_pytorchs():
    x, y = torch.randn(2, 6, 9)
    expected = F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    ours = functional.kl_div(
        x.log_softmax(-1), y.softmax(-1), input_form="log_probs", target_form="probs", reduction="batchmean"
    )
    torch.testing.assert_close(ours, expected)


def test_the_mean_over_nothing_is_nan_with_zero_gradients():
    leaves = heads()
    loss = functional.linear_jsd(*leaves[:2], *leaves[3:5], mask=torch.zeros(SHAPE, dtype=torch.bool))
    assert loss.isnan()
    for grad in torch.autograd.grad(loss, [leaves[0], leaves[1], leaves[3]]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_autocast_is_honoured():
    leaves = heads()
    with torch.autocast("cpu", torch.bfloat16):
        ours = functional.linear_jsd(*leaves[:2], *leaves[3:5], leaves[2], leaves[5])
    rounded = [t.detach().bfloat16().float().requires_grad_() for t in leaves]
    student, teacher = logits(rounded)
    expected = DIVERGENCES["jsd"].reference(student.log_softmax(-1), teacher.log_softmax(-1), 0.5).mean()
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(ours, leaves))


def test_clear_errors():
    leaves = heads()
    four, given = (*leaves[:2], *leaves[3:5]), torch.randn(*SHAPE, VOCAB)
    with pytest.raises(ValueError, match="did you mean 'batchmean'"):
        functional.linear_jsd(*four, reduction="batch_mean")
    with pytest.raises(ValueError, match=r"input_form must be .* did you mean 'log_probs'"):
        functional.kl_div(given, given, input_form="logprobs")
    with pytest.raises(ValueError, match="a temperature divides logits, and target is given as probs"):
        functional.kl_div(given, given.softmax(-1), target_form="probs", temperature=2.0)
    with pytest.raises(ValueError, match=r"beta of jsd must be in \(0, 1\)"):
        functional.linear_jsd(*four, beta=1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        functional.linear_tvd(*four, temperature=0.0)
    with pytest.raises(ValueError, match=r"student and teacher .* \(2, 5\), \(2, 4\)"):
        functional.linear_kl_div(*leaves[:2], leaves[3][:, :4], leaves[4])
    with pytest.raises(ValueError, match="student and mask"):
        functional.linear_kl_div(*four, mask=torch.ones(3))
    with pytest.raises(ValueError, match="as many classes"):
        functional.kl_div(given, given[..., 1:])
    with pytest.raises(TypeError, match="one dtype"):
        functional.linear_kl_div(leaves[0].double(), *four[1:])
