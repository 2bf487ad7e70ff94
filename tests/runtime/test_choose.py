"""Which record serves a problem, and what happens when none fits: nothing stops a model."""

import dataclasses
import logging

import pytest

from autoflash.errors import InvalidInputError, MissingRecordError, UnsupportedError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Bucket, Problem
from autoflash.runtime import choose as module
from autoflash.runtime.choose import choose, default_choices, is_tuned, tune_command
from autoflash.settings import settings
from autoflash.store.layers import Layers
from autoflash.store.record import Measurement, Provenance, TuningRecord
from autoflash.store.store import Store
from autoflash.target import named_target

KERNEL, HOPPER = KERNELS["flash_fwd"], KERNELS["flash_fwd_ws"]
H200, H100, A100 = map(named_target, ("h200", "h100", "a100"))
UNALIGNED = Access(aligned=False, tma=False)
EXPANDED = Access(aligned=True, tma=False)
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=2000, seqlen_k=4096, head_dim=128, head_dim_v=128,
    dtype="bfloat16", causal=True,
)  # fmt: skip
# Another than the default in every param.
TUNED = KERNEL.space.parse(
    {
        "BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "LOAD": "pointer",
        "GROUP_HEADS": 8, "DIAGONAL_FIRST": True, "maxnreg": 0,
    }
)  # fmt: skip
DEFAULT = KERNEL.default(PROBLEM, H200)
HOPPER_DEFAULT = HOPPER.default(PROBLEM, H200)


def but(config, **changes):
    return KERNEL.space.parse({**config, **changes})


def record(config=TUNED, *, problem=PROBLEM, target=H200, ms=1.25, kind="measured", day=1):
    return TuningRecord(
        problem=problem,
        target=target,
        kernel=KERNEL.name,
        config=config,
        measurement=Measurement(
            median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=40,
            method="cuda_graph" if kind == "measured" else "model", noisy=False,
        ),
        provenance=Provenance(created_at=f"2025-03-{day:02d}T12:30:00+00:00", origin="host-a"),
        kind=kind,
    )  # fmt: skip


@pytest.fixture
def store():
    return Store(settings().db_path)


def told(choice):
    return (choice.config, choice.how, choice.layer, choice.why)


def test_nothing_known():
    choice = choose(PROBLEM, H200, ALIGNED)
    assert told(choice) == (HOPPER_DEFAULT, "default", "kernel", "no record fits")
    assert choice.kernel is HOPPER
    assert choice.record is None
    # Looking made no file.
    assert not settings().db_path.exists()


def test_tuned(store):
    mine = record()
    store.add_record(mine)
    choice = choose(PROBLEM, H200, ALIGNED)
    assert told(choice) == (TUNED, "tuned", "user", "tuned on this target, 1.2500 ms")
    assert choice.record == mine
    # Whatever falls into the bucket.
    same = dataclasses.replace(PROBLEM, batch=1, heads=32, kv_heads=8, seqlen_q=1025)
    assert choose(same, H200, ALIGNED).how == "tuned"


def test_the_newest_stands(store):
    for day, stages in ((1, 2), (3, 3), (2, 4)):
        store.add_record(record(but(TUNED, num_stages=stages), day=day))
    assert choose(PROBLEM, H200, ALIGNED).config["num_stages"] == 3


def test_a_neighbour(store):
    store.add_record(record(problem=dataclasses.replace(PROBLEM, seqlen_k=16000)))
    near = record(but(TUNED, num_stages=3), problem=dataclasses.replace(PROBLEM, seqlen_k=8000))
    store.add_record(near)
    choice = choose(PROBLEM, H200, ALIGNED)
    assert told(choice) == (
        but(TUNED, num_stages=3),
        "neighbour",
        "user",
        "tuned for fwd bfloat16 bh32 group4 s2048x8192 d128v128 causal on NVIDIA H200",
    )
    assert choice.record == near


def test_a_sibling_of_the_arch_is_a_neighbour(store):
    store.add_record(record(target=H100))
    choice = choose(PROBLEM, H200, ALIGNED)
    assert told(choice)[:3] == (TUNED, "neighbour", "user")
    assert choice.why == f"tuned for {Bucket.of(PROBLEM).label()} on NVIDIA H100 80GB HBM3"
    assert choose(PROBLEM, A100, ALIGNED).how == "default"


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 64}, {"dtype": "float32"}, {"causal": False}, {"seqlen_k": 1 << 20}],
    ids=str,
)
def test_what_does_not_carry_over(store, change):
    config = but(TUNED, DIAGONAL_FIRST=False)
    store.add_record(record(config, problem=dataclasses.replace(PROBLEM, **change)))
    assert choose(PROBLEM, H200, ALIGNED).how == "default"


