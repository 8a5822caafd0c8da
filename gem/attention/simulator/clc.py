"""Cluster launch control (Blackwell): a running cluster takes over one that has not started.

The CTAs of a launch that have not started are a queue. A request takes the next of them over, or
is refused: then others have been faster, and those that are left start as they would have.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gem.attention.simulator import clusters, extension
from gem.attention.simulator import context as running
from gem.attention.simulator.asynchronous import Operation, copy_access
from gem.attention.simulator.errors import BarrierMisuse, UnsupportedOperation
from gem.attention.simulator.memory import Buffers
from gem.attention.simulator.sync import Barriers
from gem.attention.simulator.values import Value

_BYTES = 16


class Clc:
    """What `clc_create_context` returns: barriers and responses, by stage."""

    def __init__(self, empty: Barriers, full: Barriers, responses: Buffers):
        self.empty, self.full, self.responses = empty, full, responses


class Request(Operation):
    """Asks for a cluster that has not started; the answer goes to all CTAs of this one."""

    name = "launch request"

    def __init__(self, task, where, answers):
        super().__init__(task, where)
        self.answers = answers  # (buffer, barrier, access) of each CTA

    def effect(self) -> None:
        cta = self.task.cta
        first = cta.cluster[0]
        if first.refused:
            raise running.error(
                BarrierMisuse, "a launch request after one that was refused is undefined"
            )
        waiting = cta.run_of.waiting
        if waiting and not cta.policy.refuses():
            taken = waiting.pop(0)
            cta.counts.stolen += 1
        else:
            taken, first.refused = (-1, -1, -1), True
        for buffer, barrier, access in self.answers:
            buffer.put(np.array([*taken, 0], np.int32))
            barrier.brought(access, _BYTES)

    def __str__(self) -> str:
        return "launch request"


def clc_create_context(num_consumers, num_stages=1, _name="clc"):
    target = running.cta.target
    if not target.tensor_columns:
        raise running.error(UnsupportedOperation, f"CLC does not exist on {target.name}")
    stages = int(num_stages)
    return Clc(
        extension.alloc_barriers(stages, num_consumers, f"{_name}.empty"),
        extension.alloc_barriers(stages, 1, f"{_name}.full"),
        extension.local_alloc((4,), tl.int32, stages, _name=f"{_name}.responses"),
    )


def clc_producer(context, p_producer=None, multi_ctas=False, k=0):
    cta, task, place = running.cta, running.task, running.where()
    if cta.rank == 0 or not multi_ctas:
        yield from extension.barrier_wait(context.empty[k], p_producer)
    full, response = context.full[k], context.responses[k]
    yield from extension.barrier_expect_bytes(full, _BYTES)
    if cta.rank:
        return
    answers = []
    for other in cta.cluster:
        bar = yield from clusters.peer_barrier(full, other)
        access = copy_access(task, place, bar)
        access.what = "launch response"
        buffer = clusters.peer_buffer(response, other)
        buffer.write_by(access, task.clocks)
        answers.append((buffer, bar, access))
    cta.issue(Request(task, place, answers))


def clc_consumer(context, p_consumer=None, multi_ctas=False, k=0, return_3d=False):
    yield from extension.barrier_wait(context.full[k], p_consumer)
    answer = extension.local_load(context.responses[k]).data
    x, y, z = (int(i) for i in answer[:3])
    extension.fence("async_shared")
    if x >= 0:
        yield from extension.barrier_arrive(context.empty[k], 1, 0 if multi_ctas else None)
        x += running.cta.rank
    ids = tuple(Value(i, tl.int32) for i in (x, y, z))
    return ids if return_3d else ids[0]
