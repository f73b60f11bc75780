"""What hardware there is: devices, and how they are found."""

from rota.cluster.device import Cluster, Device
from rota.cluster.discover import local

__all__ = ["Cluster", "Device", "local"]
