"""Graphs before and after, as text. `EXPECTTEST_ACCEPT=1 pytest tests/rewrite/test_graphs.py` writes what it finds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

from tests.capture import Capture, listing, operators
from tests.head.spellings import tensors
from tests.oracle import assert_as_eager


class Tail(nn.Module):
    """The end of a Hugging Face causal language model: what `ForCausalLMLoss` does, and logits beside the loss."""

    def __init__(self, softcap: float | None = None) -> None:
        super().__init__()
        self.lm_head = nn.Linear(6, 37, bias=False)
        self.softcap = softcap

    def forward(self, hidden, labels, num_items=None):
        logits = self.lm_head(hidden[:, slice(0, None), :])
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        reduction = "mean" if num_items is None else "sum"
        loss = F.cross_entropy(logits.float().view(-1, 37), shifted, ignore_index=-100, reduction=reduction)
        return (loss if num_items is None else loss / num_items), logits


def graphs(fn, *args, **how) -> tuple[str, str]:
    capture = Capture(chunk_rows=4)
    capture.compile(fn, fullgraph=True, **how)(*args)
    return listing(capture.before[0]), listing(capture.after[0])


HIDDEN, LABELS = torch.randn(2, 5, 6, requires_grad=True), torch.randint(0, 37, (2, 5))


class TestGraphs(TestCase):
    def test_causal_lm(self) -> None:
        before, after = graphs(Tail(), HIDDEN, LABELS)
        self.assertExpectedInline(
            before,
            """\
l_hidden_ = input
l_self_modules_lm_head_parameters_weight_ = input
l_labels_ = input
getitem = getitem(l_hidden_, (slice(None, None, None), slice(0, None, None), slice(None, None, None)))
logits = linear(getitem, l_self_modules_lm_head_parameters_weight_, None)
pad = pad(l_labels_, (0, 1), 'constant', -100)
getitem_1 = getitem(pad, (Ellipsis, slice(1, None, None)))
contiguous = contiguous(getitem_1)
shifted = view(contiguous, -1)
float_1 = float(logits)
view_1 = view(float_1, -1, 37)
loss = cross_entropy(view_1, shifted, ignore_index=-100, reduction='mean')
return (loss, logits)
""",
        )
        self.assertExpectedInline(
            after,
            """\
l_hidden_ = input
l_self_modules_lm_head_parameters_weight_ = input
l_labels_ = input
getitem = getitem(l_hidden_, (slice(None, None, None), slice(0, None, None), slice(None, None, None)))
logits = linear(getitem, l_self_modules_lm_head_parameters_weight_, None)
pad = pad(l_labels_, (0, 1), 'constant', -100)
getitem_1 = getitem(pad, (Ellipsis, slice(1, None, None)))
contiguous = contiguous(getitem_1)
shifted = view(contiguous, -1)
reshape_default = aten.reshape.default(getitem, [-1, 6])
reshape_default_1 = aten.reshape.default(reshape_default, [-1, 6])
reshape_default_2 = aten.reshape.default(shifted, [-1])
detach_default = aten.detach.default(logits)
reshape_default_3 = aten.reshape.default(detach_default, [-1, 37])
linear_nll_sum_default = fuse_losses.linear_nll_sum.default(reshape_default_1,
    l_self_modules_lm_head_parameters_weight_, None, reshape_default_2, None, reshape_default_3, 'identity',
    1.0, 1.0, -100, 4, 'float32')
ne_scalar = aten.ne.Scalar(reshape_default_2, -100)
sum_default = aten.sum.default(ne_scalar)
div_tensor = aten.div.Tensor(linear_nll_sum_default, sum_default)
return (div_tensor, logits)
""",
        )

    def test_causal_lm_with_softcap_and_count_in_bfloat16(self) -> None:
        _, after = graphs(Tail(30.0).bfloat16(), HIDDEN.bfloat16(), LABELS, torch.tensor(7.0))
        self.assertExpectedInline(
            after,
            """\
l_hidden_ = input
l_self_modules_lm_head_parameters_weight_ = input
l_labels_ = input
l_num_items_ = input
getitem = getitem(l_hidden_, (slice(None, None, None), slice(0, None, None), slice(None, None, None)))
logits = linear(getitem, l_self_modules_lm_head_parameters_weight_, None)
truediv = truediv(logits, 30.0)
tanh = tanh(truediv)
logits_1 = mul(tanh, 30.0)
pad = pad(l_labels_, (0, 1), 'constant', -100)
getitem_1 = getitem(pad, (Ellipsis, slice(1, None, None)))
contiguous = contiguous(getitem_1)
shifted = view(contiguous, -1)
reshape_default = aten.reshape.default(getitem, [-1, 6])
reshape_default_1 = aten.reshape.default(reshape_default, [-1, 6])
reshape_default_2 = aten.reshape.default(shifted, [-1])
detach_default = aten.detach.default(logits)
reshape_default_3 = aten.reshape.default(detach_default, [-1, 37])
linear_nll_sum_default = fuse_losses.linear_nll_sum.default(reshape_default_1,
    l_self_modules_lm_head_parameters_weight_, None, reshape_default_2, None, reshape_default_3, 'tanh',
    0.03333333333333333, 30.0, -100, 4, 'float32')
