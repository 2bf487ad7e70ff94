"""Rows that a stranger wrote are skipped, with one warning, and the good ones are kept."""

import logging
import sqlite3
from contextlib import closing

import pytest

from autoflash.store.record import TrialStatus
from autoflash.store.store import Store

# Column: SQL expressions over a good row, each of which makes a bad one.
BAD_VALUES = {
    "op": ["'bwd'", "x'00'"],
    "dtype": ["'float8'", "x'ff'"],
    "kv_dtype": ["'float8'", "x'00'", "'float8_e4m3fn'"],
    "out_dtype": ["'float16'", "x'00'"],
    "scales": ["'head'", "7"],
    "v_layout": ["'columns'", "''"],
    "head_dim": ["0", "'128'||'x'", "1e300", "9223372036854775807"],
    "batch": ["-1", "1.5", "3", "x'01'"],
    "heads": ["15", "'many'"],
    "seqlen_q": ["1", "4294967296"],
    "group_size": ["2"],
    "bucket_seqlen_k": ["8192"],
    "target_vendor": ["'intel'"],
    "target_name": ["cast(x'ff00' as text)", "char(27)||'[31m'"],
    "target_arch": ["'sm_x'", "'../..'"],
    "target_sm_count": ["0", "'a'"],
    "kernel": ["'os.system'", "''", "7"],
    "config": [
        "''",
        "'[]'",
        "'{}'",
        "'null'",
        "replace(config, '128', '129')",
        "replace(config, '128', '128.0')",
        "replace(config, 'true', '1')",
        "replace(config, '}', ',\"X\":1}')",
        "replace(hex(zeroblob(1900)), '0', '[')",
        "x'7b7d'",
    ],
    "median_ms": ["NULL", "0", "-1.0", "9e999", "'fast'", "x'00'"],
    "p20_ms": ["NULL", "-9e999"],
    "repeats": ["NULL", "0", "2.5"],
    "method": ["NULL", "'model'", "'guess'"],
    "noisy": ["NULL"],
    "sm_clock_mhz": ["-1", "'x'"],
    "throttle": ["NULL", "hex(zeroblob(101))"],
    "created_at": ["''", "'2999'", "'zzzz'"],
    "origin": ["cast(x'0a' as text)", "hex(zeroblob(101))"],
    "kind": ["'guess'", "'predicted'"],
}


@pytest.mark.parametrize("column", BAD_VALUES)
def test_a_bad_row_is_skipped_and_the_good_ones_kept(store, path, make, caplog, column):
    good = [make.record(day=2), make.record(problem=make.problem(batch=4), day=2)]
    for record in good:
        store.add_record(record)
    with closing(sqlite3.connect(path)) as raw, raw:
        names = [row[1] for row in raw.execute("PRAGMA table_info(records)") if row[1] != "id"]
        for value in BAD_VALUES[column]:
            raw.execute(f"INSERT INTO records ({','.join(names)}) SELECT "
                        f"{','.join(value if n == column else n for n in names)} "
                        "FROM records WHERE id = 1")  # fmt: skip
    reader = Store(path, read_only=True)
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        for opened in (reader, store):
            assert opened.records() == good
            assert opened.best(make.bucket, make.h200) == good[0]
            assert opened.neighbours(make.bucket, make.h200) == [good[1]]
            assert opened.siblings(make.bucket, make.h200) == []
    assert len(caplog.records) == 2
    assert ": skipped row " in caplog.records[0].getMessage()
    with closing(sqlite3.connect(path)) as raw:
        count = raw.execute("SELECT count(*) FROM records").fetchone()[0]
    assert count == 2 + len(BAD_VALUES[column])


@pytest.mark.parametrize(
    "change",
    ["status = 'fine'", "registers = -1", "predicted_ms = 0", "median_ms = 2.0", "reason = x'00'"],
)
def test_a_bad_trial_is_skipped(store, path, make, caplog, change):
    store.add_trials([make.trial(), make.trial(TrialStatus.timeout)])
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"UPDATE trials SET {change} WHERE id = 1")
    assert store.trials(make.bucket, make.h200) == [make.trial(TrialStatus.timeout)]
    assert len(caplog.records) == 1
