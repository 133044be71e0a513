"""How many rows of logits live at a time."""

_MIB = 1 << 20
# target bytes of one [rows, vocab] buffer, and the fewest rows worth a matrix product, by device type
_CPU = (8 * _MIB, 32)
_ACCELERATOR = (512 * _MIB, 1024)
_MOST_ROWS = 8192


def default_chunk_rows(vocab: int, itemsize: int, device_type: str) -> int:
    """Rows per chunk: a power of two, at most 8192, whose buffer fits the device's target unless the floor is larger.

    On a CPU the buffer should stay in cache (8 MiB, at least 32 rows). On an accelerator a chunk below about
    a thousand rows leaves the matrix units idle and re-reads the weight too often (512 MiB, at least 1024
    rows).
    """
    target, fewest = _CPU if device_type == "cpu" else _ACCELERATOR
    fitting = max(1, target // max(1, vocab * itemsize))
    return min(_MOST_ROWS, max(fewest, 1 << (fitting.bit_length() - 1)))
