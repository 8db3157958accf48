import numpy as np
from core.memory import builders
from core.memory.strategies import garbage
from hypothesis import given, settings, HealthCheck
from cudakit.core.memory.replay import replay
from cudakit.core.memory.layout import layout_at
from cudakit.core.memory.analyze import analyze, MemorySpec
@settings(max_examples=600, deadline=None)
@given(garbage())
def test_g(trace):
    s=builders.snapshot(trace)
    r=replay(s,trace)
    for m in range(r.n_events+1): layout_at(trace,r.allocations,m)
    assert r.curves.requested[-1]==trace.blocks.requested[trace.blocks.state!=0].sum()
    assert r.curves.active[-1]==trace.blocks.size[trace.blocks.state!=0].sum()
    assert r.curves.allocated[-1]==trace.blocks.size[trace.blocks.state==1].sum()
    assert r.curves.reserved[-1]==trace.segments.size.sum()
    analyze([s],MemorySpec())
    analyze([s],MemorySpec(at='end',stream=1))
    analyze([s],MemorySpec(pool=(0,1)))
