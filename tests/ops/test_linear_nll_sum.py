"""`linear_nll_sum` against a float64 oracle: values, gradients, and what happens at the edges."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gradients(value, leaves, upstream):
    return torch.autograd.grad(value, leaves, upstream.to(value.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("squash", ["identity", "scale", "tanh"])
@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 13, 64])
def test_value_and_gradients(make_problem, assert_as_good_as_eager, dtype, squash, chunk_rows):
    problem = make_problem(dtype=dtype, squash=squash, bias=True, row_weight=True)
    upstream = torch.randn((), dtype=torch.float64)
    ours, eager, oracle = problem.leaves(), problem.leaves(), problem.leaves(torch.float64)
    ours_value = problem.nll_sum(ours, chunk_rows)
    eager_value, oracle_value = problem.eager(eager)[0], problem.eager(oracle)[0]
    assert_as_good_as_eager([ours_value], [eager_value], [oracle_value])
    assert_as_good_as_eager(
        gradients(ours_value, ours, upstream),
        gradients(eager_value, eager, upstream),
        gradients(oracle_value, oracle, upstream),
    )


@pytest.mark.parametrize("vocab", [1, 3, 127, 128, 1009])
@pytest.mark.parametrize("rows", [1, 8, 17])
def test_odd_and_round_sizes(make_problem, assert_as_good_as_eager, vocab, rows):
    problem = make_problem(rows=rows, vocab=vocab, ignored=rows // 4)
    upstream = torch.randn((), dtype=torch.float64)
    results = []
    for leaves, run in (
        (problem.leaves(), lambda leaves: problem.nll_sum(leaves, 4)),
        (problem.leaves(), lambda leaves: problem.eager(leaves)[0]),
        (problem.leaves(torch.float64), lambda leaves: problem.eager(leaves)[0]),
    ):
        value = run(leaves)
        results.append([value, *gradients(value, leaves, upstream)])
    # with one class the gradient is a difference that rounds to zero or not: allow the rounding of 1
    if vocab == 1:
        for ours, oracle in zip(results[0], results[2], strict=True):
            torch.testing.assert_close(ours.double(), oracle, rtol=0, atol=1e-5)
    else:
        assert_as_good_as_eager(*results)


@pytest.mark.parametrize("chunk_rows", [4, 16, 64, 1024])
def test_bfloat16_weight_gradient_does_not_degrade_with_chunks(make_problem, assert_as_good_as_eager, chunk_rows):
    problem = make_problem(rows=1024, hidden=32, vocab=64, dtype=torch.bfloat16, bias=True)
    upstream = torch.tensor(0.7, dtype=torch.float64)
    ours, eager, oracle = problem.leaves(), problem.leaves(), problem.leaves(torch.float64)
    assert_as_good_as_eager(
        gradients(problem.nll_sum(ours, chunk_rows), ours, upstream),
        gradients(problem.eager(eager)[0], eager, upstream),
        gradients(problem.eager(oracle)[0], oracle, upstream),
        strict=True,
    )


def test_native_accumulation_adds_in_the_weights_dtype(make_problem):
    problem = make_problem(rows=512, hidden=32, vocab=64, dtype=torch.bfloat16)
    exact = problem.leaves(torch.float64)
    oracle = torch.autograd.grad(problem.eager(exact)[0], exact)[1]
    errors = {}
    for accumulate in ("float32", "native"):
        leaves = problem.leaves()
        grad = torch.autograd.grad(problem.nll_sum(leaves, 8, accumulate), leaves)[1]
        assert grad.dtype == torch.bfloat16
        errors[accumulate] = (grad.double() - oracle).norm().item()
    assert errors["float32"] < errors["native"] < 0.1 * oracle.norm().item()


def test_float16_survives_small_row_weights_and_a_loss_scale(make_problem, assert_as_good_as_eager):
    """Row weights 1/N underflow float16 until the loss scale arrives, which is in the backward."""
    problem = make_problem(rows=64, vocab=1009, dtype=torch.float16)
    problem.row_weight = torch.full((64,), 1e-6)
    upstream = torch.tensor(65536.0, dtype=torch.float64)
    ours, eager, oracle = problem.leaves(), problem.leaves(), problem.leaves(torch.float64)
    assert_as_good_as_eager(
        gradients(problem.nll_sum(ours, 16), ours, upstream),
        gradients(problem.eager(eager)[0], eager, upstream),
        gradients(problem.eager(oracle)[0], oracle, upstream),
    )


def test_float16_sums_beyond_its_range_are_scaled_before_the_cast(make_problem):
    problem = make_problem(rows=4096, hidden=4, vocab=3, dtype=torch.float16, ignored=0)
    problem.x.fill_(50.0)
    problem.target.zero_()
    problem.weight.zero_()
    leaves = problem.leaves()
    (grad,) = torch.autograd.grad(problem.nll_sum(leaves, 512), leaves[1:2], torch.tensor(1e-3))
    exact = 4096 * 50.0 * 1e-3 / 3  # the unscaled sum is 68267, beyond float16
    torch.testing.assert_close(grad[1].float(), torch.full((4,), exact), rtol=2e-3, atol=0)


@pytest.mark.parametrize("upstream", [float("inf"), float("nan"), 2.0])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_valid_row_gives_exact_zero_gradients(make_problem, rows, upstream):
    problem = make_problem(rows=rows, ignored=rows, bias=True, row_weight=True)
    leaves = problem.leaves()
    value = problem.nll_sum(leaves, 2)
    assert value.item() == 0.0 and value.requires_grad
    for leaf, grad in zip(leaves, torch.autograd.grad(value, leaves, torch.tensor(upstream)), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_ignored_rows_of_nan_logits_leave_other_rows_alone(make_problem):
    problem = make_problem(rows=6, ignored=0)
    problem.target[2] = problem.ignore_index
    clean = problem.leaves()
    grad = torch.autograd.grad(problem.nll_sum(clean, 2), clean[0])[0]
    problem.x[2] = float("nan")
    leaves = problem.leaves()
    value = problem.nll_sum(leaves, 2)
    assert value.isfinite()
    dirty = torch.autograd.grad(value, leaves[0])[0]
    assert torch.equal(dirty, grad) and torch.equal(dirty[2], torch.zeros_like(dirty[2]))


def test_nan_row_poisons_only_itself(make_problem):
    problem = make_problem(rows=6, ignored=0)
    problem.x[3, 0] = float("nan")
    leaves = problem.leaves()
    value = problem.nll_sum(leaves, 4)
    grad = torch.autograd.grad(value, leaves[0])[0]
    assert value.isnan() and grad[3].isnan().all()
    assert grad[[0, 1, 2, 4, 5]].isfinite().all()


def test_masked_classes_have_zero_gradient(make_problem, assert_as_good_as_eager):
    problem = make_problem(vocab=127, bias=True)
    problem.bias[::3] = float("-inf")
    problem.target = torch.where(problem.target % 3 == 0, problem.target + 1, problem.target).clamp(max=125)
    results = []
    for leaves, run in (
        (problem.leaves(), lambda leaves: problem.nll_sum(leaves, 4)),
        (problem.leaves(), lambda leaves: problem.eager(leaves)[0]),
        (problem.leaves(torch.float64), lambda leaves: problem.eager(leaves)[0]),
    ):
        value = run(leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    assert_as_good_as_eager(*results)
    assert torch.equal(results[0][2][::3], torch.zeros_like(results[0][2][::3]))


def test_logits_of_ten_thousand(make_problem, assert_as_good_as_eager):
    problem = make_problem(vocab=127, bias=True)
    problem.bias.add_(1e4)
    results = []
    for leaves, run in (
        (problem.leaves(), lambda leaves: problem.nll_sum(leaves, 4)),
        (problem.leaves(), lambda leaves: problem.eager(leaves)[0]),
        (problem.leaves(torch.float64), lambda leaves: problem.eager(leaves)[0]),
    ):
        value = run(leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    assert_as_good_as_eager(*results)


def test_any_strides_and_int32_targets(make_problem):
    problem = make_problem(rows=10, bias=True, row_weight=True)
    plain = problem.leaves()
    expected = problem.nll_sum(plain, 4)
    expected_grads = torch.autograd.grad(expected, plain)
    problem.target = problem.target.int().repeat_interleave(2)[::2]
    strided = [
        problem.x.t().contiguous().t(),
        problem.weight.t().contiguous().t(),
        problem.bias.repeat_interleave(3)[::3],
        problem.row_weight.double().repeat_interleave(2)[::2],
    ]
    strided = [t.detach().requires_grad_() for t in strided]
    assert not any(t.is_contiguous() for t in strided)
    value = problem.nll_sum(strided, 4)
    torch.testing.assert_close(value, expected)
    for a, b in zip(torch.autograd.grad(value, strided), expected_grads, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b)


def test_given_logits_are_read_and_gradients_still_reach_x_and_weight(make_problem):
    problem = make_problem(squash="tanh", bias=True)
    plain, given = problem.leaves(), problem.leaves()
    x, weight, bias, _ = problem.unpack(given)
    logits = torch.nn.functional.linear(x, weight, bias)
    before = logits.detach().clone()
    value = torch.ops.fuse_losses.linear_nll_sum(
        x, weight, bias, problem.target, None, logits, *problem.how, 4, "float32"
    )
    grads = torch.autograd.grad(value, given)
    expected = problem.nll_sum(plain, 4)
    assert torch.equal(logits, before)
    torch.testing.assert_close(value, expected)
    for a, b in zip(grads, torch.autograd.grad(expected, plain), strict=True):
        torch.testing.assert_close(a, b)


def test_two_backwards_from_one_forward(make_problem):
    leaves = (problem := make_problem(bias=True, row_weight=True)).leaves()
    value = problem.nll_sum(leaves, 4)
    first = torch.autograd.grad(value, leaves, torch.tensor(1.5), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(value, leaves, torch.tensor(-3.0))
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)  # the second backward left the first's results alone
        assert torch.equal(c, -2 * a)


def test_double_backward_raises(make_problem):
    leaves = (problem := make_problem()).leaves()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(problem.nll_sum(leaves, 4), leaves, create_graph=True)


def test_result_may_be_changed_in_place(make_problem):
    leaves = (problem := make_problem()).leaves()
    expected = torch.autograd.grad(problem.nll_sum(leaves, 4), leaves)
    loss = problem.nll_sum(leaves, 4)
    loss += 1.0
    for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(a, b)


def test_bitwise_repeatable(make_problem):
    problem = make_problem(rows=64, vocab=1009, dtype=torch.bfloat16, bias=True)
    runs = []
    for _ in range(2):
        leaves = problem.leaves()
        value = problem.nll_sum(leaves, 16)
        runs.append([value, *torch.autograd.grad(value, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_bad_arguments(make_problem):
    problem = make_problem()
    x, weight, target, how = problem.x, problem.weight, problem.target, problem.how
    op = torch.ops.fuse_losses.linear_nll_sum
    with pytest.raises(TypeError, match="one dtype"):
        op(x, weight.double(), None, target, None, None, *how, 4, "float32")
    with pytest.raises(TypeError, match="int64 or int32"):
        op(x, weight, None, target.float(), None, None, *how, 4, "float32")
    with pytest.raises(ValueError, match="last size"):
        op(x[:, 1:], weight, None, target, None, None, *how, 4, "float32")
    with pytest.raises(ValueError, match="one per row"):
        op(x, weight, None, target[1:], None, None, *how, 4, "float32")
    with pytest.raises(ValueError, match="squash"):
        op(x, weight, None, target, None, None, "cube", *how[1:], 4, "float32")
    with pytest.raises(ValueError, match="accumulate"):
        op(x, weight, None, target, None, None, *how, 4, "double")
    with pytest.raises(ValueError, match="chunk_rows"):
        op(x, weight, None, target, None, None, *how, 0, "float32")
    for wrong in (127, -1, -99):
        bad = target.clone()
        bad[5] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            op(x, weight, None, bad, None, None, *how, 4, "float32")
