"""`python -m tests.sweep [class ...]`: all classes (or those named), one process each, into docs/models.json."""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from tests.sweep import RECORD, one, shrink

LIMIT = 40.0  # seconds for a class
MEMORY = 4 << 30  # bytes; a model that needs more was not made small


def _child(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    pipe.send(one.sweep_one(name))


def limited(name: str) -> dict[str, Any]:
    """The class in a process of its own, so that a crash or a hang is its own too."""
    context = multiprocessing.get_context("fork")  # what is imported here need not be imported again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            return {"outcome": "too_slow", "reason": f"more than {LIMIT:.0f} s"}
        return receiver.recv()
    except EOFError:
        return {"outcome": "crashed", "reason": "the process ended"}
    finally:
        process.kill()
        process.join()


def main(names: list[str]) -> None:
    record = json.loads(RECORD.read_text("utf-8")) if names and RECORD.exists() else {"classes": {}}
    for name in names or shrink.classes():
        start = time.monotonic()
        record["classes"][name] = found = limited(name)
        print(
            f"{name}: {found['outcome']} {found.get('reason') or found.get('declined') or ''}"
            f" ({time.monotonic() - start:.1f} s)",
            flush=True,
        )
        record["versions"] = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
        record["classes"] = dict(sorted(record["classes"].items()))
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
