"""Files as a stranger might send them: good ones, broken in a few hundred known ways."""

import json
import random
from collections.abc import Iterator

from autoflash.store.digest import canonical, sha256

SEED = 20250131
NASTY = (
    "'; DROP TABLE records; --", "{{ ''.__class__ }}", "{% include '/etc/passwd' %}", "../../etc",
    "/etc/passwd", "$(reboot)", "`reboot`", "a\0b", "a\nb", "\x1b]0;owned\x07", "\ud800", "%s%n",
    "[red]x[/red]", "\u202egnp", "x" * 201,
)  # fmt: skip
# What a label may hold: it is only ever shown, or handed to a database as a value.
INERT = tuple(text for text in NASTY if text.isprintable() and len(text) <= 200)
LABELS = (
    ("target", "name"), ("measurement", "throttle"),
    *(("provenance", n) for n in ("autoflash", "triton", "torch", "cuda", "driver", "source_hash")),
    ("provenance", "origin"),
)  # fmt: skip
TYPES = (None, True, 0, -1, 1.5, 10**400, 1e308, "", "1", [], [[]], {}, {"a": 1})


def sealed(lines: list[str], **header: object) -> bytes:
    """The file of ``lines`` (without a header), with a header that is true of them."""
    body = "".join(line + "\n" for line in lines)
    head = {"format": "autoflash-exchange", "version": 1, "count": len(lines)}
    head |= {"digest": sha256(body)} | header
    return (canonical(head) + "\n" + body).encode()


def resealed(plain: dict[str, object]) -> str:
    """The line of ``plain`` with a digest that is right: only what it says can be wrong."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return f'{{"digest":"{sha256(text)}",{text[1:]}'


def truncations(data: bytes) -> Iterator[tuple[str, bytes]]:
    places = random.Random(SEED).sample(range(len(data)), 60)
    yield from ((f"cut at {place}", data[:place]) for place in sorted(places))


def flips(data: bytes) -> Iterator[tuple[str, bytes]]:
    for seed in range(SEED, SEED + 80):
        dice = random.Random(seed)
        changed = bytearray(data)
        for _ in range(dice.choice((1, 1, 3, 30))):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        yield f"flipped, seed {seed}", bytes(changed)


def noise(data: bytes) -> Iterator[tuple[str, bytes]]:
    for seed in range(SEED, SEED + 15):
        yield f"random bytes, seed {seed}", random.Random(seed).randbytes(3000)
    head, _, body = data.partition(b"\n")
    yield "zero length", b""
    yield "a line end", b"\n"
    yield "a header alone", head + b"\n"
    yield "no header", body
    yield "an SQLite file", b"SQLite format 3\0" + b"\0" * 4000
    yield "a deep header", b"[" * 100_000
    yield "a long header", b'{"format": "' + b"x" * 10_000_000
    yield "NUL behind", data + b"\0" * 1000
    yield "windows line ends", data.replace(b"\n", b"\r\n")
    yield "a byte-order mark", b"\xef\xbb\xbf" + data
    yield "UTF-16", data.decode().encode("utf-16")
    yield "line ends alone", head + b"\n" * 100_000


def headers(lines: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in ("format", "version", "count", "digest", "signature"):
        for value in TYPES:
            yield f"header {name}={str(value)[:20]!r}", sealed(lines, **{name: value})
    yield "a newer version", sealed(lines, version=2)
    yield "a header with more", sealed(lines, path="/etc/passwd")
    yield "a count of 10**9", sealed(lines, count=10**9)
    twice = sealed(lines).replace(b'"count":', b'"count":1,"count":', 1)
    yield "a header that counts twice", twice


def bad_fields(plain: dict[str, dict[str, object]]) -> Iterator[tuple[str, dict[str, object]]]:
    """``plain`` with one value that is wrong, each of them in turn."""
    places = [(name, None) for name in plain]
    places += [(n, k) for n, part in plain.items() if isinstance(part, dict) for k in part]
    dice = random.Random(SEED)
    for outer, inner in places:
        bad = dice.choice([t for t in TYPES if not isinstance(t, str)][5:] if inner else TYPES[:4])
        yield f"{outer}.{inner}={str(bad)[:20]!r}", changed(plain, outer, inner, bad)
        unfit = [text for text in NASTY if text not in INERT]
        bad = dice.choice(unfit if (outer, inner) in LABELS else NASTY)
        yield f"{outer}.{inner}={bad[:20]!r}", changed(plain, outer, inner, bad)
        yield f"{outer}.{inner} is missing", changed(plain, outer, inner, ...)


def bad_values(plain: dict[str, dict[str, object]]) -> Iterator[tuple[str, str]]:
    """One bad line each, sealed by a right digest."""
    yield from ((name, resealed(bad)) for name, bad in bad_fields(plain))
    for name in ("median_ms", "p20_ms", "p80_ms"):
        for bad in (-1.0, 0, float("nan"), float("inf"), float("-inf"), 1e9, 1e300):
            line = resealed(changed(plain, "measurement", name, bad))
            yield f"{name}={bad}", line
    for bad in ("os.system", "flash_bwd", "../flash_fwd", "flash_fwd\0", "FLASH_FWD"):
        yield f"kernel={bad!r}", resealed(changed(plain, "kernel", None, bad))
    for bad in (129, -128, 128.0, "128", True, 2**40):
        yield f"BLOCK_M={bad!r}", resealed(changed(plain, "config", "BLOCK_M", bad))


def bad_lines(good: str) -> Iterator[tuple[str, str]]:
    """Lines that are wrong as text."""
    yield "10 MB in a string", resealed({"kernel": "x" * 10_000_000})
    yield "10 MB of nothing", "x" * 10_000_000
    yield "deep lists", "[" * 10_000
    yield "deep objects", '{"a":' * 5000 + "1" + "}" * 5000
    yield "nine deep", '{"a":' * 9 + "1" + "}" * 9
    yield "a key twice", good.replace('"kernel":', '"kernel":"x","kernel":', 1)
    yield "a digest twice", good.replace("{", '{"digest":"x",', 1)
    yield "a key twice, deep", good.replace('"batch":', '"batch":1,"batch":', 1)
    yield "the digest of another", good.replace('"digest":"', '"digest":"0', 1)
    yield "no digest", "{" + good.partition(",")[2]
    yield "a digest that is a number", '{"digest":1,' + good.partition(",")[2]
    yield "another time", good.replace('"median_ms":', '"median_ms":1', 1)
    yield "a long number", good.replace('"repeats":', '"repeats":' + "9" * 5000, 1)
    yield "an exponent", good.replace('"median_ms":', '"median_ms":1e999', 1)
    yield "a surrogate", good.replace("host-a", "\\ud800")
    yield "a list", "[1,2]"
    yield "null", "null"
    yield "two objects", good + good
    yield "a comment", good + " // fine"
    yield "single quotes", good.replace('"', "'")
    yield "Python", "__import__('os').system('reboot')"
    yield "YAML", "!!python/object/apply:os.system [reboot]"
    yield "a header again", sealed([]).decode().strip()


def changed(plain: dict, outer: str, inner: str | None, value: object) -> dict:
    """A copy of ``plain`` with one value another, or (...) without it."""
    found = json.loads(json.dumps(plain))
    place, name = (found, outer) if inner is None else (found[outer], inner)
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return found
