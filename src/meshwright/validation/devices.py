"""The cluster of a published run: device name, devices per node, network."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from meshwright.spec.cluster import Cluster
from meshwright.spec.presets import preset_names, read_preset
from meshwright.validation.cells import Cells, NotExpressedError

ALIASES: tuple[tuple[str, str], ...] = (
    (r"MI355X", "MI355X-288GB"),
    (r"MI350X", "MI350X-288GB"),
    (r"MI325X", "MI325X-256GB"),
    (r"MI300X", "MI300X-192GB"),
    (r"MI250X", "MI250X-64GB"),
    (r"GH200", "GH200-96GB"),
    (r"GB300", "GB300-NVL72"),
    (r"GB200", "GB200-NVL72"),
    (r"B300|HGX-?B300", "B300-SXM"),
    (r"B200", "B200-180GB-SXM"),
    (r"H200(?!.*(PCI|NVL(?!INK)))", "H200-141GB-SXM"),
    (r"H20(?!0)", "H20-96GB-SXM"),
    (r"H800(?!.*PCI)", "H800-80GB-SXM"),
    (r"H100.*(NVL(?!INK)|\b94-?G)", "H100-94GB-NVL"),
    (r"H100.*PCI", "H100-80GB-PCIe"),
    (r"H100.*\b64-?G(?!PU)", "H100-64GB-SXM"),
    (r"H100.*(\b96-?G|HBM2)", "H100-96GB-HBM2e"),
    (r"H100", "H100-80GB-SXM"),
    (r"A800(?!.*PCI)", "A800-80GB-SXM"),
    (r"A100.*PCI.*80|A100.*80.*PCI", "A100-80GB-PCIe"),
    (r"A100.*PCI.*40|A100.*40.*PCI", "A100-40GB-PCIe"),
    (r"A100(?!.*PCI).*40", "A100-40GB-SXM"),
    (r"A100.*\b64-?G(?!PU)", "A100-64GB-SXM"),
    (r"A100(?!.*PCI)", "A100-80GB-SXM"),
    (r"V100.*PCI.*16|V100.*16.*PCI", "V100-16GB-PCIe"),
    (r"V100.*PCI.*32|V100.*32.*PCI", "V100-32GB-PCIe"),
    (r"V100(?!.*PCI).*16", "V100-16GB-SXM"),
    (r"V100(?!.*(16|PCI))", "V100-32GB-SXM"),
    (r"A10G", "A10G-24GB-PCIe"),
    (r"A10(?![\dG])", "A10-24GB-PCIe"),
    (r"A40(?!\d)", "A40-48GB-PCIe"),
    (r"A6000(?!.*ADA)", "A6000-48GB-PCIe"),
    (r"L40S", "L40S-48GB"),
    (r"L40(?!S)", "L40-48GB-PCIe"),
    (r"L4(?![\dA-Z])", "L4-24GB-PCIe"),
    (r"3090(?!-?TI)", "3090-24GB-PCIe"),
    (r"4090(?!.*LAPTOP)", "4090-24GB-PCIe"),
    (r"5090(?!.*LAPTOP)", "5090-32GB-PCIe"),
)
"""Patterns of device names (first match wins), and the preset's name."""
OMNI_PATH_OF, OMNI_PATH = "A100-80GB-SXM", "A100-80GB-OmniPath"
"""A machine with fewer NVLinks between its devices than others with the same GPU."""
_NETWORK = re.compile(r"(\d+)\s*x\s*(?:[A-Za-z-]+ )?(\d+)\s*Gb(?:ps|/s|it/s)?(?![A-Za-z])[^;,(]*per node")
"""Network adapters of a node, such as `4x200Gb IB per node`; Gb means gigabit, GB does not match."""
_NETWORK_RATE = re.compile(
    r"(\d+(?:\.\d+)?)\s*([GT])b(?:ps|/s|it/s)(?![A-Za-z])"
    r"[^;,(]*?(?:per|/) ?(node|machine|server|GPU|device|rank)"
)
"""The network of a node or device, such as `3.2 Tb/s per node` or `400 Gbps per GPU`."""
_NETWORK_BYTES = re.compile(
    r"(?:InfiniBand|IB|RoCE|EFA|Ethernet|Slingshot|network|NICs?)\b[^;,(]*?(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*GB/s"
    r"(?:[^;,(]*?(?:per|/) ?(GPU|device|rank))?"
)
"""Network in bytes: that of a node, `InfiniBand 8x50 GB/s`, or of a device, `NIC 50 GB/s per GPU`."""
_MEMORY = r"\d+ ?(?-i:Gi?B)"
_CHIP = (
    r"(?:(?:NVIDIA|AMD) )?(?:(?:G?[BH]|[AVL]|MI)\d{1,3}|RTX ?\w+?)[XS]?s?\b"
    rf"(?:[- ](?:SXM\d?|PCIe|NVL\d*|{_MEMORY}|\([^()]*{_MEMORY}[^()]*\)))*"
)
_DEVICE = rf"(?:GPUs?|devices|cards|{_CHIP})"
_MACHINE = re.compile(
    rf"(\d+) ?x? ?{_DEVICE}(?: per | a | in a | ?/ ?)(?:node|machine|server)|"
    rf"nodes? (?:of|x) (\d+) ?x? ?{_DEVICE}",
    re.IGNORECASE,
)
"""Devices of a machine: `4 GPUs per node`, `4 GH200 (96 GB) per node`, `nodes of 8 A100`."""


