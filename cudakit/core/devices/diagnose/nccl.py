"""Which of NCCL's fast paths are switched off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.core.devices.diagnose.settings import switched_on
from cudakit.gpu.api.run_context import RunContext

# What NCCL's manual lists for debugging, not to be left set (NCCL User Guide, Environment Variables).
_NCCL = {
    "NCCL_P2P_DISABLE": "GPUs do not talk directly, over NVLink or PCIe, but through host memory",
    "NCCL_SHM_DISABLE": "GPUs without a direct path talk through the network instead of host memory",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used; sockets are far slower",
    "NCCL_ALGO": "the algorithm is forced, whatever fits the size of the message",
    "NCCL_PROTO": "the protocol is forced, and a wrong one can corrupt data",
    "NCCL_NTHREADS": "the number of threads is forced",
    "NCCL_MAX_NCHANNELS": "bandwidth is limited by the number of channels",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
}
# What the machine may need: whoever set these may have had a reason, so they are explained and no more.
_OF_THE_MACHINE = {
    "NCCL_NVLS_ENABLE=0": "NVSwitch does no reductions (NVLink SHARP)",
    "NCCL_CUMEM_ENABLE=0": "buffers cannot be registered for NVLink",
    "NCCL_NET_GDR_LEVEL=LOC": "the network card does not reach GPU memory (GPUDirect RDMA)",
}
# PyTorch 2.2 renamed what is its own.
_RENAMED = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
)


def nccl_settings(c: RunContext) -> Finding:
    """NCCL's variables for debugging switch fast paths off, and are easily left behind in scripts.

    NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1 each take a way for data away;
    NCCL_DEBUG=INFO or TRACE writes much. NCCL reads /etc/nccl.conf as well, unless the environment says
    otherwise. Variables that belong to the machine are shown and not judged: names of interfaces
    (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), and what virtual machines may have to do without
    (NCCL_NVLS_ENABLE=0).
    """
    settings = {**c.software.nccl_conf, **c.variables}
    told = {name: _explained(name, value) for name, value in settings.items() if _is_setting(name)}
    return together(
        _nccl_findings(settings),
        otherwise=ok(f"NCCL is set up by {', '.join(sorted(told))}", told)
        if told
        else ok("NCCL has its default settings"),
    )


def _explained(name: str, value: str) -> str:
    what = _OF_THE_MACHINE.get(f"{name}={value}")
    return f"{value}: {what}" if what else value


def _nccl_findings(settings: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in switched_on(settings, _NCCL):
        fix = f"unset {name}, unless this machine was found to need it"
        yield warn(f"{name}={value}: {_NCCL[name]}", {name: value}, fix)
    level = settings.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn(
            f"NCCL_DEBUG={level} writes much to the output of every rank",
            {"NCCL_DEBUG": level},
            "export NCCL_DEBUG=WARN",
        )
    for name in _RENAMED:
        if name in settings:
            yield warn(
                f"PyTorch calls {name} TORCH_{name} since 2.2",
                {name: settings[name]},
                f"export TORCH_{name}={settings[name]}; unset {name}",
            )


def _is_setting(name: str) -> bool:
    # NVIDIA's images name the version of NCCL that is in them.
    return name.startswith("NCCL_") and name != "NCCL_VERSION"
