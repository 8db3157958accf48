from __future__ import annotations

import string
import uuid

from devices.diagnose.machines import Machine, both_views, gpu
from hypothesis import given
from hypothesis import strategies as st

from cudakit.devices.diagnose import diagnose
from cudakit.devices.diagnose.present import paste_report
from cudakit.devices.diagnose.redact import _COMMON_NAMES, Identity, redact_value
from cudakit.report import console, json

WHO = Identity(
    hostname="gpu-box.lab.example", user="ada", home="/data/ada", serials=("1652826064062",)
)

names = st.text(string.ascii_lowercase + string.digits, min_size=4, max_size=12).filter(
    lambda name: name not in _COMMON_NAMES and not name.isdigit()
)
between = st.text(string.ascii_letters + " /:=.,", max_size=20)


def test_uuids_are_redacted_except_their_kind() -> None:
    text = "GPU-6f4890cf-4157-408d-4577-559bc7fea90e, MIG-GPU-6f4890cf/3/0 and GPU-6f48"

    assert redact_value(text, WHO) == "GPU-<uuid>, MIG-GPU-<uuid> and GPU-<uuid>"


def test_host_user_home_and_serial_numbers_are_redacted() -> None:
    text = "gpu-box: /data/ada/venv and /home/bob/x, serial 1652826064062, GPU-BOX.LAB.EXAMPLE, ada"

    assert redact_value(text, WHO) == (
        "<host>: ~/venv and /home/<user>/x, serial <serial>, <host>, <user>"
    )


def test_name_inside_word_is_not_redacted() -> None:
    assert redact_value("Canada, gpu-boxes", WHO) == "Canada, gpu-boxes"


def test_common_names_are_not_redacted() -> None:
    nobody = Identity(hostname="localhost", user="root", home="/", serials=("0",))

    assert redact_value("localhost: root 0 /usr", nobody) == "localhost: root 0 /usr"


@given(identifier=st.uuids(), prefix=st.sampled_from(["GPU-", "MIG-", ""]), around=between)
def test_any_uuid_is_redacted(identifier: uuid.UUID, prefix: str, around: str) -> None:
    text = f"{around} {prefix}{identifier} {around}"

    assert str(identifier) not in redact_value(text, WHO)
    assert str(identifier)[:8] not in redact_value(text, WHO)


@given(host=names, user=names, around=between)
def test_any_name_in_path_or_sentence_is_redacted(host: str, user: str, around: str) -> None:
    who = Identity(hostname=f"{host}.cluster", user=user, home=f"/home/{user}")
    text = f"{around} /home/{user}/env on {host}.cluster, {host.upper()} as {user}; {around}"

    expected_text = redact_value(text, who).lower().replace("/", " ").replace(".", " ").split()

    assert not {host, f"{host},", user, f"{user};"} & set(expected_text)


def test_whole_result_is_redacted(machine: Machine) -> None:
    named_machine = machine(
        variables={"CUDA_INJECTION64_PATH": "/data/ada/libtool.so", "NCCL_TOPO_FILE": "gpu-box"},
        **both_views(gpu(0)),
    )
    result = redact_value(diagnose(named_machine), WHO)

    for text in (json.render(result), console.render(paste_report(result), width=60, color=False)):
        for secret in ("00112233-4455", "gpu-box", "/data/ada"):
            assert secret not in text
    assert "NVIDIA H200" in json.render(result)
