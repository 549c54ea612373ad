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
        device_seconds: Time spent waiting for a GPU; ignored on a CPU.
        device: The device of the model.
        work: Name of the computation.
    """
    if device.type == "cpu":
        times = {"disk": disk_seconds, work: seconds - disk_seconds}
    else:
        host_seconds = seconds - disk_seconds - device_seconds  # mainly for starting kernels
        times = {"disk": disk_seconds, work: device_seconds, "host": host_seconds}
    ordered = sorted(times.items(), key=lambda item: item[1], reverse=True)
    return {name: part_seconds / seconds for name, part_seconds in ordered}


def describe_limits(limiting_shares: Mapping[str, float]) -> str:
    """Return a log message with the factor that takes the largest share of the time, and with all shares.

    `limiting_shares` is the result of `compute_limiting_shares`, in which the largest share is first.

    Example:
        >>> describe_limits({"disk": 0.75, "host": 0.25})
        'limited by: disk (disk 75%, host 25% of the time)'
    """
    shares = ", ".join(f"{name} {share:.0%}" for name, share in limiting_shares.items())
    largest = next(iter(limiting_shares))
    return f"limited by: {largest} ({shares} of the time)"
