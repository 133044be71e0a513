"""A Llama teaches a smaller one, three times - eager, inductor, fuse_losses - and the runs are compared.

The loss is written as it is in any training script: the divergence from the teacher's softened distribution beside the
cross entropy of the text. Teacher and student have hidden sizes of their own and so two heads; each would make
[tokens, vocab] logits. Text, tokenizer and the rest of the run are those of train_lm.py.

    python examples/distill.py             # a minute or two on two cores
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from train_lm import IGNORE, LossOf, Setup, arguments, compare, conclude, language_model, llama, read_text
from transformers import LlamaConfig, LlamaForCausalLM

TEMPERATURE = 2.0
OF_TEACHER = 0.5  # the weight of the divergence; the rest is the cross entropy's


@dataclass(frozen=True)
class Distillation(Setup):
    """`config` is the student's. The teacher learns the text first, by itself, for `lessons` steps."""

    teacher: LlamaConfig = field(kw_only=True)
    lessons: int = 12


def choose_setup(tiny: bool) -> Distillation:
    if tiny:
        student, teacher = llama(32, 64, 1, 2, 1, 8_192), llama(64, 128, 1, 2, 1, 8_192)
        name = "A toy Llama and its teacher"
        return Distillation(name, student, length=128, vocab=8_192, text_mb=2, teacher=teacher, lessons=2)
    if not torch.cuda.is_available():
        student, teacher = llama(128, 384, 1, 4, 2, 16_000), llama(256, 768, 2, 4, 2, 16_000)
        name = "A small Llama and its teacher"
        return Distillation(name, student, length=256, vocab=16_000, text_mb=6, teacher=teacher)
    return Distillation(
        "A Llama and its teacher",
        llama(1024, 4096, 8, 16, 8, 128_256),
        batch=4,
        length=2048,
        rate=1e-4,
        device="cuda",
        dtype=torch.bfloat16,
        tolerance=1e-2,
        teacher=llama(2048, 8192, 8, 32, 8, 128_256),
    )


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hinton's loss: logits [batch, length, V] of both, labels [batch, length] of which some are IGNORE."""
    student, teacher, labels = student[:, :-1].float(), teacher[:, :-1].float(), labels[:, 1:]
    counts = labels != IGNORE
    soft_student = F.log_softmax(student / TEMPERATURE, dim=-1)
    soft_teacher = F.log_softmax(teacher / TEMPERATURE, dim=-1)
    apart = F.kl_div(soft_student, soft_teacher, reduction="none", log_target=True).sum(-1)
    soft = (apart * counts).sum() / counts.sum() * TEMPERATURE**2
    hard = F.cross_entropy(student.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    return OF_TEACHER * soft + (1 - OF_TEACHER) * hard


def student_of(teacher: LlamaForCausalLM, setup: Setup) -> tuple[torch.nn.Module, LossOf]:
    student, _ = language_model(setup)

    def loss_of(labels: torch.Tensor) -> torch.Tensor:
        ids = labels.clamp(min=0)
        with torch.no_grad():
            expected = teacher(input_ids=ids).logits
        return distillation_loss(student(input_ids=ids).logits, expected, labels)

    return student, loss_of


def taught(setup: Distillation, batches: list[torch.Tensor]) -> tuple[LlamaForCausalLM, float]:
    """The teacher, trained on the text, and its last loss."""
    torch.manual_seed(1)
    teacher, loss_of = language_model(replace(setup, config=setup.teacher))
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=setup.rate, fused=True)
    loss = torch.zeros(())
    for labels in batches:
        loss = loss_of(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher.eval().requires_grad_(False), loss.item()


def main(argv: list[str] | None = None) -> int:
    args = arguments("distill.py", __doc__, steps=5).parse_args(argv)
    setup, console = choose_setup(args.tiny), Console()
    batches = read_text(setup, setup.lessons + args.steps + 1, console)
    with console.status("Training the teacher"):
        teacher, loss = taught(setup, batches[: setup.lessons])
    console.print(
        f"The teacher (hidden size {setup.teacher.hidden_size}) has a loss of {loss:.2f} after {setup.lessons} steps; "
        f"the student (hidden size {setup.config.hidden_size}) learns from it and from text that is new to both.",
        highlight=False,
    )
    runs = compare(setup, partial(student_of, teacher), batches[setup.lessons :], console)
    return conclude(runs, setup, console)


if __name__ == "__main__":
    raise SystemExit(main())
