"""Trials as text: they come back as they were, and a stranger's are refused with a reason."""

import dataclasses
import json

import pytest

from autoflash.errors import AutoFlashError, InvalidInputError
from autoflash.store.record import TrialStatus
from autoflash.tuning.recorded import dump_trials, load_trials


@pytest.fixture
def trials(lab):
    statuses = {0: TrialStatus.noisy, 1: TrialStatus.crashed, 2: TrialStatus.predicted}
    found = lab.trials(statuses)
    stamp = found[0].provenance
    return [
        dataclasses.replace(
            t,
            came_from="tpe",
            provenance=dataclasses.replace(stamp, source_hash=t.provenance.source_hash),
        )
        for t in found
    ]


def test_trials_come_back_as_they_were(trials):
    text = dump_trials(trials)
    assert load_trials(text) == trials
    assert dump_trials(load_trials(text)) == text
    # A line each, so that a review sees which one changed.
    assert len([line for line in text.splitlines() if line.startswith('["flash_fwd"')]) == 24


def test_one_file_is_one_study(lab, trials):
    with pytest.raises(InvalidInputError, match="no trials"):
        dump_trials([])
    other = dataclasses.replace(lab.problem, seqlen_k=64)
    with pytest.raises(InvalidInputError, match="different problems or targets"):
        dump_trials([*trials, dataclasses.replace(trials[0], problem=other)])


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"problem": {}},
        {"target": None},
        {"params": {}},
        {"params": {"flash_fwd": []}},
        {"trials": [[]]},
        {"trials": [["flash_fwd", [], "", None, []]]},
        {"trials": 7},
    ],
    ids=str,
)
def test_what_is_no_such_document(trials, change):
    document = json.loads(dump_trials(trials))
    with pytest.raises(AutoFlashError):
        load_trials(json.dumps(document | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 100_000, '{"format": 1'])
def test_what_is_no_json(text):
    with pytest.raises(InvalidInputError, match=r"^not an autoflash-trials document"):
        load_trials(text)


def test_a_value_outside_the_space_is_refused(trials):
    document = json.loads(dump_trials(trials))
    place = document["params"]["flash_fwd"].index("BLOCK_M")
    document["trials"][3][1][place] = 7
    with pytest.raises(AutoFlashError, match="BLOCK_M"):
        load_trials(json.dumps(document))
