"""What has been reported committed is there after any kill, and a failed write leaves the last commit."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import store_surgery
from conftest import open_tiny
from kill_worker import COMMIT_POINTS, POINTS, manager_of, script, session_of, work

import agentkv
from agentkv import DecodingConfig, StoreError, StoreFull
from agentkv.memory.environment import Table

SHORT = DecodingConfig(max_new_tokens=6, ignore_eos=True)


# -- kills


def check_lives(report: dict[str, Any]) -> None:
    """Each life begins at the last reported commit or exactly one newer; every commit is the uninterrupted run's."""
    assert report["failed"] == ""
    reference = {line["commit"]: line["tokens"] for line in report["reference"]}
    conversations = max(reference)
    newest: dict[str, dict[str, Any]] = {}
    last = {"commit": 0}
    for lines in report["lives"]:
        for line in lines:
            if line["kind"] == "opened":
                assert (line["problems"], line["pending"]) == ([], 0)
        for place, line in enumerate(line for line in lines if line["kind"] == "at"):
            number = line["commit"]
            if place == 0:
                assert number - last["commit"] in (0, 1)
                if number == last["commit"] and number:
                    assert {**line, "seconds": 0} == {**last, "seconds": 0}
            else:
                assert number == last["commit"] + 1
            if number:
                assert line["tokens"] == reference[(number - 1) % conversations + 1]
                assert line["carry"] == 1
            newest[session_of(number)] = last = line
    assert newest
    found = {line["head"].partition("@")[0]: line for line in report["last"]}
    for session, line in newest.items():
        if line["head"] == found[session]["head"] and line["commit"]:
            assert line["digest"] == found[session]["digest"]
        else:
            assert session == session_of(last["commit"] + 1), "only the last kill may have hit an unreported commit"


@pytest.mark.parametrize(
    ("kills", "inside", "seed"), [(100, 30, 1), pytest.param(1000, 300, 2, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(0)
def test_c9_c14_killed_at_random_instants_nothing_reported_is_lost(tmp_path, kills, inside, seed):
    """C14: tokens and KV agree (`carry`). C9: what was committed is found again."""
    report = work("kills", kills * 10, path=tmp_path / "store", model="tiny", kills=kills, inside=inside, seed=seed)
    check_lives(report)
    assert len(report["lives"]) >= kills
    assert report["inside"] >= inside
    assert max(line["commit"] for lines in report["lives"] for line in lines if line["kind"] == "at") > kills


@pytest.mark.model
def test_smollm2_killed_at_random_instants_nothing_reported_is_lost(tmp_path):
    report = work("kills", path=tmp_path / "store", model="smollm2", kills=5, inside=2, seed=3)
    check_lives(report)
    assert len(report["lives"]) >= 5
    assert report["inside"] >= 2


def test_c14_killed_at_every_point_of_a_commit_it_is_the_old_or_the_new_one(tmp_path):
    outcomes = work("kill_points", path=tmp_path)
    assert len(outcomes) == 2 * len(POINTS)
    for name, outcome in outcomes.items():
        before, point = int(name[0]), name[2:]
        old, found, new = outcome["old"], outcome["found"], outcome["new"]
        assert (old["commit"], new["commit"]) == (before, before + 1), name
        wanted = new if point in COMMIT_POINTS[2:] else old
        assert found == wanted, f"{name}: neither pages nor bytes are left of a commit that was not"
        assert (new["problems"], new["pending"], new["carry"]) == ([], 0, 1)
