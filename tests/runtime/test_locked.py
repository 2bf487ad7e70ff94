"""Serving by a lock file: what it holds and nothing else; what it lacks is a clear error."""

import dataclasses
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autoflash
from autoflash.codegen.render import compiled_hash
from autoflash.errors import CompileError, LockError, MissingRecordError, UnsupportedError
from autoflash.kernels import KERNELS
from autoflash.kernels.access import ACCESSES
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Problem
from autoflash.runtime import dispatch, locked, missed
from autoflash.runtime.choose import Choice, choose
from autoflash.settings import settings
from autoflash.store import lock
from autoflash.store.record import LockEntry
from autoflash.store.store import Store
from autoflash.store.untrusted import write_text
from autoflash.target import named_target
from autoflash.tuning.versions import versions
from tests.runtime.test_choose import PROBLEM, TUNED, but, record

KERNEL = KERNELS["flash_fwd"]
H200, H100 = named_target("h200"), named_target("h100")
BWD = dataclasses.replace(PROBLEM, op="bwd")
FUSED, SPLIT = KERNELS["flash_bwd_ws"], KERNELS["flash_bwd_split"]


def entry(*access, problem=PROBLEM, kernel=KERNEL, config=TUNED, **changes):
    fields = {
        "problem": problem, "target": H200, "kernel": kernel.name, "config": config, "how": "tuned",
        "access": tuple(sorted(access or ACCESSES[problem.op])),
        "source_hash": compiled_hash(kernel, problem, config),
    }  # fmt: skip
    return LockEntry(**{**fields, **changes})


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """Writes a lock of entries, and serves from it."""
    path = tmp_path / "auto flash.lock"

    def write(*entries, **changes):
        write_text(path, lock.dump(entries, versions() | changes))
        locked._read.cache_clear()
        monkeypatch.setenv("AUTOFLASH_LOCK", str(path))
        return path

    return write


def test_what_is_locked_serves_and_says_so(locks):
    path = locks(entry())
    choice = choose(PROBLEM, H200, ALIGNED)
    assert (choice.kernel, choice.config, choice.how, choice.layer) == (
        KERNEL, TUNED, "locked", "lock",
    )  # fmt: skip
    assert choice.why == f"locked as tuned by {path} ({lock.load(path).digest[:12]})"
    assert (choice.record, choice.tunable) == (None, False)
    # Whatever falls into the bucket, and wherever the tensors lie.
    same = dataclasses.replace(PROBLEM, batch=1, heads=32, kv_heads=8, seqlen_q=1025)
    assert choose(same, H200, Access(aligned=False, tma=False)).config == TUNED


def test_a_better_record_changes_nothing(locks):
    Store(settings().db_path).add_record(record(but(TUNED, num_stages=3), ms=0.01))
    assert choose(PROBLEM, H200, ALIGNED).config == but(TUNED, num_stages=3)
    locks(entry())
    assert choose(PROBLEM, H200, ALIGNED).config == TUNED


def test_the_store_is_not_even_looked_at(locks, monkeypatch, caplog):
    settings().db_path.mkdir(parents=True)
    monkeypatch.setattr("autoflash.store.layers.Layers.__init__", None)
    locks(entry())
    assert choose(PROBLEM, H200, ALIGNED).how == "locked"
    with pytest.raises(MissingRecordError):
        choose(dataclasses.replace(PROBLEM, seqlen_k=8192), H200, ALIGNED)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_is_missing_is_named_with_the_command_that_adds_it(locks):
    path = locks(entry("tma"))
    other = dataclasses.replace(PROBLEM, seqlen_k=8192)
    with pytest.raises(MissingRecordError) as caught:
        choose(other, H200, ALIGNED)
    assert str(caught.value) == (
        f"{path} has no entry for fwd bfloat16 b2 h16/4 s2000x8192 d128 causal on NVIDIA H200 "
        f"(tensors: tma): run `autoflash lock --add '{path}' --batch 2 --heads 16 --kv-heads 4 "
        "--seqlen-q 2000 --seqlen-k 8192 --head-dim 128 --head-dim-v 128 --dtype bfloat16 "
        "--causal` there, or unset AUTOFLASH_LOCK"
    )
    for problem, target, access, told in (
        (PROBLEM, H100, ALIGNED, "on NVIDIA H100 80GB HBM3 (tensors: tma)"),
        (PROBLEM, H200, Access(aligned=True, tma=False), "on NVIDIA H200 (tensors: aligned)"),
        (BWD, H200, ALIGNED, "has no entry for bwd bfloat16 b2"),
        (dataclasses.replace(PROBLEM, dtype="float16"), H200, ALIGNED, "fwd float16"),
    ):
        with pytest.raises(MissingRecordError) as caught:
            choose(problem, target, access)
        assert told in str(caught.value)


