"""A plan's name as a sentence."""

import pytest
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.views.plain import plain


@pytest.mark.parametrize(("name", "said"), [
    ("one device", "Everything on one device."),
    ("DP 8 · ZeRO-3 · recomputed",
     "The batch split over 8 devices, parameters, gradients and the optimizer's state in shards, all "
     "blocks computed again in backward."),
    ("TP 2 + SP · 17 blocks recomputed · 16 micro-batches · PP 4 1F1B",
     "A pipeline of 4 stages (1F1B), layers and sequences split over 2 devices, 17 blocks computed again "
     "in backward, 16 micro-batches."),
    ("placed: m-ETF", "Placed: m-ETF."),
])  # fmt: skip
def test_a_name_becomes_a_sentence(name, said):
    assert plain(name) == said


@pytest.mark.slow
def test_shipped_plans_have_words_for_their_parallelism():
    library = Library(ready_made=READY_MADE)
    for entry in library.entries():
        for name in library.load(entry.key).names:
            words = plain(name)
            assert not {"DP", "TP", "PP", "ZeRO-1", "ZeRO-2", "ZeRO-3"} & set(words.split()), words
