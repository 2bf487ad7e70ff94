"""Targets: names, identity, memory, and GPUs that are not there."""

import dataclasses

import pytest

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.target import (
    NAMED_TARGETS,
    Target,
    _nearest_named,
    current_target,
    gpu_is_present,
    named_target,
    round_memory,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "gpu", "arch", "capability", "tma", "sms", "shared"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", "sm_80", 80, False, 108, 166912),
        ("l40s", "NVIDIA L40S", "sm_89", 89, False, 142, 101376),
        ("h100", "NVIDIA H100 80GB HBM3", "sm_90", 90, True, 132, 232448),
        ("h200", "NVIDIA H200", "sm_90", 90, True, 132, 232448),
        ("b200", "NVIDIA B200", "sm_100", 100, True, 148, 232448),
        ("rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", 120, True, 170, 101376),
        ("mi300x", "AMD Instinct MI300X", "gfx942", 0, False, 304, 65536),
    ],
)
def test_named_targets(name, gpu, arch, capability, tma, sms, shared):
    target = named_target(name)
    assert (target.name, target.arch, target.capability) == (gpu, arch, capability)
    assert (target.has_tma, target.sm_count, target.shared_memory) == (tma, sms, shared)
    assert target.warp_size == (64 if target.vendor == "amd" else 32)
    assert named_target(name.upper()) is target


def test_the_test_above_names_them_all():
    assert sorted(NAMED_TARGETS) == ["a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx5090"]


@pytest.mark.parametrize("name", ["h1000", "", "NVIDIA H200"])
def test_an_unknown_target_lists_the_known_ones(name):
    with pytest.raises(InvalidInputError) as caught:
        named_target(name)
    assert str(caught.value) == (
        f"unknown target {name!r}: known are a100, b200, h100, h200, l40s, mi300x, rtx5090"
    )


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("h200", "nvidia_h200"),
        ("h100", "nvidia_h100_80gb_hbm3"),
        ("a100", "nvidia_a100_sxm4_80gb"),
        ("rtx5090", "nvidia_geforce_rtx_5090"),
        ("mi300x", "amd_instinct_mi300x"),
    ],
)
def test_slug(name, slug):
    assert named_target(name).slug == slug


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Tesla T4", "nvidia_tesla_t4"),
        ("NVIDIA H100 MIG 1g.10gb", "nvidia_h100_mig_1g.10gb"),
        ("NVIDIA ../../etc/passwd", "nvidia_....etcpasswd"),
    ],
)
def test_slug_of_any_name_is_one_path_part(name, slug):
    target = dataclasses.replace(named_target("h100"), name=name)
    assert target.slug == slug


def test_slugs_and_identities_are_distinct():
    assert len({target.slug for target in NAMED_TARGETS.values()}) == len(NAMED_TARGETS)
    assert len({target.identity for target in NAMED_TARGETS.values()}) == len(NAMED_TARGETS)


def test_identity_is_who_it_is_and_not_how_fast():
    h200 = named_target("h200")
    assert h200.identity == ("nvidia", "NVIDIA H200", "sm_90", 132, 140)
    assert dataclasses.replace(h200, tflops=1.0, l2_bytes=1).identity == h200.identity
    assert dataclasses.replace(h200, sm_count=16).identity != h200.identity
    assert dataclasses.replace(h200, memory_gib=16).identity != h200.identity


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (150_000_000_000, 140),  # 139.7 GiB
        (139.8 * GIB, 140),
        (79.1 * GIB, 80),
        (79.6 * GIB, 80),
        (44.4 * GIB, 44),
        (31.4 * GIB, 32),
        (191.98 * GIB, 192),
        (10 * GIB, 8),
        (1 * GIB, 1),
        (0, 1),
    ],
)
def test_round_memory(total, expected):
    assert round_memory(int(total)) == expected


@pytest.mark.parametrize(
    ("arch", "name", "expected"),
    [
        ("sm_90", "NVIDIA H200", "h200"),
        ("sm_90", "NVIDIA GH200 480GB", "h100"),
        ("sm_86", "NVIDIA A10", "a100"),
        ("sm_103", "NVIDIA B300", "b200"),
        ("sm_121", "NVIDIA GB10", "rtx5090"),
        ("sm_75", "Tesla T4", "a100"),
        ("gfx950", "AMD Instinct MI355X", "mi300x"),
    ],
)
def test_a_gpu_without_a_name_takes_the_rates_of_the_nearest(arch, name, expected):
    assert _nearest_named(arch, name) is named_target(expected)


def test_current_target_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_is_present() is False
    with pytest.raises(UnsupportedError, match=r"^no GPU is visible to torch: .*--target h100$"):
        current_target()


def test_a_target_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        named_target("h100").sm_count = 1
    assert isinstance(named_target("h100"), Target)
    assert hash(named_target("h100")) == hash(dataclasses.replace(named_target("h100")))