def test_gradients_that_repeat_have_an_entry_of_their_own(locks):
    once, again = (
        [n for n, a in ACCESSES["bwd"].items() if a.tma and a.whole and a.repeatable == repeatable]
        for repeatable in (False, True)
    )
    fused = entry(*once, problem=BWD, kernel=FUSED, config=FUSED.default(BWD, H200))
    split = entry(*again, problem=BWD, kernel=SPLIT, config=SPLIT.default(BWD, H200))
    locks(fused, split)
    assert choose(BWD, H200, ALIGNED).kernel is FUSED
    assert choose(BWD, H200, dataclasses.replace(ALIGNED, repeatable=True)).kernel is SPLIT
    with pytest.raises(MissingRecordError, match=r"\(tensors: tma part\)"):
        choose(BWD, H200, dataclasses.replace(ALIGNED, whole=False))


def test_torch_does_not_stand_in_for_a_backward_that_no_kernel_serves(locks):
    locks(entry())
    for problem in (
        dataclasses.replace(BWD, dtype="float32"),
        dataclasses.replace(PROBLEM, dtype="float32"),
    ):
        with pytest.raises(
            MissingRecordError, match="has no entry for it: no kernel serves"
        ) as caught:
            choose(problem, H200, ALIGNED)
        # ops.py would hand an UnsupportedError's call to torch.
        assert not isinstance(caught.value, UnsupportedError)


# --- what has changed since


def test_another_source_is_an_error(locks):
    path = locks(entry(source_hash="0123456789abcdef"), autoflash="0.0.9")
    with pytest.raises(LockError) as caught:
        choose(PROBLEM, H200, ALIGNED)
    assert str(caught.value) == (
        f"{path}: flash_fwd for {PROBLEM.label()} on NVIDIA H200: "
        f"autoflash {autoflash.__version__} here generates source "
        f"{entry().source_hash}, and autoflash 0.0.9 locked 0123456789abcdef: install that, "
        "or lock again (`autoflash lock`)"
    )


def test_a_changed_template_is_seen(locks, monkeypatch):
    locks(entry())
    assert choose(PROBLEM, H200, ALIGNED).how == "locked"
    monkeypatch.setattr("autoflash.codegen.render._kernel_hash", lambda text: "another")
    with pytest.raises(LockError, match="generates source"):
        choose(PROBLEM, H200, ALIGNED)


def test_an_older_autoflash_with_the_same_source_is_none(locks):
    locks(entry(), autoflash="0.0.9", torch="1.0", cuda="9", driver="1")
    assert choose(PROBLEM, H200, ALIGNED).how == "locked"


def test_another_triton_is_an_error(locks):
    path = locks(entry(), triton="3.0.0")
    with pytest.raises(
        LockError, match=r"was locked with triton 3\.0\.0, and this is triton "
    ) as caught:
        choose(PROBLEM, H200, ALIGNED)
    assert str(path) in str(caught.value)


def test_a_config_that_can_not_run_this_very_problem_is_an_error(locks):
    large = but(TUNED, BLOCK_N=128)
    short = dataclasses.replace(PROBLEM, seqlen_k=40)
    locks(entry(problem=short, config=large))
    with pytest.raises(LockError, match=r"locked for .* can't run it: keys: BLOCK_N=128 is more"):
        choose(short, H200, ALIGNED)


@pytest.mark.parametrize("text", ["", "{}", "\0" * 99, "SQLite format 3\0"])
def test_a_lock_that_is_none_is_an_error(locks, text):
    path = locks(entry())
    path.write_text(text)
    with pytest.raises(LockError, match="not an autoflash-lock file"):
        choose(PROBLEM, H200, ALIGNED)
    path.unlink()
    with pytest.raises(LockError, match=r"flash\.lock: can't be read"):
        choose(PROBLEM, H200, ALIGNED)


