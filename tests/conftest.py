"""Settings that every test process shares."""

import functools
import gc
import importlib.metadata
import logging
import os
import sys

import hypothesis
import pytest

gc.disable()  # until all is imported: none of it is garbage

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may need a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread costs more than it brings

# where DeepSpeed is installed, Accelerate parses its metadata whenever it unwraps a model: a tenth of a tiny run.
# The log of a run begins with the versions of nine libraries
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.version = functools.cache(importlib.metadata.version)


# the same examples everywhere
SAME = {"deadline": None, "derandomize": True, "print_blob": True, "database": None}
hypothesis.settings.register_profile("some", max_examples=40, **SAME)
hypothesis.settings.register_profile("many", max_examples=200, **SAME)


def pytest_configure(config):
    hypothesis.settings.load_profile("many" if config.getoption("--full") else "some")
    if not all("tests/gpu" in path for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # expected values are those of a CPU, and processes are forked


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full matrix as well (make test-full)")
    parser.addoption("--kills", type=int, help="processes that tests/crash kills (3, with --full)")


# the files that take longest, each on one worker, come first, so that none of them is left to the end
LONGEST = (
    "invariance/test_matrix",
    "invariance/test_resume",
    "recipes/test_recipe",
    "invariance/test_sequence_parallel",
    "invariance/test_several_rows",
    "unit/tools/test_gpu_measure",
    "invariance/test_tools",
    "distributed/test_engines",
    "invariance/test_bitwise",
    "invariance/test_ahead",
    "distributed/test_sequence_parallel",
    "invariance/test_half_precision",
    "distributed/test_two_processes",
    "distributed/test_collectives",
    "simulated/test_simulated_gpu",
    "distributed/test_newer_trl",
    "distributed/test_trail",
    "distributed/test_out_of_memory",
    "invariance/test_reward_workers",
    "packaging/test_wheel",
)


def pytest_collection_modifyitems(config, items):
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))
    if config.getoption("--full"):
        return
    # by the marker: a folder of that name is among an item's keywords too
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def freeze():
    """Accelerate collects garbage whenever a run begins; what is imported by now is none, and takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    collected = yield
    gc.enable()
    freeze()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Launches are forked from what has been imported by now, if they need nearly all of it."""
    if session.testscollected and "grpo_ext.trainer" in sys.modules and "tests.support.forks" in sys.modules:
        sys.modules["tests.support.forks"].fork_server()


@pytest.fixture(autouse=True, scope="module")
def frozen():
    yield
    freeze()  # models are imported when a test first builds one


@pytest.fixture(scope="session")
def lasting(request, tmp_path_factory):
    """From a name to a folder that the next run of the tests finds again, where pytest has its cache."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp if cache is None else cache.mkdir


@pytest.fixture(autouse=True, scope="session")
def stock_results(lasting, request):
    from tests.support import kept, selection, spared  # import torch, which takes seconds where nothing else needs it

    kept.folder = lasting("stock")
    if request.config.getoption("--full"):
        os.environ[selection.FULL] = "1"
    else:  # with --full trainers of this process compare as those of users do; launches remember in any case
        spared.remember_comparisons()
    spared.spare()


@pytest.fixture(autouse=True)
def as_loud_as_before():
    """A command that ran in this process keeps the other libraries quiet: later tests read what they log."""
    loggers = [
        logging.getLogger(name) for name in ("grpo_ext", "trl", "transformers", "datasets", "accelerate", "peft")
    ]
    levels = [logger.level for logger in loggers]
    from accelerate.logging import MultiProcessAdapter  # not before importlib.metadata is cached

    MultiProcessAdapter.warning_once.cache_clear()  # what an earlier test was told once
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)
