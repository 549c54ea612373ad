"""The shares of a stage's run time that the disk, the computation and the host take, for a log message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def compute_limiting_shares(
    seconds: float, disk_seconds: float, device_seconds: float, device: torch.device, work: str = "forward pass"
) -> dict[str, float]:
    """Return the share of the run time that each limiting factor takes, in descending order.

    Args:
        seconds: Duration of the run.
        disk_seconds: Time spent waiting for writes.
        device_seconds: Time spent waiting for a GPU. The remaining time is the computation itself on a CPU; with a
            GPU, it is the host's time, mainly for starting kernels.
        device: The device of the model.
        work: Name of the computation.
    """
    host_seconds = seconds - disk_seconds - device_seconds
    if device.type == "cpu":
        times = {"disk": disk_seconds, work: device_seconds + host_seconds}
    else:
        times = {"disk": disk_seconds, work: device_seconds, "host": host_seconds}
    ordered = sorted(times.items(), key=lambda item: item[1], reverse=True)
    return {name: part_seconds / seconds for name, part_seconds in ordered}


def describe_limits(limits: Mapping[str, float]) -> str:
    """Return a log message with the factor that has the largest share, and all shares of `compute_limiting_shares`.

    Example:
        >>> describe_limits({"disk": 0.75, "host": 0.25})
        'limited by: disk (disk 75%, host 25% of the time)'
    """
    shares = ", ".join(f"{name} {share:.0%}" for name, share in limits.items())
    return f"limited by: {next(iter(limits))} ({shares} of the time)"
