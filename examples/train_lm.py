"""Train an unmodified Llama on real text three times - eager, inductor, fuse_losses - and compare the runs.

The text is this machine's Python standard library, its tokenizer is trained here, the weights are random:
nothing is downloaded. Every run starts from the same weights and sees the same batches. The exit code is 0 if
a head was fused and the loss equals eager's at every step, within the tolerance that is printed.

    python examples/train_lm.py            # a minute or two on two cores; a 1B model where there is a GPU
"""

from __future__ import annotations

import argparse
import random
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import fuse_losses
from fuse_losses.bench.measure import MIB, MemoryTrace, trace_memory

BACKENDS = ("eager", "inductor", "fuse_losses")
OURS = "fuse_losses"
IGNORE = -100  # the label of padding, as everywhere in transformers


@dataclass(frozen=True)
class Setup:
    """What is trained, on how much text, and how far two losses may be apart (relative)."""

    name: str
    config: LlamaConfig
    batch: int = 2
    length: int = 512
    vocab: int = 32_000  # of the tokenizer that is trained here
    text_mb: int = 12
    rate: float = 1e-3
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4
    checkpointing: bool = False  # of the layers' activations, as long sequences are trained

    @property
    def logits_mib(self) -> float:
        return self.batch * self.length * self.config.vocab_size * self.dtype.itemsize / MIB


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
        use_cache=False,
    )


def choose_setup(tiny: bool) -> Setup:
    if tiny:
        return Setup("toy Llama", llama(32, 64, 1, 2, 1, 8_192), length=128, vocab=8_192, text_mb=2)
    if not torch.cuda.is_available():
        return Setup("small Llama", llama(128, 384, 2, 4, 2, 32_000))
    return Setup(
        "1B Llama with gradient checkpointing",
        llama(2048, 8192, 16, 32, 8, 128_256),  # the shape of Llama-3.2-1B
        batch=4,
        length=4096,
        rate=1e-5,
        device="cuda",
        dtype=torch.bfloat16,
        tolerance=1e-2,
        checkpointing=True,
    )