truediv_1 = truediv(linear_nll_sum_default, l_num_items_)
return (truediv_1, logits_1)
""",
        )

    def test_without_the_logits_nothing_of_their_size_is_left(self) -> None:
        _, after = graphs(lambda x, w, y: F.cross_entropy(F.linear(x, w).mT, y), HIDDEN, torch.randn(37, 6), LABELS)
        self.assertExpectedInline(
            after,
            """\
l_x_ = input
l_w_ = input
l_y_ = input
reshape_default = aten.reshape.default(l_x_, [2, 1, -1, 6])
reshape_default_1 = aten.reshape.default(reshape_default, [-1, 6])
view_default = aten.view.default(l_y_, [2, 1, -1])
reshape_default_2 = aten.reshape.default(view_default, [-1])
linear_nll_sum_default = fuse_losses.linear_nll_sum.default(reshape_default_1, l_w_, None, reshape_default_2,
    None, None, 'identity', 1.0, 1.0, -100, 4, 'float32')
ne_scalar = aten.ne.Scalar(reshape_default_2, -100)
sum_default = aten.sum.default(ne_scalar)
div_tensor = aten.div.Tensor(linear_nll_sum_default, sum_default)
return (div_tensor,)
""",
        )

    def test_log_probs_of_shifted_rows_at_a_temperature(self) -> None:
        def fn(x, w, y):
            z = F.linear(x, w)[:, :-1] / 0.7
            return z.gather(-1, y[:, 1:, None]).squeeze(-1) - z.logsumexp(-1)

        _, after = graphs(fn, HIDDEN, torch.randn(37, 6, requires_grad=True), LABELS)
        self.assertExpectedInline(
            after,
            """\
l_x_ = input
l_w_ = input
l_y_ = input
getitem_1 = getitem(l_y_, (slice(None, None, None), slice(1, None, None), None))
slice_tensor = aten.slice.Tensor(l_x_, 1, 0, -1, 1)
reshape_default = aten.reshape.default(slice_tensor, [-1, 6])
reshape_default_1 = aten.reshape.default(getitem_1, [-1])
linear_log_prob_default = fuse_losses.linear_log_prob.default(reshape_default, l_w_, None, reshape_default_1,
    None, 'identity', 1.0, 1.4285714285714286, -9223372036854775808, 4, 'float32')
getitem_2 = getitem(linear_log_prob_default, 0)
getitem_3 = getitem(linear_log_prob_default, 1)
add_tensor = aten.add.Tensor(getitem_2, getitem_3)
reshape_default_2 = aten.reshape.default(add_tensor, [2, 4, 1])
squeeze = squeeze(reshape_default_2, -1)
reshape_default_3 = aten.reshape.default(getitem_3, [2, 4])
sub = sub(squeeze, reshape_default_3)
return (sub,)
""",
        )

    def test_symbolic_shapes(self) -> None:
        def fn(x, w, y):
            z = F.linear(x, w)
            return F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1), reduction="none").view_as(y)

        _, after = graphs(fn, HIDDEN, torch.randn(37, 6), LABELS, dynamic=True)
        self.assertExpectedInline(
            after,
            """\
s77 = input
s27 = input
s53 = input
l_x_ = input
s15 = input
l_w_ = input
l_y_ = input
view_1 = view(l_y_, -1)
sym_size_int = aten.sym_size.int(l_x_, 2)
reshape_default = aten.reshape.default(l_x_, [-1, sym_size_int])
reshape_default_1 = aten.reshape.default(reshape_default, [-1, sym_size_int])
reshape_default_2 = aten.reshape.default(view_1, [-1])
linear_log_prob_default = fuse_losses.linear_log_prob.default(reshape_default_1, l_w_, None,
    reshape_default_2, None, 'identity', 1.0, 1.0, -100, 4, 'float32')
getitem = getitem(linear_log_prob_default, 0)
getitem_1 = getitem(linear_log_prob_default, 1)
neg_default = aten.neg.default(getitem)
reshape_default_3 = aten.reshape.default(neg_default, [-1])
view_as = view_as(reshape_default_3, l_y_)
return (view_as,)
""",
        )

    def test_what_is_not_fused_is_the_graph_that_came(self) -> None:
        before, after = graphs(lambda x, w: F.linear(x, w).log_softmax(-1), HIDDEN, torch.randn(37, 6))
        self.assertEqual(before, after)


def test_a_loop_over_sequences_is_one_operator_with_its_gather() -> None:
    """TRL's selective_log_softmax: logsumexp sequence by sequence, of logits whose targets are gathered at once."""

    def fn(x, w, c):
        z = F.linear(x, w)[:, :-1] / 0.7
        selected = z.gather(-1, c[:, 1:].unsqueeze(-1)).squeeze(-1)
        return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in z])

    named = tensors()
    args = [named["x"], named["w"], named["c"]]
    for dynamic in (None, True):
        capture = Capture()
        assert_as_eager(capture.compile(fn, dynamic=dynamic), fn, args)
        assert operators(capture.after[0]) == ["linear_log_prob"]
        torch._dynamo.reset()
