"""Functions of the logits beside a cross entropy, by name: what PyTorch's own composite operations are taken apart to.

Some write in place inside, some are losses of their own, some return pairs. Each runs in chunks, with a cross entropy
on the same logits, and is as right as eager.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture import Capture, operators
from tests.oracle import assert_as_eager
from tests.rewrite.row_wise import row_args

# of logits [N, V] and a tensor [N, V]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse, summed": lambda z, t: F.mse_loss(z, t, reduction="sum"),
    "mse, by class": lambda z, t: F.mse_loss(z, t, reduction="none").sum(-1),
    "mse of a teacher that is cast": lambda z, t: F.mse_loss(z, t.double().float().detach()),
    "l1": F.l1_loss,
    "smooth l1": lambda z, t: F.smooth_l1_loss(z, t, beta=0.5),
    "huber": lambda z, t: F.huber_loss(z, t, delta=0.7),
    "hinge": lambda z, t: F.hinge_embedding_loss(z, t.sign()),
    "soft margin": lambda z, t: F.soft_margin_loss(z, t.sign()),
    "several labels": lambda z, t: F.multilabel_soft_margin_loss(z, (t > 0).to(z.dtype)),
    "binary cross entropy": lambda z, t: F.binary_cross_entropy(z.sigmoid(), t.sigmoid()),
    "binary, of logits": lambda z, t: F.binary_cross_entropy_with_logits(z, t.sigmoid(), pos_weight=t[0].exp()),
    "poisson": lambda z, t: F.poisson_nll_loss(z, t.abs()),
    "cosine embedding": lambda z, t: F.cosine_embedding_loss(z, t, torch.ones(10)),
    "triplet margin": lambda z, t: F.triplet_margin_loss(z, t, t.tanh()),
}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quantile": lambda z, t: z.quantile(0.7, dim=-1),
    "nanquantile": lambda z, t: z.nanquantile(0.3, dim=-1),
    "nansum": lambda z, t: z.nansum(-1),
    "cosine similarity": lambda z, t: F.cosine_similarity(z, t, dim=-1),
    "distance": F.pairwise_distance,
    "log sigmoid": lambda z, t: (F.logsigmoid(z) * t).sum(-1),
    "gated": lambda z, t: F.glu(z[:, :-1], -1).sum(-1),
    "hard swish": lambda z, t: F.hardswish(z).sum(-1),
    "variance and mean": lambda z, t: torch.stack(torch.var_mean(z, -1)).sum(0),
    "deviation and mean": lambda z, t: torch.stack(torch.std_mean(z, -1)).sum(0),
    "least and largest": lambda z, t: torch.stack(z.aminmax(dim=-1)).sum(0),
    "classes above zero": lambda z, t: z.amax(-1) + (z - 1).relu().count_nonzero(-1) * 0.5,
    "normalised": lambda z, t: (F.normalize(z, dim=-1) * t).sum(-1),
    "rms norm": lambda z, t: (F.rms_norm(z, (z.shape[-1],)) * t).sum(-1),
}

# They count with the size of the vocabulary, or PyTorch's fake tensors cannot follow them.
LEFT_ALONE_IF_SYMBOLIC = {"gated", "hinge", "cosine similarity"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [*LOSSES, *FUNCTIONS])
def test_a_function_beside_a_cross_entropy(name: str, dynamic: bool) -> None:
    of_logits = {**LOSSES, **FUNCTIONS}[name]

    def fn(x1, w, y1, t1):
        z = F.linear(x1, w)
        return F.cross_entropy(z, y1), of_logits(z, t1)

    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True, dynamic=dynamic), fn, row_args(fn))
    if dynamic and name in LEFT_ALONE_IF_SYMBOLIC:
        assert len(capture.codes) == 1
        return
    assert capture.codes == []
    loops = 2 if name == "classes above zero" else 1  # a count has no gradient
    assert operators(capture.after[0]).count("chunked_rows") == loops


def written(write: Callable[..., None]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def fn(x1, w, y1, t1):
        z = F.linear(x1, w)
        write(z, x1, y1, t1)
        return F.cross_entropy(z, y1)

    return fn


def write_where_smaller(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    z[z < z.topk(20).values[:, [-1]]] = -9.0


def write_one_class(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    z[:, 2] = -9.0
    z[..., -1] = x.mean(-1)  # which learns


def write_classes(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    z[:, 2:4] = x[:, :2] * 0.5
    z[:, 7:9] = x[:, :1].double()
    z[:, 4:6] = z[:, 10:12].detach()
    z[:, 12:14] = t[0, :2]


def write_masked(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    z[y < 0] = 0.5
    z[(y > 9)[:, None] & (t > 0)] = x.mean()


def write_listed(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    z[:, [1, -2]] = -9.0
    z[..., torch.tensor([3, 5])] = t[:, :2]
    z.index_copy_(1, torch.tensor([11, 12]), x[:, :2])
    z.index_add_(1, torch.tensor([13, 13, 14]), x[:, :3], alpha=2)


def write_margin(z: Tensor, x: Tensor, y: Tensor, t: Tensor) -> None:
    rows, target = torch.arange(z.shape[0]), y.clamp(min=0)
    z[rows, target] -= 0.35
    z[rows, -target - 1] = x.mean(-1)
    z[rows, (target + 1) % 5] = 0.5


WRITES = {
    "where smaller": write_where_smaller,
    "one class": write_one_class,
    "some classes": write_classes,
    "by masks": write_masked,
    "listed classes": write_listed,
    "a class of every row": write_margin,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_logits_that_are_written_to(name: str, dynamic: bool) -> None:
    """In place, some classes of every row; of numbers and of tensors that learn."""
    fn, capture = written(WRITES[name]), Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True, dynamic=dynamic), fn, row_args(fn))
    assert capture.codes == [] and set(operators(capture.after[0])) == {"chunked_rows"}


def test_classes_that_are_filled() -> None:
    """Where sizes are symbolic, PyTorch cannot retrace it."""

    def fn(x1, w, y1):
        z = F.linear(x1, w).index_fill(-1, torch.tensor([7, -2]), -4.0)
        return F.cross_entropy(z.index_fill(-1, torch.tensor([9]), x1.mean()), y1)

    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert capture.codes == [] and operators(capture.after[0]) == ["chunked_rows"]


def test_a_divergence_between_distribution_objects() -> None:
    """It writes infinities by masks over the vocabulary."""

    def fn(x1, w, wT, xT):
        student, teacher = (torch.distributions.Categorical(logits=z) for z in (F.linear(x1, w), F.linear(xT, wT)))
        return torch.distributions.kl_divergence(student, teacher).mean()

    capture = Capture(chunk_rows=4)
    args = [a.flatten(0, 1) if a.dim() > 2 else a for a in row_args(fn)]
    assert_as_eager(capture.compile(fn), fn, args)
    assert "chunked_rows" in operators(capture.after[0])


def test_what_a_second_loss_reads_is_made_before_the_first() -> None:
    """One loop over the rows, though the teacher is prepared between the two losses; not across a change of modes."""

    def fn(x1, w, y1, t1, r1):
        z = F.linear(x1, w)
        first = F.cross_entropy(z, y1, label_smoothing=0.1)
        scale = r1.sigmoid() + 1
        return first, ((z / scale).softmax(-1) ** 2).sum(-1)

    def under_no_grad(x1, w, y1, t1, r1):
        z = F.linear(x1, w)
        first = F.cross_entropy(z, y1, label_smoothing=0.1)
        with torch.no_grad():
            scale = r1.sigmoid() + 1
        return first, ((z / scale).softmax(-1) ** 2).sum(-1)

    def written_in_between(x1, w, y1, t1, r1):
        z, row = F.linear(x1, w), r1 * 1
        first = F.cross_entropy(z, y1, label_smoothing=0.1)
        row += 1
        return first, ((z / (row.sigmoid() + 1)).softmax(-1) ** 2).sum(-1)

    for function, loops in ((fn, 1), (under_no_grad, 2), (written_in_between, 2)):
        torch._dynamo.reset()
        capture = Capture(chunk_rows=4)
        assert_as_eager(capture.compile(function, fullgraph=True), function, row_args(function))
        assert operators(capture.after[0]).count("chunked_rows") == loops


def test_products_that_are_written_apart() -> None:
    """The operands of the second product are made behind the first loss."""

    def fn(x1, w, t1):
        divergence = F.mse_loss(x1 @ w.t(), t1)
        return divergence, F.kl_div((x1 @ w.t()).log_softmax(-1), t1.softmax(-1), reduction="batchmean")

    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert capture.codes == [] and operators(capture.after[0]) == ["chunked_rows"]


OF_A_NUMBER: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": lambda z, c: z.clamp(-c, c),
    "least": lambda z, c: z.clamp(min=-c),
    "compared": lambda z, c: torch.where(z > c, z, 0.0),
    "filled": lambda z, c: z.masked_fill(z < 0, -c),
    "power": lambda z, c: (z.abs() + 0.1) ** c,
    "subtracted": lambda z, c: z - c,
    "subtracted from": lambda z, c: c - z,
    "added": lambda z, c: z + c,
    "softcap": lambda z, c: c * torch.tanh(z / c),
    "leaky relu": F.leaky_relu,
}


class Annealed(torch.nn.Module):
    """A loss with a number that changes between steps."""

    def __init__(self, loss: Callable[..., Tensor], number: float) -> None:
        super().__init__()
        self.loss, self.number = loss, number

    def forward(self, *args: Tensor) -> Tensor:
        return self.loss(self.number, *args)


@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_a_number_that_is_known_at_run_time(name: str) -> None:
    """A Python float of the model is an input of a dynamic graph."""
    of_number = OF_A_NUMBER[name]

    def loss(number, x1, w, y1):
        return F.cross_entropy(of_number(F.linear(x1, w), number), y1, label_smoothing=0.1)

    model, capture = Annealed(loss, 1.3), Capture(chunk_rows=4)
    compiled = capture.compile(model, fullgraph=True, dynamic=True)
    args = row_args(lambda x1, w, y1: None)
    assert_as_eager(compiled, model, args)
    model.number = 0.9
    assert_as_eager(compiled, model, args)
    assert len(capture.after) == 1
    assert capture.codes == (["rows_mix"] if name == "leaky relu" else [])  # it takes no tensor for the number


OF_A_NUMBER_TOO: dict[str, Callable[[Tensor, float], Tensor]] = {
    **{name: OF_A_NUMBER[name] for name in ("clamp", "filled", "power", "softcap", "subtracted from")},
    "divided": lambda z, c: z / c,
}


def compiled_graphs(loss: Callable[..., Tensor], args: list[Tensor], numbers: tuple[float, ...]) -> int:
    """How many graphs are compiled for the numbers, one after the other, all of whose results are right."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Annealed(loss, numbers[0])
    options = {"fuse_losses.min_vocab": 1, "fuse_losses.chunk_rows": 4}
    compiled = torch.compile(model, backend="fuse_losses", dynamic=True, options=options)
    for number in numbers:
        model.number = number
        assert_as_eager(compiled, model, args)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", OF_A_NUMBER_TOO)
