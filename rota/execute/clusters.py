"""`rota.ray`: the devices of a Ray cluster, for those who have Ray."""

from __future__ import annotations

from rota.cluster import Cluster
from rota.cluster.device import parse_bytes
from rota.errors import InputError
from rota.given import text
from rota.whole import positive


def ray(address: str | None = None, *, devices: int | None = None, memory: str | int | None = None) -> Cluster:
    """The devices of a Ray cluster: a running one (`address`, or RAY_ADDRESS), or one that is started on this machine.

    Each CPU that Ray has is a device, or each GPU if there are any. `devices` limits how many, `memory` is what each
    may use ("4GiB").
    """
    address = None if address is None else text(address, "rota.ray: address")
    devices = None if devices is None else positive(devices, "rota.ray: devices")
    if memory is not None:
        parse_bytes(memory, what="rota.ray: memory")
    try:
        from rota.execute.backends.ray_nodes import ray_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InputError("Ray is not installed; run: pip install 'rota[ray]'") from None
    return ray_cluster(address, devices=devices, memory=memory)