def test_predicted(store):
    store.add_record(record(kind="predicted"))
    choice = choose(PROBLEM, H200, ALIGNED)
    assert told(choice) == (
        TUNED, "predicted", "user", "ranked offline by the written model, never timed",
    )  # fmt: skip


def test_measured_goes_before_predicted(store):
    store.add_record(record(kind="predicted", day=9))
    store.add_record(record(but(TUNED, num_stages=3), day=1))
    assert choose(PROBLEM, H200, ALIGNED).config["num_stages"] == 3


# --- what the tensors allow


@pytest.mark.parametrize("access", [UNALIGNED, EXPANDED], ids=["unaligned", "expanded"])
def test_tma_gives_way_to_pointers(store, access):
    tma = but(TUNED, LOAD="tma")
    store.add_record(record(tma))
    assert told(choose(PROBLEM, H200, ALIGNED))[0] == tma
    choice = choose(PROBLEM, H200, access)
    assert choice.config["LOAD"] == "pointer"
    assert told(choice) == (
        KERNEL.adapt(tma, access),
        "tuned",
        "user",
        "tuned on this target, 1.2500 ms; its load path was changed, "
        "since these tensors are not aligned for TMA",
    )
    assert choice.record.config == tma


@pytest.mark.parametrize("access", [UNALIGNED, EXPANDED], ids=["unaligned", "expanded"])
def test_pointers_stay_as_they_are(store, access):
    store.add_record(record())
    assert choose(PROBLEM, H200, access) == choose(PROBLEM, H200, ALIGNED)


def test_the_default_is_adapted_too(monkeypatch):
    tma = but(DEFAULT, LOAD="tma")
    monkeypatch.setattr(type(KERNEL), "defaults", lambda self, problem, target: [tma])
    ours = [c for c in default_choices(PROBLEM, H200, ALIGNED, "so") if c.kernel is KERNEL]
    assert [c.config for c in ours] == [tma]
    (found,) = default_choices(PROBLEM, H200, UNALIGNED, "so")
    assert (found.config, found.how, found.why) == (KERNEL.adapt(tma, UNALIGNED), "default", "so")
    assert found.config["LOAD"] == "pointer"


# --- which kernel


def test_the_default_is_of_the_kernel_that_the_models_think_faster():
    for causal in (False, True):
        for dim in (64, 96, 128, 192, 256):
            for length in (1024, 4096, 16384):
                problem = dataclasses.replace(
                    PROBLEM, batch=16384 // length, heads=2048 // dim, kv_heads=2048 // dim,
                    seqlen_q=length, seqlen_k=length, head_dim=dim, head_dim_v=dim, causal=causal,
                )  # fmt: skip
                for target in (H100, H200):
                    assert choose(problem, target, ALIGNED).kernel is HOPPER, problem.label()
                for name in ("a100", "l40s", "b200", "rtx5090", "mi300x"):
                    assert choose(problem, named_target(name), ALIGNED).kernel is KERNEL


@pytest.mark.parametrize("access", [UNALIGNED, EXPANDED], ids=["unaligned", "expanded"])
def test_tensors_that_the_copy_engine_can_not_read_get_the_next_kernel(access):
    choice = choose(PROBLEM, H200, access)
    assert told(choice) == (
        KERNEL.adapt(DEFAULT, access), "default", "kernel", "no record fits",
    )  # fmt: skip
    assert choice.config["LOAD"] == "pointer"
    assert {c.kernel.name for c in default_choices(PROBLEM, H200, access)} == {KERNEL.name}


def test_dims_that_the_copy_engine_can_not_read_get_the_next_kernel():
    odd = dataclasses.replace(PROBLEM, head_dim=100)
    assert choose(odd, H200, ALIGNED).kernel is KERNEL


def test_defaults_go_kernel_by_kernel():
    names = [c.kernel.name for c in default_choices(PROBLEM, H200, ALIGNED)]
    hopper = len(HOPPER.defaults(PROBLEM, H200))
    assert names[:hopper] == [HOPPER.name] * hopper
    assert set(names[hopper:]) == {KERNEL.name}
    first = default_choices(PROBLEM, H200, ALIGNED, "so", first=KERNEL)
    assert first[0].config == DEFAULT
    assert {(c.kernel.name, c.config) for c in first} == {
        (c.kernel.name, c.config) for c in default_choices(PROBLEM, H200, ALIGNED)
    }


