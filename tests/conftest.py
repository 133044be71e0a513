"""What every test shares: threads, hypothesis profiles, the `gpu` marker and a fresh Dynamo."""

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the workers of pytest-xdist are the parallelism

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # a GPU machine that runs `make gpu` from the checkout may lack it
    pass
else:
    # the same examples each time: over random ones, rounding is now and then out of luck (bfloat16, few elements)
    hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
    hypothesis.settings.register_profile("nightly", max_examples=500, deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles for itself, from the same seed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