def test_the_file_is_read_once(locks):
    path = locks(entry())
    assert choose(PROBLEM, H200, ALIGNED).config == TUNED
    path.write_text("gone")
    assert choose(PROBLEM, H200, ALIGNED).config == TUNED


def test_a_world_writable_lock_is_told_of_once(locks, caplog):
    path = locks(entry())
    path.chmod(0o666)
    for _ in range(3):
        choose(PROBLEM, H200, ALIGNED)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "the file is world-writable" in warning


# --- on the way to a launch


@pytest.mark.parametrize("variable", [("AUTOFLASH_LOCK", "x.lock"), ("AUTOFLASH_MODE", "lock")])
def test_in_lock_mode_what_does_not_build_is_an_error(monkeypatch, variable):
    choice = Choice(kernel=KERNEL, config=TUNED, how="locked", layer="lock", why="so")
    monkeypatch.setenv(*variable)
    monkeypatch.setattr(dispatch, "choose", lambda *given: choice)
    built = []

    def build(choice, *given):
        built.append(choice)
        raise CompileError("too large")

    monkeypatch.setattr(dispatch, "_launcher", build)
    with pytest.raises(CompileError, match="too large"):
        dispatch.launcher_for(PROBLEM, H200, ALIGNED, 0)
    assert built == [choice]


def test_a_locked_call_is_not_a_missed_one(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", "1")

    def run(stream, addresses):
        raise AssertionError

    choice = Choice(kernel=KERNEL, config=TUNED, how="locked", layer="lock", why="so")
    assert missed.counted(run, choice, PROBLEM, H200) is run


def test_compiling_and_faking_ask_nothing_of_the_lock(monkeypatch, tmp_path):
    """A trace launches nothing; and the CPU has no kernels that could be locked."""
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    expected = autoflash.attention(q, k, v, causal=True)
    monkeypatch.setenv("AUTOFLASH_LOCK", str(tmp_path / "none.lock"))
    torch._dynamo.reset()
    run = torch.compile(autoflash.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q, k, v, causal=True), expected)
    ops = torch.ops.autoflash
    with FakeTensorMode():
        # torch's autograd wants a real GPU: the gradients' op is asked by itself.
        q, k, v = (torch.empty(1, 2, 5, 16, device="cuda", dtype=torch.float16) for _ in range(3))
        out, lse = autoflash.attention(q, k, v, causal=True, return_lse=True)
        grads = ops.attention_bwd(
            out, None, q, k, v, out, lse, 0.25, True, False, False, True, True
        )
    assert (out.device.type, out.shape, lse.shape) == ("cuda", q.shape, (1, 2, 5))
    assert [grad.shape for grad in grads] == [q.shape] * 3
    torch._dynamo.reset()


def test_problems_of_a_bucket_share_their_source():
    for kernel in KERNELS.values():
        fp8 = {"kv_dtype": "float8_e4m3fn", "scales": "block"} if kernel.fp8 else {}
        base = dataclasses.replace(PROBLEM, op=kernel.op, **fp8)
        others = [
            Problem(**{**base.as_dict(), "batch": b, "heads": h, "kv_heads": h // 4,
                       "seqlen_q": q, "seqlen_k": k})
            for b, h in ((1, 32), (4, 8), (5, 4)) for q, k in ((2048, 4096), (1025, 2049))
        ]  # fmt: skip
        for config in kernel.defaults(base, H200):
            hashes = {compiled_hash(kernel, p, config) for p in (base, *others)}
            assert len(hashes) == 1, kernel.name


def test_the_hash_is_of_all_that_is_compiled():
    """Each config that the compiler is given something else for has another hash."""
    configs = [TUNED, but(TUNED, num_warps=8), but(TUNED, num_stages=3), but(TUNED, BLOCK_N=64),
               but(TUNED, DIAGONAL_FIRST=False), but(TUNED, maxnreg=128)]  # fmt: skip
    assert len({compiled_hash(KERNEL, PROBLEM, config) for config in configs}) == len(configs)
    wider = dataclasses.replace(PROBLEM, head_dim=64, head_dim_v=64)
    for other in (dataclasses.replace(PROBLEM, causal=False), wider):
        assert compiled_hash(KERNEL, other, TUNED) != compiled_hash(KERNEL, PROBLEM, TUNED)