def stdlib_texts(megabytes: int) -> list[str]:
    """Sources of the standard library in a fixed random order, about `megabytes` of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        texts.append(file.read_text("utf-8", errors="ignore"))
        size += len(texts[-1])
        if size > megabytes * 1_000_000:
            break
    return texts


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE. Where there is little text it has fewer tokens than asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_batches(tokenizer: Tokenizer, texts: list[str], setup: Setup, count: int) -> list[torch.Tensor]:
    """`count` batches of labels. A row is a stretch of one file; after the file's end it is IGNORE."""
    rows: list[torch.Tensor] = []
    for text in texts:
        stretches = torch.tensor(tokenizer.encode(text).ids, dtype=torch.int64).split(setup.length)
        rows += [row for row in stretches[:4] if len(row) > setup.length // 4]
    labels = torch.full((count, setup.batch, setup.length), IGNORE)
    for row, tokens in zip(labels.flatten(0, 1), rows, strict=False):
        row[: len(tokens)] = tokens
    return list(labels.to(setup.device))


@dataclass
class Run:
    """What one backend did: loss and time of each step, the memory over one more step, what was fused."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: MemoryTrace = field(default_factory=lambda: MemoryTrace([(0.0, 0)], 0))
    report: fuse_losses.Report | None = None

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[2:] or self.seconds)  # the first two compile and warm up

    def difference(self, other: Run) -> float:
        """The largest relative difference of a loss; NaN if any of them is."""
        a, b = torch.tensor([self.losses, other.losses], dtype=torch.float64)
        return ((a - b) / b).abs().max().item()


LossOf = Callable[[torch.Tensor], torch.Tensor]  # labels [batch, length] -> mean loss


def language_model(setup: Setup) -> tuple[LlamaForCausalLM, LossOf]:
    """The model that is trained, and its loss as users write it."""
    model = LlamaForCausalLM(setup.config).to(setup.device, setup.dtype)
    if setup.checkpointing:
        # transformers is renaming it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def loss_of(labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=labels.clamp(min=0), labels=labels).loss

    return model, loss_of


def train(
    backend: str,
    setup: Setup,
    learner: Callable[[Setup], tuple[torch.nn.Module, LossOf]],
    batches: list[torch.Tensor],
    tick: Callable[[], object],
) -> Run:
    """Train what `learner` makes on all batches but the last, which is the step whose memory is recorded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss_of = learner(setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.rate, fused=True)

    if backend != "eager":
        loss_of = torch.compile(loss_of, backend=backend)

    def step(labels: torch.Tensor) -> float:
        loss = loss_of(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    run = Run()
    for labels in batches[:-1]:
        start = time.perf_counter()
        run.losses.append(step(labels))
        run.seconds.append(time.perf_counter() - start)
        tick()
    run.memory = trace_memory(lambda: step(batches[-1]), setup.device)
    run.report = fuse_losses.last_report() if backend == OURS else None
    tick()
    return run


def results_table(runs: dict[str, Run], title: str) -> Table:
    table = Table("", title=title, title_style="bold", title_justify="left")
    for backend in runs:
        table.add_column(backend, justify="right", style="green" if backend == OURS else "")

    def row(name: str, cell: Callable[[Run], str], end_section: bool = False) -> None:
        table.add_row(name, *map(cell, runs.values()), end_section=end_section)

    eager = runs["eager"]
    for i in range(len(eager.losses)):
        row(f"loss at step {i + 1}", lambda run, i=i: f"{run.losses[i]:.6f}")
    row("largest difference from eager", lambda run: f"{run.difference(eager):.1e}", end_section=True)
    row("step time, ms", lambda run: f"{run.step_ms:,.0f}")
    row("peak memory of a step, MiB", lambda run: f"{run.memory.peak / MIB:,.0f}")
    row("largest allocation, MiB", lambda run: f"{run.memory.largest / MIB:,.0f}", end_section=True)
    row("loss heads fused", lambda run: str(len(run.report.fused)) if run.report else "")
    return table


def plot_memory(runs: dict[str, Run], setup: Setup, file: Path) -> None:
    """Memory over one step, a panel for each backend, all on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True)
    for panel, (backend, run) in zip(panels, runs.items(), strict=True):
        color = "#1a7f4b" if backend == OURS else "#8a8f98"
        ms, size = zip(*((t, b / MIB) for t, b in run.memory.points), strict=True)
        panel.fill_between(ms, size, step="post", color=color, alpha=0.25, linewidth=0)
        panel.step(ms, size, where="post", color=color, linewidth=1.2)
        panel.axhline(setup.logits_mib, color="#c0392b", linewidth=0.8, linestyle=(0, (4, 3)))
        title = f"{backend}: {run.memory.peak / MIB:,.0f} MiB"
        panel.set_title(title, color=color, fontweight="bold", loc="left")
        panel.set_xlabel("ms, under the profiler")
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("MiB above the step's start")
    across = panels[-1].get_yaxis_transform()  # x as a fraction of the panel, y in MiB
    note = "one [tokens, vocab] tensor"
    panels[-1].text(1, setup.logits_mib, note, transform=across, ha="right", va="bottom", size=8, color="#c0392b")
    figure.savefig(file, dpi=150)


def verdict(runs: dict[str, Run], setup: Setup) -> tuple[bool, str]:
    """Whether the demonstration holds, and a sentence that says what the numbers show."""
    eager, inductor, ours = (runs[backend] for backend in BACKENDS)
    apart = ours.difference(eager)
    if not apart <= setup.tolerance:
        return False, f"The losses differ: {apart:.1e} from eager's, the tolerance is {setup.tolerance:.0e}."
    if not (ours.report and ours.report.fused):
        return False, "No loss head was fused; the report above says why."
    memory = [run.memory.peak / ours.memory.peak for run in (eager, inductor)]
    speed = [run.step_ms / ours.step_ms for run in (eager, inductor)]
    return True, (
        f"The losses are equal at every step: {apart:.1e} apart, tolerance {setup.tolerance:.0e}. "
        f"At its peak a step needs {memory[0]:.1f}x less memory than under eager and {memory[1]:.1f}x less "
        f"than under inductor, at {speed[0]:.2f}x and {speed[1]:.2f}x their speed. Its largest allocation is "
        f"{ours.memory.largest / MIB:,.0f} MiB; one [tokens, vocab] tensor is {setup.logits_mib:,.0f} MiB."
    )


def arguments(name: str, about: str | None, steps: int = 8) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name, description=(about or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps for each backend (default {steps})")
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU, in seconds")
    return parser


def read_text(setup: Setup, count: int, console: Console) -> list[torch.Tensor]:
    """`count` batches of the standard library; what was read and is trained is printed."""
    with console.status("Training a tokenizer on the standard library"):
        texts = stdlib_texts(setup.text_mb)
        tokenizer = train_tokenizer(texts, setup.vocab)
        batches = make_batches(tokenizer, texts, setup, count)
    padding = sum((labels == IGNORE).sum().item() for labels in batches) / sum(map(torch.numel, batches))
    console.print(
        f"{setup.name} from transformers, unmodified, on {setup.device}, {setup.dtype}. Text: {len(texts)} "
        f"files of the standard library, {tokenizer.get_vocab_size():,} tokens in the vocabulary. "
        f"A batch: {setup.batch} x {setup.length} tokens, {padding:.0%} padding.",
        highlight=False,
    )
    return batches


def compare(
    setup: Setup,
    learner: Callable[[Setup], tuple[torch.nn.Module, LossOf]],
    batches: list[torch.Tensor],
    console: Console,
) -> dict[str, Run]:
    """Train under every backend; the table of results and the report are printed."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # the model is in bfloat16 there
    runs: dict[str, Run] = {}
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for backend in BACKENDS:
            task = progress.add_task(backend, total=len(batches))
            runs[backend] = train(backend, setup, learner, batches, lambda task=task: progress.advance(task))
    console.print(results_table(runs, f"{len(batches) - 1} training steps"))
    if report := runs[OURS].report:
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    return runs


def conclude(runs: dict[str, Run], setup: Setup, console: Console) -> int:
    """Print the verdict; 0 if the demonstration holds."""
    holds, sentence = verdict(runs, setup)
    console.print(sentence, style="bold" if holds else "bold red", markup=False, highlight=False)
    return 0 if holds else 1


def main(argv: list[str] | None = None) -> int:
    parser = arguments("fuse-losses demo", __doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-memory.png"), help="where the plot goes")
    args = parser.parse_args(argv)
    setup, console = choose_setup(args.tiny), Console()
    batches = read_text(setup, args.steps + 1, console)
    runs = compare(setup, language_model, batches, console)
    plot_memory(runs, setup, args.out)
    console.print(f"Memory over one step: {args.out.resolve()}", highlight=False, soft_wrap=True)
    return conclude(runs, setup, console)


if __name__ == "__main__":
    raise SystemExit(main())
