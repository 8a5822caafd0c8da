"""Which form the TLX backward takes for a call; needs no GPU."""

import dataclasses
import math

import pytest
import torch

from gem.attention.backends.tlx_backward import (
    LEAST_SHARE,
    LEAST_WHOLE,
    WHOLE_KEYS,
    Form,
    form_of,
)
from gem.attention.simulator import simulated
from gem.attention.testing import call_of, random_problem

MANY = 4 * LEAST_WHOLE  # whole samples for each CTA


def form(q_lengths, k_lengths=None, deterministic=False, processors=2, **options):
    options = {"heads": 2, "dim": 64, "dtype": torch.bfloat16} | options
    problem = random_problem(q_lengths, k_lengths, **options)
    call = dataclasses.replace(call_of(problem), direction="backward", deterministic=deterministic)
    with simulated(processors=processors):
        return form_of(call, problem.q)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "mask", [{"causal": True}, {"window": (70, 20)}, {"window": (None, 3)}, {"window": (9, None)}]
)
def test_windows_are_never_whole(mask, deterministic):
    assert form([100] * MANY, deterministic=deterministic, **mask) == Form(
        "keys", split=deterministic
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_broadcast_attention_is_never_whole(deterministic):
    assert form(40, [100] * MANY, deterministic) == Form("queries")
    for options in ({"kv_heads": 1}, {}):
        queries = 40 if options else 200
        expected = Form("keys", split=deterministic)
        assert form(queries, [100] * MANY, deterministic, **options) == expected


@pytest.mark.parametrize("samples", [1, 50])
def test_deterministic_sums_need_every_sample_to_be_whole(samples):
    whole, split = Form("keys", whole=True), Form("keys", split=True)
    lengths = [WHOLE_KEYS, *[100] * (samples - 1)]
    assert form(lengths, deterministic=True) == whole
    longer = [WHOLE_KEYS + 1, *lengths[1:]]
    assert form(longer, deterministic=True) == split
    # Many queries may see few keys, and nothing is added up of keys that no query sees.
    assert form(longer, lengths, deterministic=True) == whole
    assert form(lengths, longer, deterministic=True) == split
    assert form([0, 100, *lengths], [999, 0, *lengths], deterministic=True) == whole


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (2, 2)])
def test_samples_are_whole_where_every_cta_has_enough_of_them(heads, kv_heads):
    processors = 6
    enough = LEAST_WHOLE * processors // kv_heads
    options = {"heads": heads, "kv_heads": kv_heads, "processors": processors}
    few, many = [100] * (enough - 1), [100] * enough
    assert form(few, **options) == Form("keys")
    assert form(many, **options) == Form("keys", whole=True)
    # Longer samples, and those without queries or keys, do not count.
    assert form([*few, WHOLE_KEYS + 1], **options) == Form("keys")
    assert form([*few, 0, 100], [*few, 100, 0], **options) == Form("keys")
    assert form([*many, WHOLE_KEYS + 1], **options) == Form("keys", whole=True)


def test_samples_are_whole_where_they_have_enough_of_the_queries():
    short = [100] * MANY
    for share, whole in ((LEAST_SHARE, True), (LEAST_SHARE * 0.99, False)):
        long = math.ceil(sum(short) / share) - sum(short)
        assert form([*short, long]) == Form("keys", whole=whole)
        # It is their queries that count, not their keys.
        assert form([*short, long], [*short, WHOLE_KEYS + 1]) == Form("keys", whole=whole)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_that_would_be_mostly_padding_are_not_whole(deterministic):
    assert form([1] * MANY, [100] * MANY, deterministic) == Form("keys", split=True)
