"""Losses between two distributions are read as divergences, in any spelling, and written as their operators."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from tests.capture import Capture, operators
from tests.head.spellings import HIDDEN, VOCAB
from tests.oracle import assert_as_eager
from tests.rewrite.row_wise import ROW_WISE, row_args

# what of the row-wise losses is a divergence, and by which operator it is made
PAIRED = {
    "targets: soft targets": "divergence_sum",
    "targets: soft targets, sum": "divergence_sum",
    "targets: soft targets, none": "divergence",
    "targets: soft targets, classes in dim 1": "divergence_sum",
    "targets: one-hot targets": "divergence_sum",
    "distributions: KL to a teacher": "divergence_sum",
    "distributions: KL to a teacher that learns": "divergence_sum",
    "distributions: KL, log targets, sum": "divergence_sum",
    "distributions: KL, mean over everything": "divergence_sum",
    "distributions: forward KL to a teacher's head": "divergence",
    "distributions: reverse KL to a teacher's head": "divergence_sum",
    "distributions: JSD": "divergence_sum",
    "distributions: JSD of two heads": "divergence",
    "distributions: TVD": "divergence",
    "distributions: TVD, sum": "divergence_sum",
    "distributions: teacher under no_grad": "divergence",
    "distributions: teacher and student learn": "divergence",
    "values: rows compared": "divergence",
    "values: logits returned": "divergence_sum",
    "values: checkpointed": "divergence",
    "distributions: distillation, shifted": "divergence_sum",
    "values: loop over sequences": "divergence_sum",
    "values: rows swapped": "divergence",
    "values: one row": "divergence",
    "values: last position": "divergence",
}


@pytest.mark.parametrize("name", PAIRED)
def test_row_wise_losses_that_are_divergences(name: str) -> None:
    fn, capture = dict(ROW_WISE)[name], Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert capture.codes == []
    found = {o for gm in capture.after for o in operators(gm)}
    assert PAIRED[name] in found and "chunked_rows" not in found


# ------------------------------------------------------------------------------------------------------- spellings


def tensors() -> dict[str, torch.Tensor]:
    """x [4, 6, H] and w [V, H] of a student, y and wt (of eight classes more) of a teacher, masks, given values."""
    torch.manual_seed(0)
    s, t = torch.randn(4, 6, VOCAB), torch.randn(4, 6, VOCAB)
    m = torch.rand(4, 6) > 0.3
    return {
        "x": torch.randn(4, 6, HIDDEN).requires_grad_(),
        "w": torch.randn(VOCAB, HIDDEN).requires_grad_(),
        "y": torch.randn(4, 6, HIDDEN + 3),
        "wt": torch.randn(VOCAB + 8, HIDDEN + 3),
        "m": m,
        "labels": torch.where(m, torch.randint(0, VOCAB, (4, 6)), -100),
        "s": s.clone().requires_grad_(),
        "t": t,
        "p": s.softmax(-1).requires_grad_(),
        "q": t.softmax(-1),
        "lp": s.log_softmax(-1).requires_grad_(),
        "lq": t.log_softmax(-1),
    }


def tvd_given(p, q):
    return 0.5 * (p - q).abs().sum(-1).mean()


def tvd_l1(p, q):
    return 0.5 * F.l1_loss(p, q, reduction="sum") / p.size(0)


def tvd_norm(p, q):
    return 0.5 * torch.norm(p - q, p=1, dim=-1).mean()


def jsd_lerp_given(lp, lq, beta=0.5):
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    a, b = lp.view(-1, VOCAB), lq.view(-1, VOCAB)
    mixed = torch.lerp(a.exp(), b.exp(), beta).log()
    loss = beta * kl(mixed, b).sum(-1) + (1 - beta) * kl(mixed, a).sum(-1)
    return (loss / a.shape[0]).sum()


def kl_given(lp, q):
    return F.kl_div(lp, q, reduction="batchmean")


def kl_given_log(lp, lq):
    return F.kl_div(lp, lq, reduction="sum", log_target=True)


def kl_of_given_logits(s, t):
    return F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4


def jsd_of_tensors(x, w, y, wt, m, beta=0.3, temperature=0.9):
    student = F.log_softmax(F.linear(x, w).float() / temperature, -1)
    teacher = F.log_softmax(F.linear(y, wt)[..., :VOCAB].float() / temperature, -1)
    b = torch.tensor(beta, dtype=student.dtype)
    mixed = torch.logsumexp(torch.stack([student + torch.log1p(-b), teacher + torch.log(b)]), dim=0)
    of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, student, reduction="none", log_target=True)
    jsd = b * of_teacher + (1 - b) * of_student
    return (jsd * m.unsqueeze(-1)).sum() / m.sum()


def kl_masked_mean(x, w, y, wt, m):
    student, teacher = F.linear(x, w).log_softmax(-1), F.linear(y, wt[:VOCAB]).log_softmax(-1)
    kl = F.kl_div(student, teacher, reduction="none", log_target=True)
    return (kl.sum(-1) * m).sum() / m.sum().clamp_min(1)


def hinton(x, w, y, wt, labels, temperature=2.0):
    student, teacher = F.linear(x, w), F.linear(y, wt[:VOCAB])
    soft = F.kl_div(
        F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="batchmean"
    )
    return 0.5 * soft * temperature**2 + 0.5 * F.cross_entropy(student.view(-1, VOCAB), labels.view(-1))


def one_weight(x, w, y, m):
    with torch.no_grad():
        teacher = F.linear(y[..., :HIDDEN], w).softmax(-1)
    cross = teacher * F.log_softmax(F.linear(x, w), -1)
    return -(cross * m[..., None]).sum() / (m.sum() + 1e-5)


def reverse_per_row(x, w, y, wt):
    student, teacher = F.linear(x, w), F.linear(y, wt[:VOCAB])
    return (student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1)


def symmetric(x, w, y, wt):
    student, teacher = F.linear(x, w).log_softmax(-1), F.linear(y, wt[:VOCAB]).log_softmax(-1)
    there = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return (0.5 * there + 0.5 * F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)).mean()


def symmetric_of_means(x, w, y, wt):
    student, teacher = F.linear(x, w).log_softmax(-1), F.linear(y, wt[:VOCAB]).log_softmax(-1)
    there = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return 0.5 * there + 0.5 * F.kl_div(teacher, student, log_target=True, reduction="batchmean")


def jsd_of_means(lp, lq, beta=0.3):
    mixed = torch.log(beta * lq.exp() + (1 - beta) * lp.exp())
    of_teacher = F.kl_div(mixed, lq, reduction="batchmean", log_target=True)
    return beta * of_teacher + (1 - beta) * F.kl_div(mixed, lp, reduction="batchmean", log_target=True)


def teacher_in_the_students_dtype(x, w, q):
    student = F.linear(x, w).softmax(-1)
    teacher = q.type_as(student)
    mixed = torch.lerp(student, teacher, 0.5).log()
    return 0.5 * (teacher * (teacher.log() - mixed) + student * (student.log() - mixed)).sum(-1).mean()


def skewed(x, w, y, wt, lam=0.1):
    student, teacher = F.linear(x, w).softmax(-1), F.linear(y, wt[:VOCAB]).softmax(-1)
    return (student * (student.log() - (lam * student + (1 - lam) * teacher).log())).sum(-1).mean()


def offline_probs(x, w, q):
    return F.kl_div(F.linear(x, w).log_softmax(-1), q, reduction="batchmean")


def offline_logits(x, w, t):
    return F.kl_div(F.linear(x, w).log_softmax(-1), t.softmax(-1), reduction="batchmean")


def offline_bfloat16(x, w, lq):
    return F.kl_div(F.linear(x, w).log_softmax(-1), lq.float(), reduction="batchmean", log_target=True)


def offline_prepared(x, w, lq):
    teacher = lq.float().exp()
    return -(teacher * F.linear(x, w).log_softmax(-1)).sum(-1).mean()


def soft_targets(x, w, q):
    return F.cross_entropy(F.linear(x, w).view(-1, VOCAB), q.view(-1, VOCAB))


SPELLINGS = [
    (tvd_given, "tvd", 0.0),
    (tvd_l1, "tvd", 0.0),
    (tvd_norm, "tvd", 0.0),
    (jsd_lerp_given, "jsd", 0.5),
    (kl_given, "kl", 0.0),
    (kl_given_log, "kl", 0.0),
    (kl_of_given_logits, "kl", 0.0),
    (jsd_of_tensors, "jsd", 0.3),
    (kl_masked_mean, "kl", 0.0),
    (hinton, "kl", 0.0),
    (one_weight, "soft_cross_entropy", 0.0),
    (reverse_per_row, "reverse_kl", 0.0),
    (symmetric, "symmetric_kl", 0.5),
    (symmetric_of_means, "symmetric_kl", 0.5),
    (jsd_of_means, "jsd", 0.3),
    (teacher_in_the_students_dtype, "jsd", 0.5),
    (skewed, "reverse_kl", 0.1),
    (offline_probs, "kl", 0.0),
    (offline_logits, "kl", 0.0),
    (offline_bfloat16, "kl", 0.0),
    (offline_prepared, "soft_cross_entropy", 0.0),
    (soft_targets, "soft_cross_entropy", 0.0),
]


def arguments(fn) -> list[torch.Tensor]:
    named = tensors()
    return [named[n] for n, p in inspect.signature(fn).parameters.items() if p.default is p.empty]


def divergences(gm: fx.GraphModule) -> list[tuple[str, float]]:
    """(name, parameter) of every divergence operator: they follow its six or seven tensors."""
    made = [n for n in gm.graph.nodes if str(n.target).startswith("fuse_losses.divergence")]
    return [next((a, n.args[i + 1]) for i, a in enumerate(n.args) if isinstance(a, str)) for n in made]


@pytest.mark.parametrize(("fn", "name", "parameter"), SPELLINGS, ids=[s[0].__name__ for s in SPELLINGS])
def test_spellings(fn, name: str, parameter: float) -> None:
    capture = Capture(chunk_rows=5)
    # few numbers: eager's largest error in this one is small by chance, with some numbers of threads
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, arguments(fn), largest=fn is not reverse_per_row)
    assert capture.codes == []
    assert divergences(capture.after[0]) == [(name, pytest.approx(parameter, abs=1e-6))]


def test_what_prepares_a_teacher_is_done_in_the_operator() -> None:
    """bfloat16 log-probs of a teacher are read as they are: no float32 copy, and no probabilities, of [N, V]."""
    x, w, lq = arguments(offline_prepared)
    capture = Capture()
    assert_as_eager(capture.compile(offline_prepared), offline_prepared, [x, w, lq.bfloat16()])
    (made,) = [n for n in capture.after[0].graph.nodes if str(n.target).startswith("fuse_losses.divergence")]
    assert {a.meta["example_value"].dtype for a in made.all_input_nodes[-1].all_input_nodes} == {torch.bfloat16}


def test_a_teacher_that_is_written_to_is_read_before() -> None:
    def fn(x, w, lq):
        teacher = lq.exp()
        lq.zero_()
        return -(teacher * F.linear(x, w).log_softmax(-1)).sum(-1).mean()

    x, w, lq = arguments(offline_prepared)
    eager, ours = fn(x, w, lq.clone()), Capture().compile(fn)(x, w, lq.clone())
    torch.testing.assert_close(ours, eager)


def with_epsilon(x, w, q):
    return (q * (q.log() - (F.linear(x, w).softmax(-1) + 1e-8).log())).sum(-1).mean()


def clamped(x, w, q):
    return (q * F.linear(x, w).softmax(-1).clamp(min=1e-6).log()).sum(-1)


def euclidean(x, w, q):
    return (F.linear(x, w).softmax(-1) - q).square().sum(-1).sqrt().mean()


def partly_detached(x, w, y, wt):
    student, teacher = F.linear(x, w), F.linear(y, wt[:VOCAB])
    ratio = student.log_softmax(-1) - teacher.log_softmax(-1)
    return (student.softmax(-1).detach() * ratio * ratio.detach().exp()).sum(-1)


def of_whole_numbers(x, w, q):
    """Not linear: the part behind the point is cut off before the sum is doubled."""
    divergence = (q * (q.log() - F.linear(x, w).log_softmax(-1))).sum(-1)
    return divergence.int() * 2, divergence


def other_at_ties(x, w, q):
    p = F.linear(x, w).softmax(-1)
    return torch.where(p >= q, p - q, q - p).sum(-1)


@pytest.mark.parametrize("fn", [with_epsilon, clamped, euclidean, partly_detached, other_at_ties])
def test_what_is_nearly_a_divergence_goes_by_rows(fn) -> None:
    capture = Capture(chunk_rows=5)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, arguments(fn))
    assert capture.codes == []
    assert "chunked_rows" in operators(capture.after[0])
    assert not divergences(capture.after[0])


def test_whole_numbers_of_a_divergence() -> None:
    capture = Capture(chunk_rows=5)
    assert_as_eager(capture.compile(of_whole_numbers, fullgraph=True), of_whole_numbers, arguments(of_whole_numbers))
    assert capture.codes == []


def test_given_values_need_not_be_probabilities() -> None:
    """A distance of any two tensors is one of distributions only as long as it is that below zero too."""

    def plain(a, b):
        return (a - b).abs().mean()

    def of_positive_parts(a, b):
        return (a.clamp(min=0) - b).abs().mean()

    args = [torch.randn(4, 6, VOCAB, requires_grad=True), torch.randn(4, 6, VOCAB)]
    for fn, names in ((plain, [("tvd", 0.0)]), (of_positive_parts, [])):
        capture = Capture()
        assert_as_eager(capture.compile(fn), fn, args)
        assert capture.codes == []  # and nobody hears of a distance that is left alone
        assert divergences(capture.after[0]) == names
