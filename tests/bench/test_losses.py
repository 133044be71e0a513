"""A loss as a case: what is compared with float64, and what a peer that writes into its inputs leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuse_losses.bench import exact
from fuse_losses.bench.case import FULL, LOSS
from fuse_losses.bench.index import BETA, TABLES, cross_entropy, jsd, linear_jsd
from fuse_losses.bench.losses import Data, Loss, loss_case
from fuse_losses.bench.peers import PEERS, plain_head

ROWS, VOCAB = 13, 37
LOSS_OF = {"linear-ce": plain_head, **{table.name: table.loss for table in TABLES}}


def data(name: str, device: str = "cpu") -> Data:
    """Inputs of each loss, at a size at which float64 can be made in one piece."""
    torch.manual_seed(1)
    logits = [torch.randn(ROWS, VOCAB, device=device) for _ in range(2)]
    target = torch.randint(VOCAB, (ROWS,), device=device)
    if name in ("linear-ce", "linear-jsd"):
        x, w, xt, wt = (torch.randn(n, 5, device=device) for n in (ROWS, VOCAB) * 2)
        inputs, shared = ((x, w, target), {1}) if name == "linear-ce" else ((x, w, xt, wt), {1, 3})
        return Data(inputs, learns=(0, 1), shared=frozenset(shared))
    if name == "megatron-ce":
        by_sequence = torch.randn(ROWS, 2, VOCAB, device=device)
        return Data((by_sequence, torch.randint(VOCAB, (ROWS, 2), device=device)), loss_shape=(ROWS, 2))
    if name == "ce":
        return Data((logits[0], target))
    return Data(tuple(F.log_softmax(z, -1) if name == "jsd" else F.softmax(z, -1) for z in logits))


@pytest.mark.parametrize("height", [1, 4, 1000])
@pytest.mark.parametrize("name", LOSS_OF)
def test_the_reference_in_blocks_is_the_whole(name: str, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is off by a part in 1000 is found to be off by that much, whatever the blocks."""
    monkeypatch.setattr(exact, "BLOCK_ELEMENTS", height * VOCAB)
    given = data(name)
    wide = [
        x.double().requires_grad_(i in given.learns) if x.is_floating_point() else x for i, x in enumerate(given.inputs)
    ]
    upstream = torch.rand(given.loss_shape, dtype=torch.float64)
    loss = LOSS_OF[name](*wide, wide=torch.float64)
    gradients = torch.autograd.grad(loss, [wide[i] for i in given.learns], upstream)

    def errors(off: float, at: int, loss_off: float) -> exact.Errors:
        found = {i: g * (1 + off * (i == at)) for i, g in zip(given.learns, gradients, strict=True)}
        arguments = given.inputs, given.shared, given.vocab, upstream, loss.detach() * (1 + loss_off), found
        return exact.errors(LOSS_OF[name], *arguments)

    right = errors(0, 0, 0)
    assert right.loss < 1e-14 and right.gradient is not None and right.gradient < 1e-14
    for at in given.learns:
        wrong = errors(1e-3, at, 1e-2)
        assert wrong.gradient == pytest.approx(1e-3) and wrong.loss == pytest.approx(1e-2)


def test_without_gradients_only_the_loss_is_compared() -> None:
    given = data("ce")
    found = exact.errors(
        cross_entropy, given.inputs, given.shared, VOCAB, torch.ones(()), cross_entropy(*given.inputs), {}
    )
    assert found.gradient is None and found.loss < 1e-6


class InPlace(torch.autograd.Function):
    """Cross entropy that leaves its gradient in the logits, as fused kernels do to save memory."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, target)
        gradient = (logits.softmax(-1) - F.one_hot(target, VOCAB)) / ROWS
        logits.data.copy_(gradient)
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0].mul_(upstream), None


@pytest.mark.parametrize(("loss", "overwrites"), [(InPlace.apply, True), (cross_entropy, False)])
def test_overwritten_inputs_are_seen_and_restored(loss: Loss, overwrites: bool) -> None:
    kept: list[Data] = []

    def make(device: str) -> Data:
        kept.append(data("ce", device))
        return kept[-1]

    case = loss_case("ce", VOCAB, make, cross_entropy, lambda peer: loss, phases=(LOSS, FULL))
    steps = case.build(PEERS[0], "cpu")
    (logits, _), (pristine, _) = kept[-1].inputs, data("ce").inputs
    for phase in (LOSS, FULL, LOSS):
        step = steps[phase]
        check = step.check()
        assert check.overwrites is overwrites
        assert check.errors.loss < 1e-6 and (check.errors.gradient or 0) < 1e-6
        for _ in range(2):
            step.run()
            assert torch.equal(logits, pristine) is not overwrites
            assert (logits.grad is not None) is (phase == FULL)
            step.clear()
            assert torch.equal(logits, pristine) and logits.grad is None


def test_a_gradient_that_is_missing_fails_the_check() -> None:
    case = loss_case("ce", VOCAB, lambda device: data("ce", device), cross_entropy, lambda peer: detached, (FULL,))

    def detached(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.detach(), target) + torch.zeros((), requires_grad=True)

    with pytest.raises(RuntimeError, match="no gradient for input 0"):
        case.build(PEERS[0], "cpu")[FULL].check()


def test_the_divergence_is_that_of_the_distributions() -> None:
    """JSD = H(mixture) - sum of the weighted entropies, and the linear one is that of its logits."""
    x, w, xt, wt = data("linear-jsd").inputs
    student, teacher = ((a @ b.T).double().softmax(-1) for a, b in ((x, w), (xt, wt)))
    parts = BETA * teacher + (1 - BETA) * student, teacher, student
    mixed, of_teacher, of_student = (torch.special.entr(p).sum(-1).mean() for p in parts)
    expected = mixed - BETA * of_teacher - (1 - BETA) * of_student
    assert jsd(student.log(), teacher.log(), torch.float64).item() == pytest.approx(expected.item())
    assert linear_jsd(x, w, xt, wt).item() == pytest.approx(expected.item(), rel=1e-4)