def test_a_number_that_changes_is_compiled_once(name: str) -> None:
    of_number = OF_A_NUMBER_TOO[name]

    def loss(number, x1, w, t1):
        student, teacher = of_number(F.linear(x1, w), number), of_number(t1, number)
        return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean") * number**2

    args = row_args(lambda x1, w, t1: None)
    with torch._inductor.utils.fresh_cache():
        assert compiled_graphs(loss, args, (1.0, 1.7)) == 1
        assert compiled_graphs(loss, args, (1.3, 2.0)) == 1


def test_a_number_is_not_what_the_caches_hold() -> None:
    """Inductor compiles the clipping for its present bounds; from a cache, it would be kept for all others."""

    def loss(epsilon, x1, w, c1, m1):
        log_probs = F.linear(x1, w).log_softmax(-1).gather(-1, c1[:, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach() + m1).exp()
        return -torch.min(ratio * m1, ratio.clamp(1 - epsilon, 1 + epsilon) * m1).mean()

    args = row_args(lambda x1, w, c1, m1: None)
    with torch._inductor.utils.fresh_cache():
        for _ in range(2):
            compiled_graphs(loss, args, (0.2, 0.3, 0.4))


def test_a_size_that_only_the_second_loss_knows() -> None:
    def fn(x1, w, y1, n):
        log_probs = F.linear(x1, w).log_softmax(-1)
        return F.nll_loss(log_probs, y1), torch.log1p(-log_probs.gather(-1, n).exp()).mean()

    args = [*row_args(lambda x1, w, y1: None), torch.randint(5, (10, 3))]
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True, dynamic=True), fn, args)
    assert capture.codes == []


def test_the_largest_classes_of_a_teacher_of_another_width() -> None:
    """One head's loop reads what the other's has made; their sizes are symbolic, and not the same."""

    def fn(x1, w, teacher, head):
        largest, where = (teacher @ head.t()).topk(5, -1)
        log_probs = F.linear(x1, w).log_softmax(-1).gather(-1, where)
        return F.kl_div(log_probs, largest.softmax(-1), reduction="batchmean")

    x1, w = row_args(lambda x1, w: None)
    args = [x1, w, torch.randn(x1.shape[0], 3), torch.randn(w.shape[0], 3)]
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True, dynamic=True), fn, args)
    assert capture.codes == [] and operators(capture.after[0]) == ["chunked_rows"] * 2


def test_what_reads_the_first_loss_comes_behind_it() -> None:
    """The second loss is scaled by a value of the first, which may be moved by what it is, but not by where it is."""

    def fn(x1, w):
        z = F.linear(x1, w)
        first = (z * 1.5).softmax(-1).square().sum(-1)
        scale = first.detach().sqrt() + 1
        return first, ((z / scale[:, None]).softmax(-1) ** 2).sum(-1)

    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert capture.codes == []