def load_devices() -> Iterator[tuple[str, Cluster]]:
    """Cluster presets by the name of their device."""
    for name in preset_names("clusters"):
        tree = read_preset("clusters", name)
        assert isinstance(tree, dict), "the name was listed"
        if tree.get("device") == "cuda" and tree.get("device_name"):
            yield str(tree["device_name"]), Cluster(**{"preset": name, **tree})


@functools.cache
def known_devices() -> dict[str, Cluster]:
    """Cluster presets by the name of their device, read once."""
    return dict(load_devices())


def device_name(text: str) -> str | None:
    """The preset name of a device; None if unknown."""
    known = known_devices()
    if text in known:
        return text
    plain = re.sub(r"[\s_]+", "-", text.upper())
    found = next((name for pattern, name in ALIASES if re.search(pattern, plain)), None)
    return found if found in known else None


def build_cluster(cells: Cells, devices: int) -> Cluster:
    """The devices of a row.

    Raises:
        NotExpressedError: There is no preset for the device.
    """
    text = cells.text("gpu")
    name = device_name(text)
    if name is None:
        raise NotExpressedError(f"no figures for the device {text!r}" if text else "gpu not published")
    if name != text:
        cells.remark(f"gpu {text}: predicted as {name}")
    if name == OMNI_PATH_OF and "omni-path" in cells.note:
        name = OMNI_PATH
        cells.remark(f"gpu predicted as {name}: four NVLinks per device")
    cluster = known_devices()[name]
    whole = _machine_size(cells, cluster)
    per_node = _devices_used(devices, whole)
    return dataclasses.replace(
        cluster,
        devices_per_node=per_node,
        nodes=-(-devices // per_node),
        nic_bytes_per_s=_network(cells, whole) or cluster.nic_bytes_per_s,
    )


def _machine_size(cells: Cells, cluster: Cluster) -> int:
    found = _MACHINE.search(cells.text("note"))
    if found and (size := int(found[1] or found[2])) > 0:
        cells.remark(f"{size} devices per node, from the note")
        return size
    return cluster.devices_per_node


def _devices_used(devices: int, whole: int) -> int:
    """Devices per node that a job uses: all, or in a rack of 72 a divisor of the job, such as 64."""
    if devices <= whole:
        return devices
    if whole <= 16:
        return whole
    return next((n for n in range(whole, whole // 2, -1) if devices % n == 0), whole)


def _network(cells: Cells, per_node: int) -> float | None:
    """Network bandwidth per device in bytes/s, if the row or its note has it."""
    given = cells.number_of("nic_gbytes_per_s_per_gpu")
    if given:
        return given * 1e9
    share = _noted_network(cells.text("note"), per_node)
    if share is None:
        return None
    cells.remark(f"network {share:g} GB/s per device, from the note")
    return share * 1e9


def _noted_network(note: str, per_node: int) -> float | None:
    """Network bandwidth per device in 10^9 bytes/s that a note states."""
    if found := _NETWORK.search(note):
        return int(found[1]) * int(found[2]) / 8 / per_node
    if found := _NETWORK_RATE.search(note):
        gbytes = float(found[1]) * (1000 if found[2] == "T" else 1) / 8
        return gbytes if found[3] in ("GPU", "device", "rank") else gbytes / per_node
    found = _NETWORK_BYTES.search(note)
    if not found or not (found[1] or found[3]):
        return None
    return float(found[2]) if found[3] else int(found[1]) * float(found[2]) / per_node
