"""The identity of measured GPUs: a result must be that of the GPU to which its file belongs.

A GPU can be measured under the index of another one if the order of GPUs changes between two tasks, if two
Ray nodes offer the same GPU, or if files are copied. Then the figures of one GPU must not be compared with
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cudakit.bench.fleet.result import Finding, FleetGpu, FleetHost, Subject
from cudakit.bench.health import SuiteResult
from cudakit.units import Unavailable

_HINT = (
    "measure it again: delete its file, and run cudakit bench suite --ray with the same --results"
)
_OTHER_GPU = Unavailable("the result is that of another GPU")


def wrong_gpu_findings(hosts: Sequence[FleetHost]) -> tuple[Finding, ...]:
    """Return a finding for each GPU whose result is that of another GPU, according to its UUID.

    The UUIDs of different hosts with simulated GPUs may be the same.
    """
    findings = []
    subjects_by_uuid: dict[tuple[str, str], Subject] = {}
    for host in hosts:
        for gpu in host.gpus:
            if not gpu.uuid or not isinstance(gpu.suite, SuiteResult):
                continue
            subject = Subject("gpu", host.name, gpu.index)
            uuid_key = (host.name if gpu.suite.simulated else "", gpu.uuid)
            first_subject = subjects_by_uuid.setdefault(uuid_key, subject)
            expected_uuid = host.facts.gpu_uuid(gpu.index)
            if expected_uuid and gpu.uuid != expected_uuid:
                text = f"its result is that of another GPU: {gpu.uuid} instead of {expected_uuid}"
            elif first_subject != subject:
                text = f"its result is that of the same GPU as {first_subject}: {gpu.uuid}"
            else:
                continue
            findings.append(Finding("wrong-gpu", subject, text, _HINT))
    return tuple(findings)


def without_wrong_results(
    hosts: Sequence[FleetHost], findings: Sequence[Finding]
) -> tuple[FleetHost, ...]:
    """Return the hosts, with an error instead of the suite result of each GPU that has a finding."""
    texts = {finding.subject: finding.text for finding in findings}

    def without_wrong_result(host: FleetHost, gpu: FleetGpu) -> FleetGpu:
        text = texts.get(Subject("gpu", host.name, gpu.index))
        return replace(gpu, error=text, hint=_HINT, suite=_OTHER_GPU) if text else gpu

    return tuple(
        replace(host, gpus=tuple(without_wrong_result(host, gpu) for gpu in host.gpus))
        for host in hosts
    )
