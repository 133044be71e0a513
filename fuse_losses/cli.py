"""The `fuse-losses` command."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

try:
    import click
except ModuleNotFoundError as error:
    raise SystemExit("fuse-losses needs more packages: pip install 'fuse-losses[demo,bench]'") from error

import fuse_losses


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(fuse_losses.__version__)
def main() -> None:
    """Fuse language-model losses: the [tokens, vocab] logits never exist.

    In your own program it is a torch.compile backend: torch.compile(model, backend="fuse_losses").
    """


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small Llama under eager, inductor and fuse_losses, and compare them.

    It is examples/train_lm.py; `fuse-losses demo --help` prints that script's options.
    """
    script = runpy.run_path(str(_demo_script()))
    sys.exit(script["main"](list(arguments)))


def _demo_script() -> Path:
    """In the wheel the example lies in the package, in a checkout beside it."""
    package = Path(__file__).parent
    for folder in (package, package.parent):
        script = folder / "examples" / "train_lm.py"
        if script.exists():
            return script
    raise click.ClickException("examples/train_lm.py is neither in the package nor beside it")


@main.command()
@click.option(
    "--workload",
    default="llama-1b",
    show_default=True,
    help="One of: llama-1b, linear-ce, megatron-ce, ce, tvd, jsd, linear-jsd; index: the last five.",
)
@click.option("--tokens", type=int, help="Tokens of a step; the workload's own number when left out.")
@click.option("--sizes", help="Of the workload's sizes only these, separated by commas.")
@click.option("--repeats", type=int, help="Timed repeats, after the warm-up; the workload's own when left out.")
@click.option("--peers", help="Separated by semicolons; all of them when left out.")
@click.option("--out", type=click.Path(path_type=Path), help="The record, JSON, written after each row.")
@click.option("--commit", help="The commit that is measured, where the tree carries no git.")
@click.option("--smoke", is_flag=True, help="Toy sizes, in seconds, on any machine: does it run at all?")
def bench(
    workload: str,
    tokens: int | None,
    sizes: str | None,
    repeats: int | None,
    peers: str | None,
    out: Path | None,
    commit: str | None,
    smoke: bool,
) -> None:
    """Measure fuse_losses and its peers in one process: time, peak memory, loss, distance from the floor."""
    from fuse_losses.bench import run

    names = tuple(peers.split(";")) if peers else None
    try:
        only = tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError as error:
        raise click.BadParameter("whole numbers, separated by commas", param_hint="--sizes") from error
    try:
        run.run(workload, tokens, repeats, names, smoke, commit, sizes=only, out=out)
    except run.BenchError as error:
        raise click.ClickException(str(error)) from error
    if out:
        click.echo(f"record: {out}")


if __name__ == "__main__":
    main()
