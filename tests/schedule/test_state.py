"""The progress of a schedule: what counts, and the state that a checkpoint keeps."""

import json

import numpy as np
import pytest
import torch

import seqwarm_kernels as sw
from seqwarm_kernels import SequenceLengthScheduler, cyclic, discrete, doubling, exponential, grow_p2, root


def test_a_step_beyond_what_a_state_may_hold_counts_nothing():
    scheduler, loaded = (SequenceLengthScheduler(8, 32, duration=10, unit="token") for _ in range(2))
    scheduler.step(2**62)
    with pytest.raises(ValueError, match="progress must fit into 64 bits"):
        scheduler.step(2**62)
    loaded.load_state_dict(scheduler.state_dict())
    assert loaded.progress == scheduler.progress == 2**62


def test_the_state_that_checkpoints_keep():
    scheduler = sw.SequenceLengthScheduler(duration=0.3 * 1000)
    configuration = {"min_seq_length": 8, "max_seq_length": 1024, "duration": 300.0}
    configuration |= {"step_size": 8, "pacing": "linear", "unit": "step"}
    assert scheduler.state_dict() == {"progress": 0, **configuration}
    copy = eval(repr(scheduler).replace(", progress=0", ""), vars(sw))
    assert copy.state_dict() == scheduler.state_dict()


def test_numbers_of_numpy_become_plain(tmp_path):
    """torch.load refuses NumPy's types in a checkpoint."""
    number = np.int64(8)
    scheduler = SequenceLengthScheduler(
        number, np.int32(64), duration=np.float64(100), step_size=number, pacing=discrete([(number, number)])
    )
    scheduler.step(np.int64(3))
    state = scheduler.state_dict()
    assert all(type(value) in (int, float, str) for value in state.values())
    assert state["pacing"] == "discrete([(8, 8)])"
    assert repr(root(np.float64(2))) == "root(2.0)"
    scheduler.load_state_dict({**state, "progress": np.int64(7)})
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["progress"] == 7


STATE = SequenceLengthScheduler(8, 64, duration=10, pacing=root(2)).state_dict()
BAD_STATES = [
    ({**STATE, "progress": 7, "pacing": "linear"}, ValueError, "pacing is"),
    ({"progress": 7}, ValueError, "state_dict must have the entries"),
    ({**STATE, "progress": "7"}, TypeError, "progress"),
    ({**STATE, "progress": -1}, ValueError, "progress"),
    (None, TypeError, "state_dict"),
]


@pytest.mark.parametrize(("state", "error", "message"), BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(state, error, message):
    scheduler = SequenceLengthScheduler(8, 64, duration=10, pacing=root(2))
    scheduler.step(3)
    with pytest.raises(error, match=message):
        scheduler.load_state_dict(state)
    assert scheduler.progress == 3


@pytest.mark.parametrize("pacing", [cyclic(root(2), 3), exponential(1.5), doubling(3), grow_p2(3, 2, 4)])
def test_pacings_with_settings_are_part_of_the_state(pacing):
    state = SequenceLengthScheduler(duration=10, pacing=pacing).state_dict()
    assert state["pacing"] == repr(pacing)
    assert repr(eval(repr(pacing), vars(sw))) == repr(pacing)
    with pytest.raises(ValueError, match="pacing is"):
        SequenceLengthScheduler(duration=10).load_state_dict(state)


def test_functions_are_told_apart_in_the_state():
    def growth(x):
        return x

    states = [SequenceLengthScheduler(duration=10, pacing=pacing).state_dict() for pacing in ("linear", "sine", growth)]
    assert [state["pacing"] for state in states] == ["linear", "sine", growth.__qualname__]
    with pytest.raises(ValueError, match="pacing is 'linear' in the state, 'sine' here"):
        SequenceLengthScheduler(duration=10, pacing="sine").load_state_dict(states[0])


def test_the_state_of_a_function_has_some_of_its_lengths():
    def settled(x):
        return min(float(x) * 2, 1)

    scheduler = SequenceLengthScheduler(1, 171, duration=34, step_size=1, pacing=settled)
    scheduler.step(3)
    state = json.loads(json.dumps(scheduler.state_dict()))
    in_cycles = SequenceLengthScheduler(duration=10, pacing=cyclic(settled, 2)).state_dict()
    assert len(in_cycles["pacing_lengths"]) == 16
    assert state["pacing_lengths"] == [21, 41, 61, 81, 101, 121, 141, 161, *[171] * 8]
    scheduler.progress = 0
    scheduler.load_state_dict(state)
    assert scheduler.progress == 3
    with pytest.raises(ValueError, match="state_dict must have the entries"):
        SequenceLengthScheduler(duration=10).load_state_dict(
            {**SequenceLengthScheduler(duration=10).state_dict(), **state}
        )
    with pytest.raises(ValueError, match=r"state_dict is of another configuration: pacing_lengths is \[8, "):
        scheduler.load_state_dict({**state, "pacing_lengths": [8, *state["pacing_lengths"][1:]]})