def test_when_no_kernel_can_load_the_tensors_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(type(KERNEL), "adapt", lambda self, config, access: None)
    with pytest.raises(UnsupportedError, match="make them contiguous"):
        choose(PROBLEM, H200, UNALIGNED)


def hopper_record(**changes):
    config = HOPPER.space.parse({**HOPPER_DEFAULT, "PING_PONG": "done", **changes})
    return dataclasses.replace(record(), kernel=HOPPER.name, config=config)


def test_a_record_of_either_kernel_serves(store):
    store.add_record(hopper_record())
    choice = choose(PROBLEM, H200, ALIGNED)
    assert (choice.kernel, choice.how) == (HOPPER, "tuned")
    assert choice.config == hopper_record().config
    store.add_record(record(day=2))
    assert choose(PROBLEM, H200, ALIGNED).kernel is KERNEL


@pytest.mark.parametrize("access", [UNALIGNED, EXPANDED], ids=["unaligned", "expanded"])
def test_a_record_whose_kernel_can_not_run_the_tensors_gives_way(store, access, caplog):
    store.add_record(hopper_record())
    with caplog.at_level(logging.INFO, logger="autoflash.runtime.choose"):
        choice = choose(PROBLEM, H200, access)
    assert (choice.kernel, choice.how) == (KERNEL, "default")
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.endswith("flash_fwd_ws can't load tensors that are not aligned for TMA")


def test_what_the_faster_kernel_can_not_run_gets_the_record_of_another(store):
    slower = record(ms=2.5)
    for one in (slower, hopper_record()):
        store.add_record(one)
    assert choose(PROBLEM, H200, ALIGNED).kernel is HOPPER
    choice = choose(PROBLEM, H200, UNALIGNED)
    assert (choice.kernel, choice.how, choice.record) == (KERNEL, "tuned", slower)


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        (dataclasses.replace(ALIGNED, repeatable=True), "can't compute gradients that repeat bit"),
        (dataclasses.replace(ALIGNED, whole=False), "can't compute some gradients alone"),
    ],
    ids=["repeatable", "parts"],
)
def test_gradients_that_the_faster_kernel_can_not_compute(store, access, reason, caplog):
    problem = dataclasses.replace(PROBLEM, op="bwd")
    fused, split = KERNELS["flash_bwd_ws"], KERNELS["flash_bwd_split"]

    def add(kernel, ms):
        config = kernel.default(problem, H200)
        base = record(problem=problem, ms=ms)
        store.add_record(dataclasses.replace(base, kernel=kernel.name, config=config))

    add(fused, 1.0)
    assert choose(problem, H200, ALIGNED).kernel is fused
    with caplog.at_level(logging.INFO, logger="autoflash.runtime.choose"):
        choice = choose(problem, H200, access)
    assert (choice.kernel, choice.how) == (split, "default")
    assert f"flash_bwd_ws {reason}" in caplog.text
    add(split, 1.2)
    assert choose(problem, H200, ALIGNED).kernel is fused
    choice = choose(problem, H200, access)
    assert (choice.kernel, choice.how) == (split, "tuned")


