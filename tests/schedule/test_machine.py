"""Any order of steps, resized batches, saved and loaded states, against the formula and a counter."""

import json
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from seqwarm_kernels import SequenceLengthScheduler, discrete, root

from ..support.tiers import examples

PACINGS = {"linear": "linear", "root": root(2), "discrete": discrete([(3, 4), (9, 20)])}
ROWS, TOKENS = 2, 48


def expected_length(settings, progress):
    low, high, duration = (settings[name] for name in ("min_seq_length", "max_seq_length", "duration"))
    if progress >= duration:
        return high
    if settings["pacing"] == "discrete":
        return 4 if progress < 3 else 20 if progress < 12 else high
    share = Fraction(progress, duration)
    share = share if settings["pacing"] == "linear" else math.sqrt(share)
    return min(high, low + settings["step_size"] * math.floor((high - low) * share / settings["step_size"]))


class Schedule(RuleBasedStateMachine):
    states = Bundle("states")

    @initialize(
        duration=st.integers(12, 60), step_size=st.integers(1, 9), pacing=st.sampled_from([*PACINGS]),
        unit=st.sampled_from(["step", "token", "sample"]),
    )  # fmt: skip
    def begin(self, duration, step_size, pacing, unit):
        self.settings = {"min_seq_length": 4, "max_seq_length": 40, "duration": duration, "step_size": step_size}
        self.settings |= {"pacing": pacing, "unit": unit}
        self.scheduler, self.progress = self.make(), 0
        self.attached = torch.nn.Identity()
        self.attachment = self.scheduler.attach(self.attached)

    def make(self, **changed):
        return SequenceLengthScheduler(**{**self.settings, "pacing": PACINGS[self.settings["pacing"]], **changed})

    @rule(count=st.integers(0, 15))
    def step(self, count):
        self.progress += count
        assert self.scheduler.step(count) == expected_length(self.settings, self.progress)

    @rule()
    def step_by_one(self):
        if self.settings["unit"] == "step":
            self.progress += 1
            self.scheduler.step()
        else:
            with pytest.raises(ValueError, match="n must be"):
                self.scheduler.step()

    @rule(progress=st.integers(0, 80))
    def assign(self, progress):
        self.progress = self.scheduler.progress = progress

    @rule(bad=st.sampled_from([-1, 0.5, True, "2", 2**63]))
    def refuse(self, bad):
        for change in (self.scheduler.step, lambda value: setattr(self.scheduler, "progress", value)):
            with pytest.raises((TypeError, ValueError)):
                change(bad)

    @rule(target=states)
    def save(self):
        return json.dumps(self.scheduler.state_dict()), self.progress

    @rule(state=states)
    def load(self, state):
        saved, self.progress = state
        self.scheduler.load_state_dict(json.loads(saved))

    @rule(state=states)
    def resume(self, state):
        """In a new process."""
        self.scheduler = self.make()
        self.attachment.remove()
        self.attachment = self.scheduler.attach(self.attached)
        self.load(state)

    @rule(state=states, changed=st.sampled_from([{"duration": 61}, {"step_size": 10}, {"max_seq_length": 41}]))
    def refuse_another_configuration(self, state, changed):
        other = self.make(**changed)
        with pytest.raises(ValueError, match=f"{next(iter(changed))} is"):
            other.load_state_dict(json.loads(state[0]))
        assert other.progress == 0

    @invariant()
    def is_where_it_should_be(self):
        length = expected_length(self.settings, self.progress)
        assert (self.scheduler.progress, self.scheduler.seq_length) == (self.progress, length)
        batch = torch.zeros(ROWS, TOKENS)
        assert self.scheduler.resize({"input_ids": batch})["input_ids"].shape == (ROWS, length)
        assert self.attached(batch).shape == (ROWS, length)
        assert self.attachment.seq_length == length


Schedule.TestCase.settings = examples(15, stateful_step_count=20, deadline=None)
TestSchedule = Schedule.TestCase
