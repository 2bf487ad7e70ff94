"""What dispatch does when a config does not build; no GPU is needed for that."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from autoflash.errors import AutoFlashError, CompileError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Problem
from autoflash.runtime import dispatch
from autoflash.runtime.choose import Choice
from autoflash.target import named_target

KERNEL = KERNELS["flash_fwd"]
TARGET = named_target("a100")
PROBLEM = Problem.parse({"batch": 1, "heads": 2, "seqlen": 1024, "head_dim": 128})


@pytest.fixture
def tried(monkeypatch):
    """Configs that were built, the first of which (as many as ``tried.bad``) don't."""

    class Tried(list):
        bad = 0

    tried = Tried()

    def build(choice, problem, target, access, device):
        tried.append(choice)
        if len(tried) <= tried.bad:
            raise CompileError(f"number {len(tried)} is too large")
        return choice

    monkeypatch.setattr(dispatch, "_launcher", build)
    return tried


def test_a_default_that_does_not_build_gives_way_to_a_more_modest_one(tried, caplog):
    tried.bad = 3
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        launcher, choice = dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)
    assert launcher is choice
    # The first default is tried once as the choice and once as a default.
    assert launcher.config == KERNEL.defaults(PROBLEM, TARGET)[2]
    assert launcher.why == "the first choice does not build: number 1 is too large"
    (warning,) = caplog.records
    assert "trying the defaults: number 1 is too large" in warning.getMessage()


def test_when_nothing_builds_the_last_reason_is_raised(tried):
    tried.bad = 99
    with pytest.raises(CompileError, match=f"number {1 + len(KERNEL.defaults(PROBLEM, TARGET))} "):
        dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)


def test_defaults_get_more_modest(tried):
    configs = KERNEL.defaults(PROBLEM, TARGET)
    sizes = [c["BLOCK_M"] * c["BLOCK_N"] * c["num_stages"] for c in configs]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(configs)) == len(configs) > 2


def test_when_a_kernel_does_not_build_at_all_the_next_one_serves(tried, caplog):
    hopper, target = KERNELS["flash_fwd_ws"], named_target("h100")
    problem = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 128})
    own = hopper.defaults(problem, target)
    # The first one is tried as the choice and again as a default.
    tried.bad = 1 + len(own)
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        launcher, _ = dispatch.launcher_for(problem, target, ALIGNED, 0)
    assert [c.config for c in tried[:-1]] == [own[0], *own]
    assert {c.kernel for c in tried[:-1]} == {hopper}
    assert (launcher.kernel, launcher.config) == (KERNEL, KERNEL.default(problem, target))


def test_a_record_that_does_not_build_falls_back_within_its_kernel_first(tried, monkeypatch):
    target = named_target("h100")
    problem = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 128})
    config = KERNEL.default(problem, target)
    record = Choice(kernel=KERNEL, config=config, how="tuned", layer="user", why="so")
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: record)
    assert dispatch.launcher_for(problem, target, ALIGNED, 0) == (record, record)
    tried.bad = len(tried) + 2
    launcher, choice = dispatch.launcher_for(problem, target, ALIGNED, 0)
    assert launcher is choice
    # What serves then is not what was tuned.
    assert (choice.kernel, choice.how) == (KERNEL, "default")


# --- while a CUDA graph is captured


@pytest.fixture
def capturing(monkeypatch):
    """Puts launchers of these configs among the loaded ones, and captures."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(dispatch, "_launchers", {})

    def load(*configs, kernel=KERNEL, problem=PROBLEM, access=ALIGNED, device=0):
        for config in configs:
            key = (kernel.name, config, *dispatch._shared(problem, access, device))
            dispatch._launchers[key] = SimpleNamespace(kernel=kernel, config=config)

    return load


def test_a_choice_that_is_loaded_serves_a_capture(capturing):
    default = KERNEL.default(PROBLEM, TARGET)
    capturing(default)
    launcher, choice = dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)
    assert launcher.config == choice.config == default
    assert choice.passing is False


def test_what_another_problem_has_loaded_stands_in_for_a_capture(capturing, caplog):
    _, second, third, *_ = KERNEL.defaults(PROBLEM, TARGET)
    capturing(third, second)
    launcher, choice = dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)

    def ms(config):
        blocks = KERNEL.estimate_blocks_per_sm(PROBLEM, config, TARGET)
        return KERNEL.estimate_ms(PROBLEM, config, TARGET, blocks)

    assert launcher.config == choice.config == min((third, second), key=ms)
    assert (choice.how, choice.passing) == ("default", True)
    assert "loaded already, while a CUDA graph is captured" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"problem": Problem.parse({"batch": 1, "heads": 2, "seqlen": 1024, "head_dim": 64})},
        {"access": Access(aligned=False, tma=False)},
        {"device": 1},
        {"kernel": KERNELS["flash_bwd"]},
    ],
    ids=["nothing", "another code", "unaligned", "another device", "another op"],
)
def test_a_capture_with_nothing_that_fits_is_one_clear_error(capturing, changes):
    if changes:
        kernel = changes.get("kernel", KERNEL)
        problem = dataclasses.replace(PROBLEM, op=kernel.op)
        capturing(kernel.default(problem, TARGET), **changes)
    with pytest.raises(AutoFlashError, match="call it once before the capture"):
        dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)


def test_lock_mode_has_no_stand_in(capturing, monkeypatch):
    capturing(KERNEL.defaults(PROBLEM, TARGET)[1])
    monkeypatch.setattr(dispatch, "choose", lambda *given: dispatch.default_choices(*given)[0])
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    with pytest.raises(AutoFlashError, match="call it once before the capture"):
        dispatch.launcher_for(PROBLEM, TARGET, ALIGNED, 0)