def test_lock_says_why_an_exact_record_can_not_be_used(store, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    store.add_record(hopper_record())
    assert choose(PROBLEM, H200, ALIGNED).kernel is HOPPER
    with pytest.raises(MissingRecordError, match=r"that can be used \(flash_fwd_ws can't load"):
        choose(PROBLEM, H200, UNALIGNED)


# --- records that don't fit


def test_a_record_that_breaks_a_constraint_is_left_out(store, caplog):
    # What is right for 4096 keys is too much for 40, which are another bucket but near enough.
    large = but(TUNED, BLOCK_N=128)
    long = dataclasses.replace(PROBLEM, seqlen_k=1024)
    short = dataclasses.replace(PROBLEM, seqlen_k=40)
    store.add_record(record(large, problem=long))
    with caplog.at_level(logging.INFO, logger="autoflash.runtime.choose"):
        choice = choose(short, H200, ALIGNED)
    assert told(choice) == told(default_choices(short, H200, ALIGNED)[0])
    (message,) = [r.getMessage() for r in caplog.records]
    assert message == (
        f"record of {Bucket.of(short).label()} doesn't fit {short.label()}: "
        "keys: BLOCK_N=128 is more than the 40 keys"
    )


def test_a_record_that_the_target_can_not_hold(store):
    # 200 KiB of shared memory that an H200 has and a slice of it, with a smaller limit, has not.
    big = but(TUNED, BLOCK_M=128, BLOCK_N=128, num_warps=8, LOAD="tma", GROUP_HEADS=1)
    store.add_record(record(big))
    assert choose(PROBLEM, H200, ALIGNED).how == "tuned"
    small = dataclasses.replace(H200, shared_memory=100 * 1024)
    choice = choose(PROBLEM, small, ALIGNED)
    assert choice.how == "default"
    assert choice.kernel.space.why_not(choice.config, PROBLEM, small) is None


def test_tuned_is_what_an_exact_measured_record_serves(store, monkeypatch):
    # Only asks: in lock mode, too.
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    layers = Layers()
    same = dataclasses.replace(PROBLEM, seqlen_q=1025)
    small = dataclasses.replace(H200, shared_memory=100 * 1024)
    other = dataclasses.replace(PROBLEM, seqlen_k=8000)
    big = but(TUNED, BLOCK_M=128, num_warps=8, LOAD="tma", GROUP_HEADS=1)

    def tuned():
        asked = ((PROBLEM, H200), (same, H200), (PROBLEM, small), (other, H200), (PROBLEM, H100))
        return [is_tuned(problem, target, layers.lookup) for problem, target in asked]

    assert tuned() == [False] * 5
    store.add_record(record(kind="predicted"))
    assert tuned() == [False] * 5
    store.add_record(record(big))
    assert tuned() == [True, True, False, False, False]
    with pytest.raises(UnsupportedError, match="float32 is not served"):
        is_tuned(dataclasses.replace(PROBLEM, dtype="float32"), H200, layers.lookup)


def test_every_default_is_feasible():
    for target in (A100, H100, H200, named_target("l40s"), named_target("mi300x")):
        for dims in ((64, 64), (80, 40), (256, 256), (1, 1)):
            for length in (1, 100, 5000):
                problem = dataclasses.replace(
                    PROBLEM, head_dim=dims[0], head_dim_v=dims[1], seqlen_q=length, seqlen_k=length
                )
                for choice in default_choices(problem, target, ALIGNED):
                    assert choice.kernel.space.why_not(choice.config, problem, target) is None


# --- lock mode


def test_lock_serves_exact_measured_records_only(store, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    store.add_record(record())
    assert choose(PROBLEM, H200, ALIGNED).how == "tuned"
    other = dataclasses.replace(PROBLEM, seqlen_k=8192)
    with pytest.raises(MissingRecordError) as caught:
        choose(other, H200, ALIGNED)
    assert str(caught.value) == (
        "AUTOFLASH_MODE=lock and no exact record for fwd bfloat16 bh32 group4 s2048x8192 "
        "d128v128 causal on NVIDIA H200: run `autoflash tune --batch 2 --heads 16 --kv-heads 4 "
        "--seqlen-q 2000 --seqlen-k 8192 --head-dim 128 --head-dim-v 128 --dtype bfloat16 "
        "--causal` there, or unset AUTOFLASH_MODE"
    )
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("kind", ["nothing", "predicted", "unfit"])
def test_lock_refuses_what_is_not_exact(store, monkeypatch, kind):
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    if kind == "predicted":
        store.add_record(record(kind="predicted"))
    elif kind == "unfit":
        # In the bucket, but made for a target with more shared memory.
        store.add_record(record(but(TUNED, BLOCK_M=128, num_warps=8, num_stages=4, BLOCK_N=128)))
    with pytest.raises(MissingRecordError, match="run `autoflash tune "):
        choose(PROBLEM, H200, ALIGNED)


def test_lock_keeps_a_record_whose_load_path_was_changed(store, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    store.add_record(record(but(TUNED, LOAD="tma")))
    choice = choose(PROBLEM, H200, UNALIGNED)
    assert (choice.how, choice.config["LOAD"]) == ("tuned", "pointer")


def test_an_unknown_mode(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_MODE", "locked")
    with pytest.raises(InvalidInputError, match=r"^AUTOFLASH_MODE='locked': must be one of "):
        choose(PROBLEM, H200, ALIGNED)


# --- stores that can't be read


@pytest.mark.parametrize("kind", ["text", "empty file", "folder", "random"])
def test_a_broken_store_costs_one_warning(kind, caplog, recwarn):
    path = settings().db_path
    if kind == "folder":
        path.mkdir(parents=True)
    else:
        content = {"text": b"hello" * 99, "empty file": b"", "random": bytes(range(256)) * 99}
        path.write_bytes(content[kind])
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        choices = [choose(PROBLEM, H200, ALIGNED) for _ in range(3)]
        choices.append(choose(dataclasses.replace(PROBLEM, batch=8), H200, ALIGNED))
    assert {choice.how for choice in choices} == {"default"}
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("going on without the user records: ")
    assert str(path) in message
    assert len(recwarn) == 0


def test_a_store_that_appears_later_is_seen():
    assert choose(PROBLEM, H200, ALIGNED).how == "default"
    Store(settings().db_path).add_record(record())
    assert choose(PROBLEM, H200, ALIGNED).how == "tuned"


def test_settings_are_followed(store, monkeypatch, tmp_path):
    store.add_record(record())
    assert choose(PROBLEM, H200, ALIGNED).how == "tuned"
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "other.sqlite"))
    assert choose(PROBLEM, H200, ALIGNED).how == "default"


# --- problems that nobody serves


def test_no_kernel_for_the_problem():
    with pytest.raises(UnsupportedError) as caught:
        choose(dataclasses.replace(PROBLEM, dtype="float32"), H200, ALIGNED)
    assert str(caught.value) == (
        "no kernel serves fwd float32 b2 h16/4 s2000x4096 d128 causal on NVIDIA H200: flash_fwd: "
        "float32 is not served on a GPU: use float16 or bfloat16; flash_fwd_ws: "
        "float32 is not served on a GPU: use float16 or bfloat16"
    )


def test_no_kernel_for_the_target():
    volta = dataclasses.replace(A100, name="Tesla V100", arch="sm_70")
    with pytest.raises(UnsupportedError, match=r"on Tesla V100: flash_fwd: sm_70 is older than"):
        choose(PROBLEM, volta, ALIGNED)


# --- the command


def test_the_tune_command_can_be_pasted():
    import shlex

    from autoflash.tuning.problems import expand

    words = shlex.split(tune_command(PROBLEM))
    assert words[:2] == ["autoflash", "tune"]
    flags = [w for w in words[2:] if w != "--causal"]
    fields = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    assert expand({**fields, "causal": "--causal" in words}) == [PROBLEM]
    assert "--causal" not in tune_command(dataclasses.replace(PROBLEM, causal=False))


def test_choosing_is_quick_and_touches_no_gpu(store, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a GPU was touched")

    store.add_record(record())
    for name in ("init", "current_device", "get_device_properties", "is_available"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)
    assert choose(PROBLEM, H200, ALIGNED).how == "tuned"
    assert module._layers(settings()) is module._layers(settings())


# --- fp8

FP8 = KERNELS["flash_fwd_fp8"]
FP8_PROBLEM = dataclasses.replace(PROBLEM, dtype="float8_e4m3fn", scales="block")
FP8_DEFAULT = FP8.default(FP8_PROBLEM, H200)
FP8_TUNED = FP8.space.parse({**FP8_DEFAULT, "num_stages": 2, "GROUP_HEADS": 1})


def fp8_record(problem=FP8_PROBLEM, **changes):
    found = record(problem=problem, **changes)
    return dataclasses.replace(found, kernel=FP8.name, config=FP8_TUNED)


def test_fp8_is_served_by_kernels_of_fp8_alone():
    names = {choice.kernel.name for choice in default_choices(FP8_PROBLEM, H200, UNALIGNED)}
    assert FP8.name in names
    assert all(KERNELS[name].fp8 for name in names)
    plain = {choice.kernel.name for choice in default_choices(PROBLEM, H200, UNALIGNED)}
    assert not any(KERNELS[name].fp8 for name in plain)
    with pytest.raises(UnsupportedError, match="sm_80 has no e4m3"):
        choose(FP8_PROBLEM, A100, ALIGNED)


def test_a_record_of_fp8_serves_its_problem_and_other_scales_as_a_neighbour(store):
    store.add_record(fp8_record())
    for problem, how in (
        (FP8_PROBLEM, "tuned"),
        (dataclasses.replace(FP8_PROBLEM, scales="head"), "neighbour"),
        (dataclasses.replace(FP8_PROBLEM, out_dtype="float16"), "neighbour"),
        (dataclasses.replace(FP8_PROBLEM, v_layout="columns"), "default"),
        (dataclasses.replace(FP8_PROBLEM, dtype="float16", kv_dtype="float8_e4m3fn"), "default"),
    ):
        module._layers.cache_clear()
        choice = choose(problem, H200, UNALIGNED)
        assert choice.how == how, problem.label()
        assert (choice.config == FP8_TUNED) == (how != "default")
    assert choose(PROBLEM, H200, UNALIGNED).how == "default"
    choice = choose(FP8_PROBLEM, H100, UNALIGNED)
    assert (choice.how, choice.config) == ("neighbour", FP8_TUNED)


def test_the_command_names_what_fp8_needs():
    assert tune_command(FP8_PROBLEM).endswith("--dtype float8_e4m3fn --causal --scales block")
