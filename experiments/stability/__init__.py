"""Does sequence-length warmup let a small model train where its baseline is unstable?

First a search, on the baseline only, for a regime in which most seeds spike or diverge. Then, in this regime, warmup
beside alternatives that cost less. `definitions.py` defines trains, spikes and diverges; `settings.py` has every
setting of a run, `search.py` and `arms.py` the runs.
"""
